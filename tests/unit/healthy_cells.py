"""Whole cells of the kinds that people write, with nothing wrong in them. Each seeds itself and leaves its results in `out`."""

from __future__ import annotations

import textwrap
from typing import Final

__all__ = ["CELLS"]

_PRELUDE: Final = """\
import copy, itertools, math, random
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from collections import deque
from torch.utils.data import DataLoader, Dataset, TensorDataset
random.seed(0); np.random.seed(0); torch.manual_seed(0)
"""

_CELLS: Final = {
    "gan": """
        G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
        D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
        history = []
        for step in range(3):
            real = torch.randn(16, 2) * 0.5 + 1
            fake = G(torch.randn(16, 8))
            d_loss = F.binary_cross_entropy_with_logits(D(real), torch.ones(16, 1)) + F.binary_cross_entropy_with_logits(
                D(fake.detach()), torch.zeros(16, 1))
            opt_d.zero_grad(); d_loss.backward(); opt_d.step()
            g_loss = F.binary_cross_entropy_with_logits(D(fake), torch.ones(16, 1))
            opt_g.zero_grad(); g_loss.backward(); opt_g.step()
            history.append((d_loss.item(), g_loss.item()))
        out = [torch.tensor(history), *G.parameters(), *D.parameters()]
    """,
    "vae": """
        class VAE(nn.Module):
            def __init__(self):
                super().__init__()
                self.enc, self.mu, self.logvar = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
                self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

            def forward(self, x):
                h = F.relu(self.enc(x.flatten(1)))
                mu, logvar = self.mu(h), self.logvar(h)
                z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
                return self.dec(z).view_as(x), mu, logvar

        model = VAE()
        opt = torch.optim.Adam(model.parameters(), 1e-3)
        losses = []
        for x in torch.rand(4, 16, 1, 8, 8):
            recon, mu, logvar = model(x)
            rec = F.binary_cross_entropy_with_logits(recon, x, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = (rec + kld) / len(x)
            opt.zero_grad(); loss.backward(); opt.step()
            losses.append(loss.item())
        out = [torch.tensor(losses), *model.parameters()]
    """,
    "lstm tagger with packing": """
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb = nn.Embedding(50, 16, padding_idx=0)
                self.lstm = nn.LSTM(16, 12, bidirectional=True, batch_first=True)
                self.head = nn.Linear(24, 5)

            def forward(self, ids, lengths):
                packed = pack_padded_sequence(self.emb(ids), lengths, batch_first=True, enforce_sorted=False)
                h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
                return self.head(h)

        sentences = [torch.randint(1, 50, (n,)) for n in (3, 9, 5, 7, 4, 6, 8, 2)]
        tags = [torch.randint(0, 5, s.shape) for s in sentences]
        model = Tagger()
        opt = torch.optim.AdamW(model.parameters(), 1e-2)
        for epoch in range(2):
            for i in range(0, 8, 4):
                ids = pad_sequence(sentences[i:i + 4], batch_first=True)
                y = pad_sequence(tags[i:i + 4], batch_first=True, padding_value=-100)
                logits = model(ids, torch.tensor([len(s) for s in sentences[i:i + 4]]))
                loss = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-100)
                opt.zero_grad(); loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
        out = [loss.detach(), *model.parameters()]
    """,
    "small gpt with a key-value cache": """
        class Block(nn.Module):
            def __init__(self, d=32, heads=4):
                super().__init__()
                self.h, self.qkv, self.proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
                self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
                self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

            def forward(self, x, cache=None):
                B, T, C = x.shape
                q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
                if cache is not None:
                    if "k" in cache:
                        k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
                    cache["k"], cache["v"] = k, v
                y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
                x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
                return x + self.mlp(self.ln2(x))

        class GPT(nn.Module):
            def __init__(self, vocab=40, d=32, n=2):
                super().__init__()
                self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(64, d)
                self.blocks, self.head = nn.ModuleList(Block(d) for _ in range(n)), nn.Linear(d, vocab, bias=False)
                self.head.weight = self.tok.weight

            def forward(self, ids, caches=None, start=0):
                x = self.tok(ids) + self.pos(torch.arange(start, start + ids.shape[1]))
                for i, block in enumerate(self.blocks):
                    x = block(x, None if caches is None else caches[i])
                return self.head(x)

        model = GPT().eval()
        ids = torch.randint(0, 40, (2, 5))
        caches = [{} for _ in model.blocks]
        with torch.no_grad():
            logits = model(ids, caches)
            for _ in range(16):
                new = logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, new], dim=1)
                logits = model(new, caches, ids.shape[1] - 1)
        out = [ids, logits]
    """,
    "dqn": """
        class ReplayBuffer:
            def __init__(self, size):
                self.data = deque(maxlen=size)

            def push(self, *transition):
                self.data.append(transition)

            def sample(self, n):
                return map(torch.stack, zip(*random.sample(self.data, n)))

        q, target = (nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(2))
        target.load_state_dict(q.state_dict())
        opt, buffer, state = torch.optim.RMSprop(q.parameters(), 1e-3), ReplayBuffer(64), torch.randn(4)
        rewards = []
        for step in range(36):
            with torch.no_grad():
                action = random.randrange(2) if random.random() < 0.2 else q(state).argmax().item()
            following = 0.9 * state + 0.1 * torch.randn(4) + 0.05 * (2 * action - 1)
            reward = -following.abs().mean()
            buffer.push(state, torch.tensor([action]), reward, following)
            state = following
            rewards.append(reward.item())
            if len(buffer.data) < 16:
                continue
            s, a, r, s2 = buffer.sample(16)
            with torch.no_grad():
                goal = r + 0.99 * target(s2).max(1).values
            loss = F.smooth_l1_loss(q(s).gather(1, a).squeeze(1), goal)
            opt.zero_grad(); loss.backward()
            nn.utils.clip_grad_value_(q.parameters(), 1.0)
            opt.step()
            if step % 10 == 0:
                target.load_state_dict(q.state_dict())
        out = [torch.tensor(rewards), *q.parameters()]
    """,
    "lora": """
        class LoRA(nn.Module):
            def __init__(self, base, rank=4, alpha=8):
                super().__init__()
                self.base, self.scale = base.requires_grad_(False), alpha / rank
                self.A = nn.Parameter(torch.randn(rank, base.in_features) / rank)
                self.B = nn.Parameter(torch.zeros(base.out_features, rank))

            def forward(self, x):
                return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)

        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
        for i in (0, 2):
            model[i] = LoRA(model[i])
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
        for _ in range(8):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
        merged = model[0].base.weight + model[0].scale * model[0].B @ model[0].A
        out = [loss.detach(), merged.detach(), *model.parameters()]
    """,
    "autocast to bfloat16": """
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
        for x, y in zip(torch.randn(5, 8, 3, 12, 12), torch.randint(0, 3, (5, 8))):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
                loss = F.cross_entropy(logits.float(), y)
            opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
        out = [loss.detach(), *model.parameters(), *model.buffers()]
    """,
    "gradient accumulation": """
        model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
        opt = torch.optim.Adam(model.parameters(), 1e-2)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
        loader = DataLoader(TensorDataset(torch.randn(64, 10), torch.randn(64, 1)), batch_size=4, shuffle=True)
        accum, running = 4, 0.0
        for i, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y) / accum
            loss.backward()
            running += loss.item()
            if (i + 1) % accum == 0:
                opt.step(); sched.step(); opt.zero_grad()
        out = [torch.tensor(running), *model.parameters()]
    """,
    "contrastive loss": """
        encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
        opt = torch.optim.Adam(encoder.parameters(), 1e-3)
        for step in range(5):
            x = torch.randn(12, 20)
            views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
            z = F.normalize(encoder(views), dim=1)
            sim = z @ z.T / 0.5
            sim = sim.masked_fill(torch.eye(24, dtype=torch.bool), float("-inf"))
            labels = torch.arange(24).roll(12)
            loss = F.cross_entropy(sim, labels)
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *encoder.parameters()]
    """,
    "diffusion step": """
        class Denoiser(nn.Module):
            def __init__(self, c=8):
                super().__init__()
                self.inc, self.down = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
                self.up, self.outc = nn.ConvTranspose2d(2 * c, c, 2, stride=2), nn.Conv2d(2 * c, 1, 3, padding=1)
                self.time = nn.Linear(8, 2 * c)

            def forward(self, x, t):
                freqs = torch.exp(-math.log(1e4) * torch.arange(4) / 4)
                emb = torch.cat([(t[:, None] * freqs).sin(), (t[:, None] * freqs).cos()], 1)
                a = F.silu(self.inc(x))
                b = F.silu(self.down(a) + self.time(emb)[:, :, None, None])
                return self.outc(torch.cat([a, self.up(b)], 1))

        T = 50
        alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), 0)
        model = Denoiser()
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        for x0 in torch.rand(4, 6, 1, 8, 8) * 2 - 1:
            t, noise = torch.randint(0, T, (6,)), torch.randn_like(x0)
            ab = alpha_bar[t].view(-1, 1, 1, 1)
            loss = F.mse_loss(model(ab.sqrt() * x0 + (1 - ab).sqrt() * noise, t.float()), noise)
            opt.zero_grad(); loss.backward(); opt.step()
        x = torch.randn(2, 1, 8, 8)
        with torch.no_grad():
            for t in reversed(range(0, T, 10)):
                x = x - 0.1 * model(x, torch.full((2,), float(t))) + (0.01 * torch.randn_like(x) if t else 0)
        out = [loss.detach(), x, *model.parameters()]
    """,
    "graph network by scatter": """
        class SAGE(nn.Module):
            def __init__(self, i, o):
                super().__init__()
                self.own, self.other = nn.Linear(i, o), nn.Linear(i, o)

            def forward(self, x, edges):
                source, target = edges
                total = torch.zeros_like(x).index_add_(0, target, x[source])
                degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(source))).clamp(min=1)
                return self.own(x) + self.other(total / degree[:, None])

        n = 30
        x, edges, y = torch.randn(n, 8), torch.randint(0, n, (2, 90)), torch.randint(0, 3, (n,))
        train = torch.rand(n) < 0.6
        conv1, conv2 = SAGE(8, 16), SAGE(16, 3)
        params = [*conv1.parameters(), *conv2.parameters()]
        opt = torch.optim.Adam(params, 1e-2, weight_decay=5e-4)
        for epoch in range(6):
            logits = conv2(F.dropout(conv1(x, edges).relu(), 0.3), edges)
            loss = F.cross_entropy(logits[train], y[train])
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *params]
    """,
    "lbfgs": """
        t = torch.linspace(0, 1, 40)
        y = 1.5 * torch.exp(-2.0 * t) + 0.3
        a, b, c = (torch.tensor(v, requires_grad=True) for v in (1.0, 1.0, 0.0))
        opt = torch.optim.LBFGS([a, b, c], lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

        def closure():
            opt.zero_grad()
            loss = ((a * torch.exp(-b * t) + c - y) ** 2).mean()
            loss.backward()
            return loss

        losses = [opt.step(closure).item() for _ in range(2)]
        out = [torch.tensor(losses), a, b, c]
    """,
    "meta-learning with torch.func": """
        from torch.func import functional_call, grad, vmap

        net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        params = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}

        def task_loss(p, x, y):
            return F.mse_loss(functional_call(net, p, (x,)), y)

        def adapted(p, x, y):
            g = grad(task_loss)(p, x, y)
            return {k: p[k] - 0.1 * g[k] for k in p}

        opt = torch.optim.Adam(params.values(), 1e-2)
        for step in range(4):
            phase = torch.rand(5, 1, 1) * 3
            x = torch.rand(5, 8, 1) * 4 - 2
            y = torch.sin(x + phase)
            loss = vmap(lambda x, y: task_loss(adapted(params, x[:4], y[:4]), x[4:], y[4:]))(x, y).mean()
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *params.values()]
    """,
    "loader with workers": """
        class Noisy(Dataset):
            def __len__(self):
                return 24

            def __getitem__(self, i):
                return torch.full((6,), float(i)) / 24 + 0.01 * torch.randn(6), torch.tensor(float(i % 2))

        loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(3))
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(2):
            for x, y in loader:
                loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
                opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *model.parameters()]
    """,
    "moving average of the weights": """
        model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
        ema = copy.deepcopy(model).requires_grad_(False)
        opt = torch.optim.Adam(model.parameters(), 1e-2)
        best = float("inf")
        for epoch in range(2):
            model.train()
            for x, y in zip(torch.randn(3, 8, 6), torch.randint(0, 2, (3, 8))):
                loss = F.cross_entropy(model(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
                with torch.no_grad():
                    for e, p in zip(ema.parameters(), model.parameters()):
                        e.lerp_(p, 0.1)
                    for e, b in zip(ema.buffers(), model.buffers()):
                        e.copy_(b)
            ema.eval()
            with torch.no_grad():
                val = F.cross_entropy(ema(torch.ones(4, 6)), torch.tensor([0, 1, 0, 1])).item()
            if val < best:
                best, kept = val, copy.deepcopy(ema.state_dict())
        out = [torch.tensor(best), *kept.values()]
    """,
    "distillation": """
        teacher = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 5)).eval().requires_grad_(False)
        student = nn.Linear(10, 5)
        opt = torch.optim.SGD(student.parameters(), 0.5)
        tau = 4.0
        for x in torch.randn(6, 16, 10):
            soft = teacher(x)
            logits = student(x)
            kd = F.kl_div(F.log_softmax(logits / tau, 1), F.softmax(soft / tau, 1), reduction="batchmean") * tau**2
            loss = 0.7 * kd + 0.3 * F.cross_entropy(logits, soft.argmax(1), label_smoothing=0.1)
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *student.parameters()]
    """,
    "masked attention": """
        attn = nn.MultiheadAttention(16, 4, batch_first=True)
        norm, head = nn.LayerNorm(16), nn.Linear(16, 7)
        params = [*attn.parameters(), *norm.parameters(), *head.parameters()]
        opt = torch.optim.Adam(params, 1e-3)
        causal = torch.triu(torch.full((6, 6), float("-inf")), diagonal=1)
        for step in range(4):
            x, y = torch.randn(3, 6, 16), torch.randint(0, 7, (3, 6))
            pad = torch.arange(6)[None] >= torch.tensor([6, 4, 5])[:, None]
            h, weights = attn(x, x, x, attn_mask=causal, key_padding_mask=torch.zeros(3, 6).masked_fill(pad, float("-inf")))
            logits = head(norm(x + h))
            loss = F.cross_entropy(logits[~pad], y[~pad])
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), weights.detach(), *params]
    """,
    "quantization-aware training": """
        class Rounded(torch.autograd.Function):
            @staticmethod
            def forward(ctx, w, scale):
                ctx.save_for_backward(w.abs() <= scale * 7)
                return torch.clamp((w / scale).round(), -8, 7) * scale

            @staticmethod
            def backward(ctx, g):
                inside, = ctx.saved_tensors
                return g * inside, None

        class QLinear(nn.Linear):
            def forward(self, x):
                return F.linear(x, Rounded.apply(self.weight, self.weight.detach().abs().max() / 7), self.bias)

        model = nn.Sequential(QLinear(8, 16), nn.Hardswish(), QLinear(16, 3))
        opt = torch.optim.SGD(model.parameters(), 0.05)
        for x, y in zip(torch.randn(5, 12, 8), torch.randint(0, 3, (5, 12))):
            x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *model.parameters()]
    """,
    "mixup": """
        model = nn.Sequential(nn.Flatten(), nn.Linear(27, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        opt = torch.optim.AdamW(model.parameters(), 1e-2)
        beta = torch.distributions.Beta(0.4, 0.4)
        for x, y in zip(torch.rand(5, 10, 3, 3, 3), torch.randint(0, 4, (5, 10))):
            lam, order = beta.sample().item(), torch.randperm(10)
            if random.random() < 0.5:
                x = x.flip(3)
            logits = model(lam * x + (1 - lam) * x[order])
            loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[order])
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *model.parameters()]
    """,
    "activation checkpointing": """
        from torch.utils.checkpoint import checkpoint

        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                parts = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(4)]
                self.blocks = nn.ModuleList(parts)

            def forward(self, x):
                for block in self.blocks:
                    x = x + checkpoint(block, x, use_reentrant=False)
                return x

        model = Deep()
        opt = torch.optim.Adam(model.parameters(), 1e-3)
        for x in torch.randn(4, 8, 16):
            loss = F.mse_loss(model(x), torch.roll(x, 1, 1))
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), *model.parameters()]
    """,
    "k-fold cross-validation": """
        X, Y = torch.randn(40, 5), torch.randint(0, 2, (40,))
        folds, scores, models = torch.randperm(40).view(4, 10), [], []
        for k in range(4):
            held, rest = folds[k], torch.cat([folds[j] for j in range(4) if j != k])
            model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
            opt = torch.optim.Adam(model.parameters(), 1e-2)
            for epoch in range(2):
                for i in range(0, 30, 15):
                    batch = rest[i:i + 15]
                    loss = F.cross_entropy(model(X[batch]), Y[batch])
                    opt.zero_grad(); loss.backward(); opt.step()
            model.eval()
            with torch.no_grad():
                scores.append((model(X[held]).argmax(1) == Y[held]).float().mean().item())
            models.append(model)
        with torch.no_grad():
            ensemble = torch.stack([m(X).softmax(1) for m in models]).mean(0)
        out = [torch.tensor(scores), ensemble]
    """,
    "hyperparameter sweep": """
        x, y = torch.randn(32, 6), torch.randn(32, 1)
        results = {}
        for lr, width, act in itertools.product([1e-3, 1e-2], [8], [nn.ReLU, nn.Tanh]):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, width), act(), nn.Linear(width, 1))
            opt = torch.optim.Adam(model.parameters(), lr=lr)
            for _ in range(4):
                loss = F.mse_loss(model(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
            results[lr, width, act.__name__] = loss.item()
        best = min(results, key=results.get)
        out = [torch.tensor(list(results.values()))]
    """,
    "sampling from a language model": """
        class CharRNN(nn.Module):
            def __init__(self, vocab=30):
                super().__init__()
                self.emb, self.gru, self.head = nn.Embedding(vocab, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, vocab)

            def forward(self, ids, h=None):
                y, h = self.gru(self.emb(ids), h)
                return self.head(y), h

            @torch.no_grad()
            def generate(self, ids, n, temperature=0.8, top_k=5):
                logits, h = self(ids)
                for _ in range(n):
                    last = logits[:, -1] / temperature
                    last = last.masked_fill(last < last.topk(top_k).values[:, -1:], float("-inf"))
                    new = torch.multinomial(last.softmax(-1), 1)
                    ids = torch.cat([ids, new], dim=1)
                    logits, h = self(new, h)
                return ids

        model = CharRNN().eval()
        texts = [model.generate(torch.randint(0, 30, (1, 4)), 10) for _ in range(4)]
        out = texts
    """,
    "sparse embeddings": """
        users, items = (nn.Embedding(100, 8, sparse=True) for _ in range(2))
        bag = nn.EmbeddingBag(50, 8, mode="mean", sparse=True)
        opt = torch.optim.SparseAdam([*users.parameters(), *items.parameters(), *bag.parameters()], lr=1e-2)
        for step in range(5):
            u, i, r = torch.randint(0, 100, (16,)), torch.randint(0, 100, (16,)), torch.rand(16) * 5
            words, offsets = torch.randint(0, 50, (40,)), torch.arange(0, 40, 40 // 16)[:16]
            loss = F.mse_loss(((users(u) + bag(words, offsets)) * items(i)).sum(1), r)
            opt.zero_grad(); loss.backward(); opt.step()
        out = [loss.detach(), users.weight, items.weight, bag.weight]
    """,
}

CELLS: Final = {name: _PRELUDE + textwrap.dedent(text).strip("\n") + "\n" for name, text in _CELLS.items()}
"""By kind."""
