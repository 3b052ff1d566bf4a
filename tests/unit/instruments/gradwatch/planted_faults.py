"""Trainings with one planted fault each, of every kind."""

from __future__ import annotations

from tests.unit.instruments.gradwatch.training_case import Fault

__all__ = ["FAULTS"]

_LOOP = """
for x, y in batches({count}):
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward(){backward}
    {between}opt.step(){step}
"""


def _loop(count: int = 40, *, between: str = "", at: str = "step") -> str:
    here = "  #> here"
    indent = "\n    " if between else ""
    return _LOOP.format(count=count, between=between + indent, backward=here if at == "backward" else "", step=here if at == "step" else "")


_REGRESSION = """
net = mlp(8, 16, 1)
opt = {optimizer}  #> here
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
for step in range({count}):
    opt.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward()
    opt.step()
"""

_DIVERGING = (
    Fault(
        name="linear regression with a learning rate above 2 / curvature",
        kind="diverging",
        text="""
w = nn.Linear(8, 1)
opt = torch.optim.SGD(w.parameters(), lr=3.0)  #> here
x = torch.randn(64, 8)
for step in range(60):
    opt.zero_grad()
    (w(x) - x.sum(1, keepdim=True)).square().mean().backward()
    opt.step()
""",
        steps=(0, 10),
        fix="use `torch.optim.SGD(w.parameters(), lr=0.3)`",
    ),
    Fault(
        name="MLP regression that is NaN after a few steps",
        kind="diverging",
        text=_REGRESSION.format(optimizer="torch.optim.SGD(net.parameters(), lr=3.0)", count=30),
        steps=(0, 3),
    ),
    Fault(
        name="a learning rate that a schedule multiplies",
        kind="diverging",
        text="""
w = nn.Linear(8, 1)
opt = torch.optim.SGD(w.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=1.15)
x = torch.randn(64, 8)
for step in range(80):
    opt.zero_grad()
    (w(x) - x.sum(1, keepdim=True)).square().mean().backward()
    opt.step()  #> here
    schedule.step()
""",
        steps=(15, 60),
    ),
    Fault(
        name="gradient ascent: the sign of the loss",
        kind="ascending",
        text="""
w = nn.Linear(8, 1)
opt = torch.optim.SGD(w.parameters(), lr=0.1, maximize=True)  #> here
x = torch.randn(64, 8)
for step in range(60):
    opt.zero_grad()
    (w(x) - x.sum(1, keepdim=True)).square().mean().backward()
    opt.step()
""",
        steps=(0, 20),
    ),
)

_SPIKES = (
    Fault(
        name="a loss that one batch multiplies",
        kind="exploding_spike",
        text="""
net = mlp(16, 32, 4)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for number, (x, y) in enumerate(batches(50)):
    opt.zero_grad()
    weight = 1e5 if number == 30 else 1.0
    (weight * F.cross_entropy(net(x), y)).backward()  #> here
    opt.step()
""",
        steps=(30, 30),
        modules=("0", "2"),
    ),
    Fault(
        name="an RNN that meets one long sequence",
        kind="exploding_spike",
        text="""
rnn, head = nn.RNN(4, 16, nonlinearity="relu"), nn.Linear(16, 1)
with torch.no_grad():
    rnn.weight_hh_l0.copy_(1.5 * torch.eye(16))
net = nn.ModuleList([rnn, head])
opt = torch.optim.SGD(net.parameters(), lr=1e-12)
for number in range(40):
    x = torch.rand(20 if number == 20 else 4, 8, 4)
    opt.zero_grad()
    loss = head(rnn(x)[0][-1]).square().mean()
    loss.backward()  #> here
    opt.step()
""",
        steps=(20, 20),
        modules=("0", "1"),
    ),
)

_DEAD = (
    Fault(
        name="a ReLU layer whose bias is far below zero",
        kind="dead",
        text="net = mlp(16, 32, 32, 4)\nnn.init.constant_(net[2].bias, -100.0)\nopt = torch.optim.Adam(net.parameters(), lr=1e-3)\n"
        + _loop(at="backward"),
        modules=("2",),
        fix="LeakyReLU",
    ),
    Fault(
        name="a ReLU net that one huge update kills",
        kind="dead",
        text="""
net = mlp(16, 32, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for number, (x, y) in enumerate(batches(60)):
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()  #> here
    opt.step()
    if number == 19:
        with torch.no_grad():
            net[0].bias -= 1e3
""",
        steps=(20, 20),
        modules=("0",),
    ),
    Fault(
        name="an output that is rounded",
        kind="dead",
        text="""
net = mlp(8, 16, 1)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
x = torch.randn(64, 8)
for step in range(30):
    opt.zero_grad()
    (net(x).round() - 1).square().mean().backward()  #> here
    opt.step()
""",
        modules=("2",),
    ),
)

