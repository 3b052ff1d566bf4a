"""Whole notebooks with one planted fault: helpers of other files, several cells, many idioms; and healthy ones of further kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["FAULTY", "HEALTHY", "HELPER", "MARKED", "Notebook"]

MARKED: Final = re.compile(r"#> (?P<fields>[a-z, ]+)$")


@dataclass(frozen=True, kw_only=True)
class Notebook:
    """Cells, the magic among them with ``-o r``; lines that a finding names end in ``#> location``, ``saved``, ``first`` or ``shared``."""

    name: str
    cells: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    """Any of these is right; empty where nothing is to be found."""
    ops: tuple[str, ...] = ()
    writer_ops: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    fix: str = ""
    """A regular expression that the fix matches."""

    @property
    def all_cells(self) -> tuple[str, ...]:
        """With the imports, as In[1]."""
        return ("import math, random\nimport torch, torch.nn as nn, torch.nn.functional as F\n", *self.cells)


HELPER: Final = """\
import torch
import torch.nn as nn
import torch.nn.functional as F

def train_step(model, optimizer, x, y, criterion=F.mse_loss):
    optimizer.zero_grad()
    out = model(x)
    loss = criterion(out, y)
    loss.backward()
    optimizer.step()
    return loss.item()

class Frozen(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
    @torch.no_grad()  #> location
    def forward(self, x):
        return self.lin(x).relu()

def evaluate(model, x):
    model.eval()
    with torch.no_grad():
        return model(x).mean().item()
"""
"""``autograd_helper.py``, which some of them import."""

