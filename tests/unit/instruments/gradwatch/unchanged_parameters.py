"""Trainings in which an update does not change what it should, by the link that breaks; and healthy ones that look alike."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HEALTHY", "UNCHANGED", "Unchanged"]


class Unchanged(NamedTuple):
    """One training. Lines that end in ``#> here`` would be right."""

    name: str
    text: str
    says: str
    """What gradwatch's verdict must hold, as a regular expression; empty where it has no finding."""
    silence: str = ""
    """The kind that autograd must name; empty where numbers alone tell."""
    is_edit: bool = True
    """Whether the fix can be applied by a machine; else it is advice."""

    @property
    def body(self) -> str:
        return _HEAD + self.text


_HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
torch.manual_seed(0)
x = torch.randn(64, 16)
y = (x @ torch.randn(16, 4)).argmax(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.head = nn.Linear(32, 4)
    def forward(self, x):
        return self.head(self.encoder(x))

class LoRA(nn.Module):
    def __init__(self, base, rank=4, start=0.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.zeros(rank, base.in_features))  #> here
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        if start:
            nn.init.normal_(self.A, std=start)
    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T

net = Net()
"""
_LOOP = """
for step in range(40):
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
"""


def _made(optimizer: str, loop: str = _LOOP, *, before: str = "") -> str:
    return f"{before}opt = {optimizer}\n{loop}"


_SGD = "torch.optim.SGD(net.parameters(), lr=0.1)"
_ADAM = "torch.optim.Adam(net.parameters(), lr=1e-2)"
_REGRESSION = """
class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Parameter(torch.zeros(16, 2)), nn.Parameter(torch.zeros(2, 4))  #> here
    def forward(self, x):
        return x @ self.low @ self.high

net = Line()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
"""
_FALLS = "learning rate falls to"
_STEPPED = "    schedule.step()  #> here\n"


def _scheduled(schedule: str, *, in_batch: str = "pass", in_epoch: str = "pass") -> str:
    return f"""
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.{schedule}
for epoch in range(6):
    for step in range(15):
        opt.zero_grad()
        loss = F.cross_entropy(net(x[step::15]), y[step::15])
        loss.backward()
        opt.step()
        {in_batch}  #> here
    {in_epoch}
"""


UNCHANGED = (
    Unchanged("a: lr=0", _made("torch.optim.SGD(net.parameters(), lr=0)  #> here"), "learning rate is 0"),
    Unchanged(
        "a: a schedule that stays at 0",
        _made(
            _ADAM,
            _LOOP + "    schedule.step()\n",
        ).replace("\nfor", "schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step // 1000)  #> here\nfor"),
        "learning rate is 0",
        is_edit=False,
    ),
    Unchanged(
        "a: lr=0 in one group",
        _made('torch.optim.SGD([{"params": net.encoder.parameters(), "lr": 0}, {"params": net.head.parameters()}], lr=0.1)  #> here'),
        r"`encoder.0`.*learning rate is 0",
    ),
    Unchanged("b: Adam at 1e-9", _made("torch.optim.Adam(net.parameters(), lr=1e-9)  #> here"), "change by at most"),
    Unchanged("b: SGD at 1e-6", _made("torch.optim.SGD(net.parameters(), lr=1e-6)  #> here"), "change by at most"),
    Unchanged("c: maximize", _made("torch.optim.SGD(net.parameters(), lr=0.1, maximize=True)  #> here"), "increase the loss"),
    Unchanged("c: Adam maximizes", _made("torch.optim.Adam(net.parameters(), lr=1e-2, maximize=True)  #> here"), "increase the loss"),
    Unchanged("c: the loss is negated", _made(_SGD, _LOOP.replace("loss.backward()", "(-loss).backward()  #> here")), "increase"),
    Unchanged(
        "c: the loss is negated before", _made(_ADAM, _LOOP.replace("= F.cross", "= -F.cross").replace("y)", "y)  #> here")), "increase"
    ),
    Unchanged(
        "d: norm before backward()",
        _made(_SGD, _LOOP.replace("    loss.backward()", "    clip_grad_norm_(net.parameters(), 1.0)  #> here\n    loss.backward()")),
        "before backward",
    ),
    Unchanged(
        "d: values after step()",
        _made(_ADAM, _LOOP.replace("    opt.step()", "    opt.step()\n    clip_grad_value_(net.parameters(), 0.5)  #> here")),
        "after `opt.step",
    ),
    Unchanged(
        "d: norm after step()",
        _made(_ADAM, _LOOP.replace("    opt.step()", "    opt.step()\n    clip_grad_norm_(net.parameters(), 0.5)  #> here")),
        "after `opt.step",
    ),
    Unchanged(
        "e: a tensor without requires_grad",
        """
bias = torch.zeros(4)  #> here
opt = torch.optim.SGD([*net.parameters(), bias], lr=0.1)
"""
        + _LOOP.replace("net(x)", "net(x) + bias"),
        "`bias`.*requires_grad",
    ),
    Unchanged(
        "e: a parameter set anew",
        _made(_SGD + "  #> here", "net.head.weight = nn.Parameter(torch.randn(4, 32) * 0.1)\n" + _LOOP),
        "of no module",
        "stale_optimizer",
    ),
    Unchanged("e: a model made anew", _made(_ADAM + "  #> here", "net = Net()\n" + _LOOP), "of no module", "stale_optimizer"),
    Unchanged(
        "f: an encoder under no_grad",
        _made(
            _SGD,
            _LOOP.replace(
                "    loss = F.cross_entropy(net(x), y)",
                "    with torch.no_grad():  #> here\n        h = net.encoder(x)\n    loss = F.cross_entropy(net.head(h), y)",
            ),
        ),
        "",
        "no_gradient",
    ),
    Unchanged(
        "f: all are frozen",
        _made(
            _SGD,
            _LOOP.replace("F.cross_entropy(net(x), y)", "F.cross_entropy(net(x), y).requires_grad_()"),
            before="net.requires_grad_(False)  #> here\n",
        ),
        "not trained: `requires_grad` is False",
    ),
    Unchanged(
        "g: LoRA",
        "net.requires_grad_(False)\nnet.head = LoRA(net.head)\nopt = torch.optim.AdamW([net.head.A, net.head.B], lr=1e-2)\n" + _LOOP,
        "`head.A`, `head.B` are all zero",
    ),
    Unchanged("g: two factors", _REGRESSION + _LOOP, "`low`, `high` are all zero"),
    Unchanged(
        "h: the model's zero_grad()",
        _made(
            _ADAM,
            _LOOP.replace("    opt.zero_grad()\n", "").replace(
                "    opt.step", "    net.zero_grad(set_to_none=False)  #> here\n    opt.step"
            ),
        ),
        "zeroed between",
        "zeroed_before_step",
    ),
    Unchanged("i: a scaled loss", _made(_SGD, _LOOP.replace("net(x), y)", "net(x), y) * 1e-9  #> here")), "gradients"),
    Unchanged(
        "i: averaged twice",
        _made(_SGD, _LOOP.replace("loss.backward()", "(loss / len(x) ** 5).backward()  #> here")),
        "gradients",
    ),
    Unchanged("j: ExponentialLR in each batch", _scheduled("ExponentialLR(opt, gamma=0.75)", in_batch="schedule.step()"), _FALLS),
    Unchanged(
        "j: a plateau of the loss of batches",
        _scheduled("ReduceLROnPlateau(opt, patience=0, eps=0)", in_batch="schedule.step(loss)").replace(
            "cross_entropy(net", "cross_entropy(0 * net"
        ),
        _FALLS,
        is_edit=False,
    ),
    Unchanged(
        "j: StepLR in a loop over steps",
        _made(
            _SGD,
            "schedule = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.1)\n"
            + _LOOP.replace("40", "90")
            + "    schedule.step()  #> here\n",
        ),
        _FALLS,
    ),
    Unchanged(
        "j: an epoch in a function",
        _made(
            _ADAM,
            "schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)\ndef train():"
            + (_LOOP + _STEPPED).replace("\n", "\n    ")
            + "\nfor epoch in range(2):\n    train()\n",
        ),
        _FALLS,
        is_edit=False,
    ),
    Unchanged(
        "j: multiplied in each step",
        _made(_ADAM, _LOOP.replace("40", "80") + '    for group in opt.param_groups:\n        group["lr"] *= 0.7  #> here\n'),
        _FALLS,
        is_edit=False,
    ),
    Unchanged(
        "j: a step for an epoch",
        _made(_ADAM, _LOOP.replace("40", "80") + '    opt.param_groups[0]["lr"] = 1e-2 * 0.1 ** (step // 5)  #> here\n'),
        _FALLS,
        is_edit=False,
    ),
    Unchanged(
        "j: a wrapper that decays, under a schedule",
        """
class Decaying:
    def __init__(self, opt, decay):
        self.opt, self.decay, self.param_groups = opt, decay, opt.param_groups
    def zero_grad(self):
        self.opt.zero_grad()
    def step(self):
        for group, decay in zip(self.param_groups, self.decay):
            group["lr"] = group["lr"] * decay  #> here
        self.opt.step()

inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
warm = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: min(1, (step + 1) / 5))
opt = Decaying(inner, [0.75])
"""
        + _LOOP.replace("40", "96")
        + "    if step < 5:\n        warm.step()\n",
        _FALLS,
        is_edit=False,
    ),
)

_HEALTHY = {
    "ExponentialLR in each epoch": _scheduled("ExponentialLR(opt, gamma=0.75)", in_epoch="schedule.step()"),
    "a cosine that ends at 0": _scheduled("CosineAnnealingLR(opt, 90)", in_batch="schedule.step()"),
    "a line that ends at 0": _scheduled("LinearLR(opt, 1.0, 0.0, 90)", in_batch="schedule.step()"),
    "warm restarts": _scheduled("CosineAnnealingWarmRestarts(opt, 15)", in_batch="schedule.step()"),
    "a plateau at the end": _scheduled("ReduceLROnPlateau(opt, patience=0, eps=0)", in_epoch="schedule.step(1.0)"),
    "a decay after the loss is at its floor": """