_VANISHING = (
    *(
        Fault(
            name=f"{depth} layers of {act}",
            kind="vanishing",
            text=f"net = mlp(16, *[32] * {depth}, 4, act=nn.{act})\nopt = torch.optim.{optimizer}\n" + _loop(30, at="backward"),
            modules=("0",),
            fix="nn.ReLU()",
        )
        for depth, act, optimizer in (
            (8, "Sigmoid", "SGD(net.parameters(), lr=0.1)"),
            (12, "Sigmoid", "Adam(net.parameters(), lr=1e-4)"),
            (30, "Tanh", "SGD(net.parameters(), lr=0.01)"),
        )
    ),
    Fault(
        name="weights that begin too small",
        kind="vanishing",
        text="""
net = mlp(16, *[32] * 6, 4)
for one in net:
    if isinstance(one, nn.Linear):
        nn.init.normal_(one.weight, std=0.01)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
        + _loop(30, at="backward"),
        modules=("0",),
    ),
)

_TOO_FAST = (
    Fault(
        name="sign descent on a transformer",
        kind="too_fast",
        text="""
net = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 20))
opt = torch.optim.Adam(net.parameters(), lr=0.3)  #> here
for step in range(50):
    x = torch.randint(0, 20, (8, 12))
    opt.zero_grad()
    F.cross_entropy(net(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    opt.step()
""",
        steps=(0, 5),
        modules=("0", "1.self_attn", "1.self_attn.out_proj", "1.linear1", "1.linear2", "2"),
    ),
)

_NOT_LEARNING = (
    Fault(
        name="bfloat16 weights whose updates round to zero",
        kind="not_learning",
        text="""
net = mlp(16, 32, 4).bfloat16()
with torch.no_grad():
    for one in net.parameters():
        one.add_(one.sign() * 0.5)
opt = torch.optim.SGD(net.parameters(), lr=1e-4)
for x, y in batches(40):
    opt.zero_grad()
    F.cross_entropy(net(x.bfloat16()), y).backward()
    opt.step()  #> here
""",
        modules=("0",),
        fix="float32",
    ),
)

_CLIPPED = (
    Fault(
        name="clipping before backward()",
        kind="clipped_never",
        text="""
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches(20):
    opt.zero_grad()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)  #> here
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
        fix="before `opt.step()`",
    ),
    Fault(
        name="clipping of a generator that the optimizer has read",
        kind="clipped_never",
        text="""
net = mlp(16, 32, 4)
params = net.parameters()  #> here
opt = torch.optim.SGD(params, lr=0.1)
for x, y in batches(20):
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
""",
        fix="list(net.parameters())",
    ),
    Fault(
        name="a max_norm of 1e-3",
        kind="clipped_always",
        text="net = mlp(16, 32, 4)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        + _loop(between="nn.utils.clip_grad_norm_(net.parameters(), 1e-3)  #> here", at=""),
        fix="max_norm=",
    ),
    Fault(
        name="a function that was imported by name, and a loss that is a sum",
        kind="clipped_always",
        text="""
from torch.nn.utils import clip_grad_norm_
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches(40):
    opt.zero_grad()
    F.cross_entropy(net(x), y, reduction="sum").backward()
    clip_grad_norm_(net.parameters(), 0.1)  #> here
    opt.step()
""",
        fix="max_norm=",
    ),
    Fault(
        name="gradients that are clipped before they are unscaled",
        kind="clipped_always",
        text="""
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in batches(40):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)  #> here
    scaler.step(opt)
    scaler.update()
""",
        fix="scaler.unscale_(opt)",
    ),
)

