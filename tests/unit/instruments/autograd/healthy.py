"""Programs of real kinds with nothing wrong: none of them may give a finding."""

from __future__ import annotations

from dataclasses import dataclass

from tests.unit.instruments.autograd.case import HEAD

__all__ = ["HEALTHY", "Program"]


@dataclass(frozen=True)
class Program:
    """A healthy program."""

    name: str
    text: str

    @property
    def body(self) -> str:
        return HEAD + self.text


_GRAPHS = (
    Program(
        "two losses with retain_graph",
        """\
enc, a, b = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
opt = torch.optim.Adam([*enc.parameters(), *a.parameters(), *b.parameters()])
for x in torch.randn(3, 6, 4):
    z = enc(x).tanh()
    opt.zero_grad()
    a(z).square().mean().backward(retain_graph=True)
    b(z).abs().mean().backward()
    opt.step()
""",
    ),
    Program(
        "WGAN with a gradient penalty",
        """\
G = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
D = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9))

def penalty(real, fake):
    mix = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_(True)
    (grad,) = torch.autograd.grad(D(mix).sum(), mix, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()

for step in range(6):
    real = torch.randn(8, 4)
    fake = G(torch.randn(8, 3))
    opt_d.zero_grad()
    d_loss = D(fake.detach()).mean() - D(real).mean() + 10 * penalty(real, fake.detach())
    d_loss.backward()
    opt_d.step()
    if step % 2 == 1:
        opt_g.zero_grad()
        g_loss = -D(G(torch.randn(8, 3))).mean()
        g_loss.backward()
        opt_g.step()
""",
    ),
    Program(
        "DCGAN: errD in two backwards, then errG through the same fakes",
        """\
netG = nn.Sequential(nn.ConvTranspose2d(4, 8, 4), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh())
netD = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4), nn.Sigmoid())
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for data in torch.randn(3, 5, 1, 8, 8):
    netD.zero_grad()
    label = torch.full((5,), 1.0)
    errD_real = criterion(netD(data).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(5, 4, 1, 1))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
""",
    ),
    Program(
        "checkpoints of both kinds",
        """\
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
tail = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
opt = torch.optim.AdamW([*blocks.parameters(), *tail.parameters()])
for x in torch.randn(4, 5, 6):
    h = x.requires_grad_()
    h = checkpoint(blocks[0], h, use_reentrant=True)
    h = checkpoint(blocks[1], h, use_reentrant=False)
    h = checkpoint(lambda z: blocks[2](z) + z, h, use_reentrant=False)
    loss = checkpoint_sequential(tail, 2, h, use_reentrant=False).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "torch.func: per-sample gradients and a Jacobian",
        """\
from torch.func import functional_call, grad, jacrev, vmap

model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
params = {k: v.detach() for k, v in model.named_parameters()}

def loss_of(p, x, y):
    return (functional_call(model, p, (x[None],)).squeeze() - y) ** 2

per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, torch.randn(4, 3), torch.randn(4))
jac = jacrev(lambda x: model(x))(torch.randn(3))
hess = torch.autograd.functional.hessian(lambda x: model(x).sum(), torch.randn(3))
assert per_sample["0.weight"].shape == (4, 5, 3)
""",
    ),
    Program(
        "training a network that Dynamo compiled",
        """\
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
fast = torch.compile(model, backend="eager")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = F.cross_entropy(fast(torch.randn(5, 4)), torch.randint(2, (5,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a compiled step with AOTAutograd",
        """\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters())

@torch.compile(backend="aot_eager")
def forward(x, y):
    return F.mse_loss(model(x), y)

for _ in range(3):
    opt.zero_grad()
    loss = forward(torch.randn(5, 4), torch.randn(5, 1))
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "AMP with a scaler, clipping and accumulation",
        """\
model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
accumulate = 2
opt.zero_grad(set_to_none=True)
for i in range(8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(torch.randn(4, 6)), torch.randint(3, (4,))) / accumulate
    scaler.scale(loss).backward()
    if (i + 1) % accumulate == 0:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
""",
    ),
    Program(
        "hooks on tensors, modules and accumulated gradients",
        """\
norms, seen = [], []
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].norm().item()))
model[2].register_forward_hook(lambda m, i, o: o * 1.0)
model[0].weight.register_hook(lambda g: g.clamp(-1, 1))
model[2].weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.randn(3, 4, 3):
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "an optimizer in the backward: each parameter steps in its own hook",
        """\
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

def hook(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for x in torch.randn(4, 5, 3):
    loss = model(x).square().mean()
    loss.backward()
""",
    ),
    Program(
        "LBFGS with a closure",
        """\
model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
x = torch.rand(20, 2)
y = (x[:, :1] * 3).sin()
opt = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

def closure():
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss

for _ in range(3):
    opt.step(closure)
""",
    ),
    Program(
        "gradient accumulation with a last partial step",
        """\
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(2, 4), torch.randint(2, (2,))) for _ in range(7)]
for epoch in range(2):
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        if (i + 1) % 3 == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
""",
    ),
    Program(
        "packed sequences through a bidirectional GRU",
        """\
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

emb, gru, fc = nn.Embedding(12, 5, padding_idx=0), nn.GRU(5, 4, bidirectional=True, batch_first=True), nn.Linear(8, 3)
opt = torch.optim.Adam([*emb.parameters(), *gru.parameters(), *fc.parameters()])
for _ in range(3):
    ids, lengths = torch.randint(1, 12, (3, 6)), torch.tensor([6, 3, 5])
    packed = pack_padded_sequence(emb(ids), lengths, batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(gru(packed)[0], batch_first=True)
    loss = F.cross_entropy(fc(out[torch.arange(3), lengths - 1]), torch.randint(3, (3,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "MAML with second-order gradients",
        """\
from torch.func import functional_call

net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
meta = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(3):
    meta_loss = 0.0
    for task in range(2):
        phase = torch.rand(1) * 3
        xs, xq = torch.rand(5, 1), torch.rand(5, 1)
        fast = dict(net.named_parameters())
        for inner in range(2):
            inner_loss = F.mse_loss(functional_call(net, fast, (xs,)), (xs + phase).sin())
            grads = torch.autograd.grad(inner_loss, fast.values(), create_graph=True)
            fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), grads)}
        meta_loss = meta_loss + F.mse_loss(functional_call(net, fast, (xq,)), (xq + phase).sin())
    meta.zero_grad()
    meta_loss.backward()
    meta.step()
