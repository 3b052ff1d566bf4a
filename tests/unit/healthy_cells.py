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
