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
)

_STOPPED = (
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
)

HEALTHY = _GRAPHS + _STOPPED + _LOOPS