""",
    ),
    Program(
        "safe writes in place: dropout, ReLU, masks, the first use of a buffer",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.a(x)
        h += 1.0
        h = F.relu_(h)
        out = torch.zeros(len(x), 2)
        out[:, :] = self.b(h)
        out[:, 0] *= 2
        return out.masked_fill_(torch.zeros(len(x), 2, dtype=torch.bool), 0.0)

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x in torch.randn(3, 4, 6):
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
)

_STOPPED = (
    Program(
        "a frozen backbone and a trained head",
        """\
backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
backbone.requires_grad_(False).eval()
model = nn.Sequential(backbone, nn.Linear(6, 2))
opt = torch.optim.SGD(model[1].parameters(), lr=0.1)
for x, y in [(torch.randn(4, 3, 6, 6), torch.randint(2, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "LoRA: everything frozen but the adapters",
        """\
class LoRALinear(nn.Module):
    def __init__(self, base, r=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.01)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.t() @ self.lora_B.t()

model = nn.Sequential(nn.Embedding(10, 6), LoRALinear(nn.Linear(6, 6)), nn.GELU(), LoRALinear(nn.Linear(6, 10)))
model[0].requires_grad_(False)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for ids in torch.randint(10, (4, 3, 5)):
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "DQN with a target network",
        """\
import copy

q = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
target = copy.deepcopy(q)
opt = torch.optim.Adam(q.parameters(), lr=1e-3)
for step in range(6):
    s, a, r, s2, d = torch.randn(8, 4), torch.randint(2, (8, 1)), torch.randn(8), torch.randn(8, 4), torch.zeros(8)
    with torch.no_grad():
        y = r + 0.99 * (1 - d) * target(s2).amax(1)
    loss = F.smooth_l1_loss(q(s).gather(1, a).squeeze(1), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(q.parameters(), 100)
    opt.step()
    if step % 2 == 0:
        target.load_state_dict(q.state_dict())
""",
    ),
    Program(
        "an EMA of the weights, evaluated at the end",
        """\
import copy

model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
ema = copy.deepcopy(model)
for p in ema.parameters():
    p.requires_grad_(False)
opt = torch.optim.AdamW(model.parameters())
for x, y in [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for e, p in zip(ema.state_dict().values(), model.state_dict().values()):
            e.copy_(0.9 * e + 0.1 * p) if e.dtype.is_floating_point else e.copy_(p)
ema.eval()
with torch.no_grad():
    ema(torch.randn(3, 4))
""",
    ),
    Program(
        "SimSiam: the same encoder with and without gradient",
        """\
f = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))
h = nn.Linear(5, 5)
opt = torch.optim.SGD([*f.parameters(), *h.parameters()], lr=0.05)
for x in torch.randn(3, 8, 6):
    z1, z2 = f(x + 0.1 * torch.randn_like(x)), f(x + 0.1 * torch.randn_like(x))
    loss = -(F.cosine_similarity(h(z1), z2.detach()).mean() + F.cosine_similarity(h(z2), z1.detach()).mean()) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "PPO: rollouts under no_grad, then epochs of updates",
        """\
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def act(self, obs, action=None):
        dist = torch.distributions.Categorical(logits=self.actor(obs))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.critic(obs).squeeze(-1)

agent = ActorCritic()
opt = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
for update in range(2):
    obs, buffer = torch.randn(6, 4), []
    for t in range(4):
        with torch.no_grad():
            action, logp, _, value = agent.act(obs)
        buffer.append((obs, action, logp, value, torch.randn(6)))
        obs = torch.randn(6, 4)
    b_obs, b_act, b_logp, b_val, b_rew = (torch.cat(items) for items in zip(*buffer))
    adv = b_rew - b_val
    for epoch in range(2):
        for idx in torch.randperm(24).split(12):
            _, logp, ent, val = agent.act(b_obs[idx], b_act[idx])
            ratio = (logp - b_logp[idx]).exp()
            a = (adv[idx] - adv[idx].mean()) / (adv[idx].std() + 1e-8)
            pg = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
            loss = pg - 0.01 * ent.mean() + 0.5 * (val - b_rew[idx]).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
""",
    ),
    Program(
        "greedy layer-wise autoencoders",
        """\
data = torch.randn(16, 8)
layers = [(nn.Linear(8, 6), nn.Linear(6, 8)), (nn.Linear(6, 4), nn.Linear(4, 6))]
features = data
for enc, dec in layers:
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-2)
    for _ in range(3):
        loss = F.mse_loss(dec(enc(features).relu()), features)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        features = enc(features).relu()
""",
    ),
    Program(
        "a perceptual loss with a VGG-like network in eval mode",
        """\
class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True))
        second = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True))
        self.slices = nn.ModuleList([first, second])
        for p in self.parameters():
            p.requires_grad = False

    def forward(self, x):
        out = []
        for s in self.slices:
            x = s(x)
            out.append(x)
        return out

vgg = VGG().eval()
net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1))
opt = torch.optim.Adam(net.parameters())
for x in torch.rand(3, 2, 3, 8, 8):
    out = net(x)
    loss = sum(F.mse_loss(a, b.detach()) for a, b in zip(vgg(out), vgg(x))) + F.l1_loss(out, x)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a perceptual network that nobody froze and nobody trains",
        """\
loss_net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
model = nn.Conv2d(1, 1, 3, padding=1)
opt = torch.optim.Adam(model.parameters())
for x in torch.rand(3, 2, 1, 8, 8):
    loss = F.mse_loss(loss_net(model(x)), loss_net(x).detach())
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "FGSM and PGD attacks on a trained model",
        """\
model = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)).eval()

def fgsm(x, y, eps):
    x = x.clone().requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    return (x + eps * x.grad.sign()).clamp(0, 1).detach()

def pgd(x, y, eps, steps=3):
    adv = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(steps):
        adv.requires_grad_(True)
        (g,) = torch.autograd.grad(F.cross_entropy(model(adv), y), adv)
        adv = (adv.detach() + 0.01 * g.sign()).clamp(x - eps, x + eps).clamp(0, 1)
    return adv

x, y = torch.rand(4, 1, 4, 4), torch.randint(3, (4,))
fgsm(x, y, 0.1)
pgd(x, y, 0.1)
""",
    ),
    Program(
        "adversarial training: attack in each step",
        """\
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in [(torch.randn(4, 6), torch.randint(2, (4,))) for _ in range(3)]:
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        delta.data = (delta + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1)
        delta.grad.zero_()
    opt.zero_grad()
    F.cross_entropy(model(x + delta.detach()), y).backward()
    opt.step()
""",
    ),
)

_LOOPS = (
    Program(
        "training with validation under no_grad in eval mode",
        """\
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=9)
train = DataLoader(TensorDataset(torch.randn(24, 6), torch.randint(3, (24,))), 8, shuffle=True)
val = DataLoader(TensorDataset(torch.randn(16, 6), torch.randint(3, (16,))), 8)
best = float("inf")
for epoch in range(3):
    model.train()
    for x, y in train:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        sched.step()
    model.eval()
    with torch.no_grad():
        total = sum(F.cross_entropy(model(x), y).item() for x, y in val)
    best = min(best, total)
""",
    ),
    Program(
        "a mixture of experts, some of them without a token",
        """\
class MoE(nn.Module):
    def __init__(self, dim=6, experts=8):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(experts))

    def forward(self, x):
        weight, index = self.router(x).softmax(-1).topk(1, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (index[:, 0] == i).nonzero()[:, 0]
            if len(rows):
                out.index_add_(0, rows, weight[rows] * expert(x[rows]))
        return out

model = nn.Sequential(nn.Linear(4, 6), MoE(), nn.Linear(6, 2))
opt = torch.optim.Adam(model.parameters())
for x, y in [(torch.randn(3, 4), torch.randint(2, (3,))) for _ in range(4)]:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "heads of several tasks in turn",
        """\
class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.heads = nn.ModuleDict({"pos": nn.Linear(8, 4), "ner": nn.Linear(8, 3), "sent": nn.Linear(8, 2)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))

net = MultiTask()
opt = torch.optim.Adam(net.parameters())
for step in range(6):
    task, classes = [("pos", 4), ("ner", 3), ("sent", 2)][step % 3]
    loss = F.cross_entropy(net(torch.randn(4, 5), task), torch.randint(classes, (4,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "SWA with a BatchNorm update at the end",
        """\
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
swa = AveragedModel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
sched = SWALR(opt, swa_lr=0.05)
loader = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(3)]
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    swa.update_parameters(model)
    sched.step()
update_bn([x for x, _ in loader], swa)
swa.eval()
with torch.no_grad():
    swa(torch.randn(2, 4))
""",
    ),
    Program(
        "sparse gradients of an embedding",
        """\
emb, head = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 2)
opt_s, opt_d = torch.optim.SparseAdam(emb.parameters()), torch.optim.Adam(head.parameters())
for ids, y in [(torch.randint(50, (4, 3)), torch.randint(2, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(head(emb(ids).mean(1)), y)
    opt_s.zero_grad()
    opt_d.zero_grad()
    loss.backward()
    opt_s.step()
    opt_d.step()
""",
    ),
    Program(
        "zero_grad(set_to_none=False) after the step",
        """\
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for x in torch.randn(4, 5, 4):
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
""",
    ),
    Program(
        "karpathy's way: p.data and grad set to None",
        """\
C, W = torch.randn(10, 3, requires_grad=True), torch.randn(6, 10, requires_grad=True)
for k in range(4):
    ix, y = torch.randint(10, (8, 2)), torch.randint(10, (8,))
    logits = C[ix].view(-1, 6) @ W
    loss = F.cross_entropy(logits, y)
    for p in (C, W):
        p.grad = None
    loss.backward()
    for p in (C, W):
        p.data += -0.1 * p.grad
""",
    ),
    Program(
        "a diffusion model: a random time step in each batch",
        """\
betas = torch.linspace(1e-4, 0.02, 20)
alphas = torch.cumprod(1 - betas, 0)
net = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))
opt = torch.optim.AdamW(net.parameters())
for x0 in torch.randn(4, 8, 4):
    t = torch.randint(20, (8,))
    noise = torch.randn_like(x0)
    a = alphas[t][:, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    loss = F.mse_loss(net(torch.cat([xt, t[:, None] / 20], 1)), noise)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()

@torch.no_grad()
def sample(n):
    x = torch.randn(n, 4)
    for t in reversed(range(20)):
        eps = net(torch.cat([x, torch.full((n, 1), t / 20)], 1))
        x = (x - betas[t] / (1 - alphas[t]).sqrt() * eps) / (1 - betas[t]).sqrt()
    return x

sample(3)
""",
    ),
    Program(
        "REINFORCE with a baseline",
        """\
policy, baseline = nn.Linear(3, 2), nn.Linear(3, 1)
opt = torch.optim.Adam([*policy.parameters(), *baseline.parameters()], lr=1e-2)
for episode in range(4):
    logps, values, rewards, s = [], [], [], torch.randn(3)
    for t in range(5):
        dist = torch.distributions.Categorical(logits=policy(s))
        a = dist.sample()
        logps.append(dist.log_prob(a))
        values.append(baseline(s).squeeze())
        rewards.append(float(a.item() == (s[0] > 0)))
        s = torch.randn(3)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    adv = returns - torch.stack(values)
    loss = -(torch.stack(logps) * adv.detach()).mean() + adv.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "DDP of one process over gloo",
        """\
import os
import tempfile
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        ddp = DistributedDataParallel(model)
        opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for x, y in [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(4)]:
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        del ddp
    finally:
        dist.destroy_process_group()
""",
    ),
    Program(
        "a tiny GPT-2 with gradient checkpointing",
        """\
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in torch.randint(13, (3, 2, 6)):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a transformer encoder with padding and fused attention",
        """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 8, padding_idx=0)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 2)

    def forward(self, ids):
        h = self.enc(self.emb(ids), src_key_padding_mask=ids == 0)
        return self.fc(h[:, 0])

model = Model()
opt = torch.optim.Adam(model.parameters())
for _ in range(3):
    ids = torch.randint(1, 12, (3, 6))
    ids[1:, 4:] = 0
    loss = F.cross_entropy(model(ids), torch.randint(2, (3,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
model.eval()
with torch.inference_mode():
    model(ids)
""",
    ),
    Program(
        "domain adaptation with a gradient reversal layer",
        """\
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.alpha * grad, None

feat, label, domain = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3), nn.Linear(8, 2)
opt = torch.optim.SGD([*feat.parameters(), *label.parameters(), *domain.parameters()], lr=0.1)
for i in range(4):
    fs, ft = feat(torch.randn(5, 4)), feat(torch.randn(5, 4) + 1)
    d = domain(Reverse.apply(torch.cat([fs, ft]), i / 4))
    loss = F.cross_entropy(label(fs), torch.randint(3, (5,))) + F.cross_entropy(d, torch.tensor([0] * 5 + [1] * 5))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "Dropout at inference, for a mean and its spread",
        """\
net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 2))
x = torch.randn(20, 4)
with torch.no_grad():
    samples = torch.stack([net(x).softmax(1) for _ in range(30)])
    print(net(x).shape, samples.std(0))
""",
    ),
    Program(
        "a forward to look at the sizes",
        """\
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2))
out = net(torch.randn(2, 1, 8, 8))
print(out.shape, out.mean().item())
""",
    ),
    Program(
        "shares of a data set that are added up",
        """\
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 4), torch.arange(24) % 3), batch_size=6)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
total = 0.0
for x, y in loader:
    out = net(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    right = (out.argmax(1) == y).sum().item()
    part = right / len(loader.dataset)
    total = total + part
""",
    ),
    Program(
        "another name for the model, at the last step",
        """\
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(6):
    loss = F.mse_loss(net(torch.randn(5, 3)), torch.randn(5, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it == 5:
        final = net
""",
    ),
    Program(
        "two models in turn under one name",
        """\
a, b = nn.Linear(3, 1), nn.Linear(3, 1)
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for it in range(6):
    if it % 2:
        net = a
    else:
        net = b
    loss = F.mse_loss(net(torch.randn(5, 3)), torch.randn(5, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a NeRF-like scene of tensors without modules",
        """\
grid = torch.nn.Parameter(torch.randn(1, 2, 4, 4, 4) * 0.1)
sh = torch.zeros(2, 3, requires_grad=True)
opt = torch.optim.Adam([{"params": [grid], "lr": 1e-2}, {"params": [sh], "lr": 1e-3}])
for it in range(4):
    pts = torch.rand(1, 1, 5, 6, 3) * 2 - 1
    f = F.grid_sample(grid, pts, align_corners=True)[0, :, 0].permute(1, 2, 0)
    sigma = F.softplus(f[..., :1])
    alpha = 1 - torch.exp(-sigma * 0.1)
    trans = torch.cumprod(torch.cat([torch.ones(5, 1, 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    rgb = (alpha * trans * torch.sigmoid(f @ sh)).sum(1)
    loss = F.mse_loss(rgb, torch.full_like(rgb, 0.5))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
)

HEALTHY = _GRAPHS + _STOPPED + _LOOPS