FAULTY: Final = (
    Notebook(
        name="the best weights of a training are the model's own",
        kinds=("shared_memory",),
        cells=(
            """\
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best = None
for _ in range(3):
    best = model.state_dict()  #> location
    opt.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    opt.step()
""",
            "%%autograd -o r\nmodel.load_state_dict(best)\nwith torch.no_grad():\n    y = model(torch.randn(4, 3))",
        ),
        fix="copy.deepcopy",
    ),
    Notebook(
        name="the gradient of what a module has computed",
        kinds=("no_gradient",),
        cells=(
            """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        self.hidden = self.first(x)  #> saved
        return self.second(self.hidden.tanh())
""",
            """\
%%autograd -o r
net = Net()
net(torch.randn(3, 4)).sum().backward()
print(net.hidden.grad)  #> location
""",
        ),
        tensors=("net.hidden",),
        fix=r"retain_grad\(\)",
    ),
    Notebook(
        name="multi-line statement: item in a new tensor",
        cells=(
            """\
%%autograd -o r
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())
for x in torch.randn(3, 5, 4):
    loss = torch.tensor(  #> location
        [net(row).pow(2).item()  #> location
         for row in x],
    ).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ),
        kinds=("cut",),
        fix="stack|stay with PyTorch ops",
    ),
    Notebook(
        name="a lambda criterion with argmax",
        cells=(
            """\
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
criterion = lambda out, y: (out.argmax(1) == y).float().mean()  #> location
""",
            """\
%%autograd -o r
for x, y in zip(torch.randn(2, 5, 4), torch.randint(3, (2, 5))):
    opt.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    opt.step()
""",
        ),
        kinds=("cut",),
        ops=("argmax", "eq"),
    ),
    Notebook(
        name="try/except around backward of the user's",
        cells=(
            """\
%%autograd -o r
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
h = torch.zeros(5, 1)
for i, x in enumerate(torch.randn(4, 5, 4)):
    h = torch.tanh(net(x) + h)
    loss = h.mean()
    opt.zero_grad()
    try:
        loss.backward()  #> location
    except RuntimeError as error:
        print("skipped", type(error).__name__)
        raise ValueError("training failed") from error
    opt.step()
""",
        ),
        kinds=("second_backward",),
        tensors=("h",),
    ),
    Notebook(
        name="decorated training step",
        cells=(
            """\
import functools
def timed(f):
    @functools.wraps(f)
    def inner(*a, **k):
        return f(*a, **k)
    return inner

class Trainer:
    def __init__(self):
        self.enc, self.dec = nn.Linear(4, 4), nn.Linear(4, 4)
        self.opt = torch.optim.Adam(self.dec.parameters(), lr=1e-3)  #> location
        self.opt2 = torch.optim.Adam([p for n, p in self.enc.named_parameters() if "bias" in n], lr=1e-3)  #> location

    @timed
    def step(self, x):
        loss = F.mse_loss(self.dec(torch.tanh(self.enc(x))), x)
        for o in (self.opt, self.opt2):
            o.zero_grad()
        loss.backward()
        for o in (self.opt, self.opt2):
            o.step()
        return loss.item()
""",
            """\
%%autograd -o r
t = Trainer()
losses = [t.step(x) for x in torch.randn(4, 5, 4)]
""",
        ),
        kinds=("not_in_optimizer",),
        parameters=("weight",),
    ),
    Notebook(
        name="two models in a list comprehension share an encoder graph",
        cells=(
            """\
%%autograd -o r
enc = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
heads = [nn.Linear(8, 1) for _ in range(3)]
opt = torch.optim.SGD([p for m in (enc, *heads) for p in m.parameters()], lr=0.1)
for x in torch.randn(2, 5, 4):
    z = enc(x)  #> shared
    losses = [head(z).pow(2).mean() for head in heads]
    opt.zero_grad()
    [l.backward() for l in losses]  #> location
    opt.step()
""",
        ),
        kinds=("second_backward",),
        fix=r"sum\(losses\)|losses|retain_graph",
    ),
    Notebook(
        name="Sequential with Dropout(inplace) after Sigmoid",
        cells=(
            """\
net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Dropout(0.5, inplace=True), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
""",
            """\
%%autograd -o r
for x in torch.randn(2, 5, 4):
    loss = net(x).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        ),
        kinds=("inplace",),
        ops=("sigmoid",),
        writer_ops=("mul_",),
        modules=("2",),
        fix="inplace=False",
    ),
    Notebook(
        name="step function from a file: softmax in the model and criterion cross_entropy",
        cells=(
            """\
import autograd_helper
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.act = nn.Softmax(-1)
    def forward(self, x):
        return self.act(self.body(x))  #> location
m = M()
opt = torch.optim.SGD(m.parameters(), lr=0.1)
""",
            """\
%%autograd -o r
for _ in range(3):
    autograd_helper.train_step(m, opt, torch.randn(6, 4), torch.randint(3, (6,)), nn.CrossEntropyLoss())
""",
        ),
        kinds=("double_softmax",),
        modules=("act",),
    ),
    Notebook(
        name="frozen module class from a file in the middle",
        cells=(
            """\
from autograd_helper import Frozen
model = nn.Sequential(nn.Linear(4, 4), Frozen(4), nn.Linear(4, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
""",
            """\
%%autograd -o r
for x in torch.randn(4, 5, 4):
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ),
        kinds=("no_gradient", "grad_disabled"),
        parameters=("0.bias", "0.weight", "1.lin.bias", "1.lin.weight"),
    ),
    Notebook(
        name="for _ in range inside a function, same loss twice",
        cells=(
            """\
def fit(model, x, y, epochs):
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    out = model(x)
    loss = F.mse_loss(out, y)
    for _ in range(epochs):
        opt.zero_grad()
        loss.backward()  #> location, first
        opt.step()
    return loss
""",
            """\
%%autograd -o r
fit(nn.Linear(3, 1), torch.randn(8, 3), torch.randn(8, 1), 5)
""",
        ),
        kinds=("second_backward",),
        tensors=("loss",),
    ),
    Notebook(
        name="chained comparison of losses: min over python",
        cells=(
            """\
%%autograd -o r
a, b = nn.Linear(4, 2), nn.Linear(4, 2)
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for x in torch.randn(3, 5, 4):
    la, lb = a(x).pow(2).mean(), b(x).abs().mean()
    weights = torch.softmax(torch.tensor([la, lb]), 0)  #> location
    loss = (weights * torch.as_tensor([la, lb])).sum()  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ),
        kinds=("cut",),
        fix=r"torch\.stack\(\[la, lb\]\)",
    ),
    Notebook(
        name="walrus, one-liners with semicolons and a while loop",
        cells=(
            """\
%%autograd -o r
w = torch.zeros(3, requires_grad=True); lr = 0.1; n = 0
while (loss := ((w - torch.arange(3.)) ** 2).sum()) > 1e-3 and n < 5:
    loss.backward(); w -= lr * w.grad; w.grad.zero_(); n += 1  #> location
""",
        ),
        kinds=("leaf_inplace",),
        writer_ops=("sub_",),
        tensors=("w",),
    ),
    Notebook(
        name="ensemble: ModuleList inside dict of lists",
        cells=(
            """\
class Ens(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = {"a": [nn.Linear(4, 1)], "b": (nn.Linear(4, 1), nn.Parameter(torch.ones(1)))}  #> location
    def forward(self, x):
        h = self.stem(x).relu()
        return sum(m(h) for m in self.branches["a"]) + self.branches["b"][0](h) * self.branches["b"][1]
""",
            """\
%%autograd -o r
e = Ens()
o = torch.optim.Adam(e.parameters())
for x in torch.randn(4, 5, 4):
    l = e(x).pow(2).mean(); o.zero_grad(); l.backward(); o.step()
""",
        ),
        kinds=("not_in_optimizer",),
        parameters=(
            "branches['a'][0].bias",
            "branches['a'][0].weight",
            "branches['b'][0].bias",
            "branches['b'][0].weight",
            "branches['b'][1]",
        ),
    ),
    Notebook(
        name="accumulation with zero_grad of the model inside the helper",
        cells=(
            """\
def micro(model, x):
    model.zero_grad()  #> location
    (model(x).pow(2).mean() / 4).backward()
model = nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters())
""",
            """\
%%autograd -o r
for batch in torch.randn(3, 4, 5, 4):
    for x in batch:
        micro(model, x)
    opt.step()
""",
        ),
        kinds=("zeroed_before_step",),
    ),
    Notebook(
        name="hidden state in a dict of an object",
        cells=(
            """\
class Memory:
    def __init__(self): self.state = {"h": None}
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.memory = nn.GRUCell(3, 4), nn.Linear(4, 1), Memory()
    def forward(self, x):
        self.memory.state["h"] = self.cell(x, self.memory.state["h"])  #> shared
        return self.out(self.memory.state["h"])
""",
            """\
%%autograd -o r
c = Cell(); opt = torch.optim.Adam(c.parameters())
for x in torch.randn(4, 2, 3):
    loss = c(x).mean()
    opt.zero_grad(); loss.backward(); opt.step()  #> location
""",
        ),
        kinds=("second_backward",),
        fix="detach",
    ),
    Notebook(
        name="bare %autograd after: in place",
        cells=(
            """\
net = nn.Linear(4, 4)
def f(x):
    h = torch.exp(net(x))
    h[:, 0] = 0.0
    return h.sum()
""",
            """\
loss = f(torch.randn(2, 4))
loss.backward()  #> location
""",
            """\
%autograd -o r
""",
        ),
        kinds=("inplace",),
    ),
    Notebook(
        name="bare %autograd after: second backward in a function",
        cells=(
            """\
net = nn.Linear(4, 4)
def train():
    h = torch.zeros(2, 4)
    for x in torch.randn(3, 2, 4):
        h = torch.tanh(net(x) + h)  #> location
        loss = h.sum()
        loss.backward()
""",
            """\
train()
""",
            """\
%autograd -o r
""",
        ),
        kinds=("second_backward",),
        tensors=("h",),
    ),
    Notebook(
        name="bare %autograd after: cut in a forward",
        cells=(
            """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.b(self.a(x)).detach()  #> location
net = Net()
""",
            """\
for x in torch.randn(3, 2, 4):
    loss = net(x).mean()
    loss.backward()
""",
            """\
%autograd -o r
""",
        ),
        kinds=("cut",),
    ),
    Notebook(
        name="bare %autograd after an unrelated error",
        cells=(
            """\
1 / 0
""",
            """\
%autograd -o r
""",
        ),
        kinds=(),
    ),
    Notebook(
        name="efficientdet: inplace ReLU on a Parameter",
        cells=(
            """\
class Fuse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight_relu = nn.ReLU(inplace=True)
    def forward(self, a, b):
        w = self.weight_relu(self.weight)  #> location
        w = w / (w.sum() + 1e-4)
        return w[0] * a + w[1] * b
f = Fuse(); opt = torch.optim.SGD(f.parameters(), lr=0.1)
""",
            """\
%%autograd -o r
for a, b in torch.randn(3, 2, 4):
    loss = f(a, b).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        ),
        kinds=("leaf_inplace",),
        writer_ops=("relu_",),
        tensors=("self.weight", "weight"),
        modules=("weight_relu",),
        fix="inplace=False|clone",
    ),
    Notebook(
        name="FCHarDNet: weights copied into a layer",
        cells=(
            """\
%%autograd -o r
conv = nn.Conv2d(3, 4, 3)
W = torch.randn(4, 3, 3, 3)
conv.weight[:,:,:,:] = W[:,:,:,:]  #> location
""",
        ),
        kinds=("view_inplace", "leaf_inplace"),
        tensors=("conv.weight",),
        fix="no_grad",
    ),
    Notebook(
        name="SalEMA: a parameter moved is no leaf, in an attribute",
        cells=(
            """\
class Sal(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.alpha = torch.zeros(1, requires_grad=True).to(torch.float64)  #> location
""",
            """\
%%autograd -o r
model = Sal()
opt = torch.optim.Adam([{'params': model.net.parameters()}, {'params': model.alpha, 'lr': 0.1}])
""",
        ),
        kinds=("other",),
        tensors=("model.alpha",),
        fix=r"model\.alpha|self\.alpha",
    ),
    Notebook(
        name="ternary: list of scaling factors",
        cells=(
            """\
%%autograd -o r
net = nn.Linear(3, 3)
scaling_factors = [torch.ones(2, requires_grad=True).to(torch.float64) for _ in range(3)]  #> location
opt = torch.optim.Adam(scaling_factors, lr=0.1)
""",
        ),
        kinds=("other",),
        tensors=("scaling_factors",),
    ),
    Notebook(
        name="staticmethod loss with numpy in the middle",
        cells=(
            """\
import numpy as np
class Loss:
    @staticmethod
    def dice(p, t):
        inter = (p * t).sum().detach().numpy()  #> location
        return torch.from_numpy(np.asarray(1 - 2 * inter / (p.sum() + t.sum()).detach().numpy()))  #> location
net = nn.Conv2d(1, 1, 3, padding=1); opt = torch.optim.Adam(net.parameters())
""",
            """\
%%autograd -o r
for x in torch.rand(2, 1, 1, 8, 8):
    loss = Loss.dice(torch.sigmoid(net(x)), (x > .5).float())
    opt.zero_grad(); loss.backward(); opt.step()
""",
        ),
        kinds=("cut",),
    ),
    Notebook(
        name="loss.requires_grad_ hack after argmax, silent",
        cells=(
            """\
%%autograd -o r
net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=.1)
for x, y in zip(torch.randn(3, 5, 4), torch.randint(3, (3, 5))):
    pred = net(x).argmax(dim=1)  #> location
    loss = F.mse_loss(pred.float(), y.float())
    loss.requires_grad_(True)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ),
        kinds=("no_gradient", "grad_disabled"),
        ops=("argmax",),
        parameters=("bias", "weight"),
    ),
    Notebook(
        name="BN twice: siamese, shared stats",
        cells=(
            """\
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
mom = 0.9
proto = nn.Parameter(torch.randn(2, 3)); opt = torch.optim.SGD([*net.parameters(), proto], lr=.1)
""",
            """\
%%autograd -o r
center = torch.zeros(2, requires_grad=False)
for x in torch.randn(3, 8, 4):
    z = net(x)
    d = (z * center) @ proto  #> saved
    center.mul_(mom).add_(z.detach().mean(0), alpha=1 - mom)  #> location
    loss = d.pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        ),
        kinds=("inplace",),
        ops=("mul",),
        writer_ops=("mul_",),
        tensors=("center",),
    ),
    Notebook(
        name="weighted sampling: float mask indexing; non-scalar from a dict of losses",
        cells=(
            """\
def losses(net, x):
    out = net(x)
    return {"a": out.pow(2).mean(), "b": out.abs().mean(dim=1)}
net = nn.Linear(4, 2); opt = torch.optim.SGD(net.parameters(), lr=.1)
""",
            """\
%%autograd -o r
for x in torch.randn(2, 5, 4):
    d = losses(net, x)
    loss = sum(w * d[k] for k, w in dict(a=1., b=.5).items())  #> location
    opt.zero_grad(); loss.backward(); opt.step()
""",
        ),
        kinds=("non_scalar",),
        tensors=("loss",),
        fix=r"mean\(\)",
    ),
    Notebook(
        name="higher-order: create_graph forgotten in a meta loss",
        cells=(
            """\
%%autograd -o r
net = nn.Linear(4, 1); lr = torch.tensor(0.1, requires_grad=True); om = torch.optim.SGD([lr], lr=.01)
for x in torch.randn(2, 5, 4):
    g = torch.autograd.grad(net(x).pow(2).mean(), list(net.parameters()))  #> location
    fast = [p.detach() - 0.1 * gi for p, gi in zip(net.parameters(), g)]  #> location
    meta = F.linear(x, *fast).pow(2).mean()  #> location
    om.zero_grad(); meta.backward(); om.step()
""",
        ),
        kinds=("cut",),
    ),
    Notebook(
        name="hook returns a wrong shape",
        cells=(
            """\
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
def hook(grad):
    return grad.sum(0)  #> location
""",
            """\
%%autograd -o r
h = net[0](torch.randn(5, 4)); h.register_hook(hook)
net[2](net[1](h)).mean().backward()
""",
        ),
        kinds=("other",),
    ),
    Notebook(
        name="async/top-level: retain_grad missing, in a comprehension",
        cells=(
            """\
%%autograd -o r
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
acts = []
x = torch.randn(5, 4)
for layer in net:
    x = layer(x); acts.append(x)
x.mean().backward()
norms = [a.grad.norm() for a in acts]  #> location
""",
        ),
        kinds=("other",),
        fix="retain_grad",
    ),
    Notebook(
        name="Qwen3VL: deepstack writes to the view of a custom Function",
        cells=(
            """\
class Offload(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x
    @staticmethod
    def backward(ctx, g): return g
class Text(nn.Module):
    def __init__(self):
        super().__init__(); self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    def _deepstack_process(self, hidden_states, mask, visual):
        local_this = hidden_states[mask, :].clone() + visual
        hidden_states[mask, :] = local_this  #> location
        return hidden_states
    def forward(self, x, mask, visual):
        for layer in self.layers:
            x = Offload.apply(torch.tanh(layer(x)))
            x = self._deepstack_process(x, mask, visual)
        return x
m = Text(); opt = torch.optim.Adam(m.parameters())
""",
            """\
%%autograd -o r
mask = torch.zeros(2, 5, dtype=torch.bool); mask[:, 1:3] = True
loss = m(torch.randn(2, 5, 6), mask, torch.randn(4, 6)).mean()
opt.zero_grad(); loss.backward(); opt.step()
""",
        ),
        kinds=("view_inplace",),
        tensors=("hidden_states",),
        fix="clone",
    ),
    Notebook(
        name="empty parameter list: modules in a list",
        cells=(
            """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 1)]  #> location
    def forward(self, x):
        for l in self.layers: x = l(x)
        return x
""",
            """\
%%autograd -o r
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
""",
        ),
        kinds=("other", "not_in_optimizer"),
        fix="ModuleList",
    ),
    Notebook(
        name="empty parameter list: all filtered because frozen",
        cells=(
            """\
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
for param in net.parameters():
    param.requires_grad = False  #> location
""",
            """\
%%autograd -o r
optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, net.parameters()), lr=1e-3)
""",
        ),
        kinds=("other", "cut"),
        fix="requires_grad",
    ),
    Notebook(
        name="empty parameter list: generator used twice",
        cells=(
            """\
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
params = net.parameters()
print("total", sum(p.numel() for p in params))
""",
            """\