net = nn.Linear(16, 4)
goal = x @ torch.randn(16, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.StepLR(opt, 150, gamma=1e-9)
"""
    + _LOOP.replace("40", "300").replace("F.cross_entropy(net(x), y)", "F.mse_loss(net(x), goal)")
    + "    schedule.step()\n",
    "warm-up from 0": _made(
        "torch.optim.Adam(net.parameters(), lr=1e-2)",
        "warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1, step / 30))\n" + _LOOP + "    warm.step()\n",
    ),
    "a frozen encoder that the optimizer holds": _made(_SGD, before="net.encoder.requires_grad_(False)\n"),
    "fine-tuning the head": "net.encoder.requires_grad_(False)\n" + _made("torch.optim.SGD(net.head.parameters(), lr=0.1)"),
    "fine-tuning at 1e-5": _made("torch.optim.AdamW(net.parameters(), lr=1e-5)"),
    "gradient accumulation": _made(
        _SGD,
        """
for step in range(80):
    loss = F.cross_entropy(net(x[step % 4::4]), y[step % 4::4]) / 4
    loss.backward()
    if step % 4 == 3:
        clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
""",
    ),
    "a GAN": """
G, D = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
opt_g, opt_d = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
for step in range(60):
    real, fake = torch.randn(32, 2) + 2, G(torch.randn(32, 4))
    opt_d.zero_grad()
    bce = F.binary_cross_entropy_with_logits
    (bce(D(real), torch.ones(32, 1)) + bce(D(fake.detach()), torch.zeros(32, 1))).backward()
    opt_d.step()
    opt_g.zero_grad()
    bce(D(fake), torch.ones(32, 1)).backward()
    opt_g.step()
""",
    "a WGAN critic": """
G, D = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
opt_g, opt_d = torch.optim.RMSprop(G.parameters(), lr=1e-3), torch.optim.RMSprop(D.parameters(), lr=1e-3)
for step in range(60):
    for _ in range(3):
        opt_d.zero_grad()
        gap = D(torch.randn(32, 2) + 2).mean() - D(G(torch.randn(32, 4)).detach()).mean()
        (-gap).backward()
        opt_d.step()
        with torch.no_grad():
            for one in D.parameters():
                one.clamp_(-0.05, 0.05)
    opt_g.zero_grad()
    (-D(G(torch.randn(32, 4))).mean()).backward()
    opt_g.step()
""",
    "LoRA with one factor at zero": (
        "net.requires_grad_(False)\nnet.head = LoRA(net.head, start=0.1)\nopt = torch.optim.AdamW([net.head.A, net.head.B], lr=1e-2)\n"
        + _LOOP
    ),
    "policy gradient": _made(
        _ADAM,
        """
for step in range(60):
    policy = torch.distributions.Categorical(logits=net(x))
    action = policy.sample()
    reward = (action == y).float()
    opt.zero_grad()
    (-(policy.log_prob(action) * (reward - reward.mean())).mean()).backward()
    opt.step()
""",
    ),
}

HEALTHY = {name: _HEAD + text for name, text in _HEALTHY.items()}