_PLATEAU = (
    Fault(
        name="labels that have nothing to do with the inputs",
        kind="plateau_at_chance",
        text="""
net = mlp(16, 8, 4)
with torch.no_grad():
    net[2].weight.mul_(0.01)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(300):
    x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()  #> here
    opt.step()
""",
        steps=(0, 60),
        fix="`%overfit net (x, y) F.cross_entropy opt`",
    ),
    Fault(
        name="a binary loss under random labels",
        kind="plateau_at_chance",
        text="""
net = nn.Linear(16, 1)
nn.init.normal_(net.weight, std=0.001)
nn.init.zeros_(net.bias)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(150):
    x, y = torch.randn(64, 16), torch.randint(0, 2, (64, 1)).float()
    opt.zero_grad()
    F.binary_cross_entropy_with_logits(net(x), y).backward()  #> here
    opt.step()
""",
    ),
)

_OPTIMIZERS = (
    Fault(
        name="a log-likelihood without a minus",
        kind="boundless",
        text="""
net = mlp(16, 32, 4)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for x, y in batches(60):
    opt.zero_grad()
    loss = net(x).log_softmax(1).gather(1, y[:, None]).mean()  #> here
    loss.backward()
    opt.step()
""",
        fix="-net(x).log_softmax(1)",
    ),
    Fault(
        name="an optimizer that is made in each step",
        kind="remade",
        text="""
net = mlp(16, 32, 4)
for epoch in range(2):
    for x, y in batches(10):
        opt = torch.optim.Adam(net.parameters(), lr=1e-4)  #> here
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
""",
        fix="once, before the loop",
    ),
    Fault(
        name="a weight decay of 5",
        kind="decayed",
        text="net = mlp(16, 32, 4)\nopt = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5.0)  #> here\n" + _loop(at=""),
        fix="weight_decay=0.0005",
    ),
    Fault(
        name="a decoupled weight decay of 100",
        kind="decayed",
        text="net = mlp(16, 32, 4)\nopt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=100)  #> here\n" + _loop(at=""),
        fix="weight_decay=0.01",
    ),
    Fault(
        name="two schedulers of one optimizer, of which one is named after another one",
        kind="unscheduled",
        text="""
g_net, d_net = mlp(16, 32, 4), mlp(16, 32, 4)
g_opt, d_opt = torch.optim.Adam(g_net.parameters(), lr=1e-3), torch.optim.Adam(d_net.parameters(), lr=1e-3)
g_schedule = torch.optim.lr_scheduler.StepLR(g_opt, 5, gamma=0.5)
d_schedule = torch.optim.lr_scheduler.StepLR(g_opt, 5, gamma=0.5)  #> here
for x, y in batches(10):
    for net, opt in ((g_net, g_opt), (d_net, d_opt)):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    g_schedule.step()
    d_schedule.step()
""",
        fix="StepLR(d_opt, 5, gamma=0.5)",
    ),
    Fault(
        name="a schedule for all updates that steps once an epoch",
        kind="mistimed",
        text="""
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = list(batches(10))
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, steps_per_epoch=len(loader), epochs=6)
for epoch in range(6):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    schedule.step()  #> here
""",
        fix="into the loop over batches, after `opt.step()`",
    ),
    Fault(
        name="a schedule for all epochs that steps at each update",
        kind="mistimed",
        text="""
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=6)
for epoch in range(6):
    for x, y in batches(10):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        schedule.step()  #> here
""",
        fix="out of the loop over batches",
    ),
    Fault(
        name="a linear schedule that was meant to fall",
        kind="mistimed",
        text="""
net = mlp(16, 32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.2, total_iters=40)  #> here
for x, y in batches(40):
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
    schedule.step()
""",
        fix="LinearLR(opt, total_iters=40, start_factor=1.0, end_factor=0.2)",
    ),
    Fault(
        name="a checkpoint without the scheduler",
        kind="mistimed",
        text="""
def made():
    net = mlp(16, 32, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, opt, torch.optim.lr_scheduler.StepLR(opt, 5, gamma=0.5)

def train(count):
    for x, y in batches(count):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        schedule.step()

net, opt, schedule = made()
train(12)
checkpoint = {"net": net.state_dict(), "opt": opt.state_dict()}
net, opt, schedule = made()
net.load_state_dict(checkpoint["net"])
opt.load_state_dict(checkpoint["opt"])  #> here
train(4)
""",
        fix="schedule.load_state_dict(checkpoint['scheduler'])",
    ),
)

FAULTS = (*_DIVERGING, *_SPIKES, *_DEAD, *_VANISHING, *_TOO_FAST, *_NOT_LEARNING, *_CLIPPED, *_OPTIMIZERS, *_PLATEAU)