%%autograd -o r
optimizer = torch.optim.Adam(params, lr=1e-3)  #> location
""",
        ),
        kinds=("other",),
        fix=r"list\(|again|parameters\(\)",
    ),
    Notebook(
        name="bare after: optimizer steps between (GAN)",
        cells=(
            """\
G, D = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
""",
            """\
for _ in range(2):
    fake = G(torch.randn(8, 2))
    g_loss = -D(fake).mean()
    d_loss = D(fake.detach()).mean() - D(torch.randn(8, 4)).mean()
    od.zero_grad(); d_loss.backward(retain_graph=True)
    od.step()  #> location
    og.zero_grad(); g_loss.backward()
    og.step()
""",
            """\
%autograd -o r
""",
        ),
        kinds=("inplace",),
    ),
    Notebook(
        name="bare after: non-scalar",
        cells=(
            """\
net = nn.Linear(3, 2)
loss = F.mse_loss(net(torch.randn(4, 3)), torch.zeros(4, 2), reduction='none')  #> location
""",
            """\
loss.backward()
""",
            """\
%autograd -o r
""",
        ),
        kinds=("non_scalar",),
        fix="mean",
    ),
    Notebook(
        name="bare after: frozen in another cell",
        cells=(
            """\
net = nn.Linear(3, 2)
""",
            """\
for p in net.parameters(): p.requires_grad_(False)
""",
            """\
loss = net(torch.randn(4, 3)).mean()
loss.backward()
""",
            """\
%autograd -o r
""",
        ),
        kinds=("cut",),
    ),
    Notebook(
        name="bare after: no_grad around",
        cells=(
            """\
net = nn.Linear(3, 2)
def evaluate():
    with torch.no_grad():  #> location
        return net(torch.randn(4, 3)).mean()
""",
            """\
loss = evaluate() * 2
loss.backward()
""",
            """\
%autograd -o r
""",
        ),
        kinds=("cut",),
    ),
    Notebook(
        name="bare after: unused",
        cells=(
            """\
net = nn.Linear(3, 2); other = nn.Linear(3, 2)
""",
            """\
l = net(torch.randn(4, 3)).mean()
torch.autograd.grad(l, [net.weight, other.weight])  #> location
""",
            """\
%autograd -o r
""",
        ),
        kinds=("unused_input",),
        tensors=("other.weight",),
    ),
)

HEALTHY: Final = (
    Notebook(
        name="dataset condensation: images are optimized, networks re-drawn",
        cells=(
            """\
%%autograd -o r
imgs = torch.randn(10, 3, 8, 8, requires_grad=True)
oi = torch.optim.SGD([imgs], lr=0.1, momentum=0.5)
for _ in range(3):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    real = F.cross_entropy(net(torch.randn(10, 3, 8, 8)), torch.arange(10))
    gr = [g.detach() for g in torch.autograd.grad(real, list(net.parameters()))]
    gs = torch.autograd.grad(F.cross_entropy(net(imgs), torch.arange(10)), list(net.parameters()), create_graph=True)
    loss = sum(1 - F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(gr, gs))
    oi.zero_grad(); loss.backward(); oi.step()
""",
        ),
    ),
    Notebook(
        name="SAM with a base optimizer",
        cells=(
            """\
class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw)); self.base = base(self.param_groups, **kw)
    @torch.no_grad()
    def first_step(self):
        for g in self.param_groups:
            for p in g["params"]:
                e = p.grad * g["rho"]; p.add_(e); self.state[p]["e"] = e
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for g in self.param_groups:
            for p in g["params"]: p.sub_(self.state[p]["e"])
        self.base.step(); self.zero_grad()
""",
            """\
%%autograd -o r
net = nn.Linear(4, 1); opt = SAM(net.parameters(), torch.optim.SGD, lr=0.1)
for x in torch.randn(6, 5, 4):
    net(x).pow(2).mean().backward(); opt.first_step()
    net(x).pow(2).mean().backward(); opt.second_step()
""",
        ),
    ),
    Notebook(
        name="optimizer constructor fails, is caught, and made anew",
        cells=(
            """\
%%autograd -o r
net = nn.Linear(4, 1)
try:
    opt = torch.optim.Adam(net.parameters(), lr=-1.0)
except ValueError as e:
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    for x in torch.randn(3, 5, 4):
        l = net(x).pow(2).mean(); opt.zero_grad(); l.backward(); opt.step()
""",
        ),
    ),
)
