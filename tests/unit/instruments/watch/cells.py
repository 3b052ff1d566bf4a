"""Cells with a fault, with two and with none; `# here` marks the line that is at fault, `instrument` the one whose finding leads."""

from __future__ import annotations

from typing import NamedTuple

SETUP = """\
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
x, y, labels = torch.randn(32, 8), torch.randn(32, 1), torch.randint(0, 3, (32,))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""


class Cell(NamedTuple):
    """What a user runs, and what is to be found there."""

    body: str
    instrument: str
    also: tuple[str, ...] = ()
    """The magics of the other findings."""
    raises: bool = False


def loop(loss: str, *, before: str = "", after: str = "", steps: int = 12, zero: str = "    optimizer.zero_grad()\n") -> str:
    """A training loop around a loss."""
    return f"{before}for step in range({steps}):\n{zero}    loss = {loss}\n    loss.backward()\n    optimizer.step()\n{after}"


MEAN = "F.mse_loss(model(x), y)"
KEEPS = "    kept.append(torch.randn(256, 256))\n"
LINEAR = "model[1] = nn.Identity()\n"
HEAD = "head = nn.Linear(1, 1)\n"
WITH_HEAD = "F.mse_loss(head(model(x)), y)"
NORM = """\
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
"""
IN_FORWARD = """\
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
    def forward(self, x):
        h = torch.relu(nn.Linear(8, 16)(x))  # here
        return nn.Linear(16, 1)(h)
model = Net(16)
for step in range(12):
    loss = F.mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
"""
IN_LOOP = """\
for step in range(12):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)){}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range({}):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
BRANCHES = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.gate, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 1)
    def forward(self, x):
        h = self.body(x).relu()
        gate = torch.sigmoid(self.gate(x)){}
        return {}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
"""
SCORES = """\
class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.score, self.head = nn.Linear(1, 16), nn.Linear(16, 1), nn.Linear(16, 1)
    def forward(self, x):
        h = torch.tanh(self.body(x.unsqueeze(-1)))
        return self.head((F.softmax(self.score(h), {}) * h).sum(1))
model = Pool()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
"""
ADAPTER = """\
class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 1), nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.up.weight)
        self.base.requires_grad_(False)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))
model = Adapter()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
"""
EVALUATES = "model.eval()\nwith torch.no_grad():\n    score = F.mse_loss(model(x), y)\n"
ACCUMULATES = """\
for step in range(24):
    loss = F.mse_loss(model(x), y) / 4
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""
ATTENTION = """\
q = nn.Linear(8, 8)
optimizer = torch.optim.SGD(q.parameters(), 0.1)
mask = torch.full((32, 32), float('-inf')).triu(1)
"""


BEST = """\
best = {}
for step in range(12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step == 3:
        best = {}  # here
model.load_state_dict(best)
"""
COMPARED = """\
before = {}  # here
for step in range(3):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
after = {}
changed = [not torch.equal(old, new) for old, new in zip(before, after)] if isinstance(before, list) else torch.equal(before, after)
"""
CUBED = "F.mse_loss(Cube.apply(model(x) * 0.1), y)"
HOOKED = """\
class Seen:
    def __init__(self, net):
        self.kept = []
        net[0].register_forward_hook(self.keep)
    def keep(self, module, inputs, output):
        self.kept.append(output.detach().clone())
for step in range(30):
    seen = Seen(model)  # here
    loss = F.mse_loss(model(x.repeat(8, 1)), y.repeat(8, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del seen
"""
WEIGHTED = """\
weights, first = torch.ones(2), None
for step in range(6):
    losses = torch.stack([F.mse_loss(model(x), y), F.relu(model(x) - 100).mean()])
    first = losses.detach() if first is None else first
    ratios = losses.detach() / first  # here
    loss = (weights * losses).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    weights = ratios
"""
OUTSIDE = """\
for epoch in range(6):
    for part, goal in zip(x.split(4), y.split(4)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(part), goal)
        loss.backward()
    {}optimizer.step()  # here
"""
ADVERSARIAL = """\
maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
of_maker, of_judge = torch.optim.SGD(maker.parameters(), 0.01), torch.optim.SGD(judge.parameters(), 0.01)
for step in range(12):
    made = maker(x)
    of_judge.zero_grad()
    (F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()).backward()
    of_judge.step()
    scores = judge({})  # here
    fooled = F.softplus(-scores).mean()
    near = F.l1_loss(made, x)
    of_maker.zero_grad()
    (fooled + 10 * near).backward()
    of_maker.step()
"""
TWO_NETS = """\
maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
of_maker, of_judge = torch.optim.SGD(maker.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
for step in range(6):
    made = maker(torch.randn(4, 4))
    of_judge.zero_grad()
    (judge(x[:4]).mean() - judge(made.detach()).mean()).backward()
    of_judge.step()
    scores = judge(made)[:, 0]
    if step == 4:
        scores = scores[:1]
    scaled = (scores - scores.min()) / (scores.max() - scores.min())  # here
    of_maker.zero_grad()
    scaled.mean().backward()
    of_maker.step()
"""
HISTORY = """\
history = []
for step in range(12):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    history.append({})  # here
"""
EPISODES = """\
class Memory:
    def __init__(self):
        self.episode, self.episodes = [], []
    def end(self):
        self.episodes.append({})  # here
        self.episode.clear()
memory = Memory()
for step in range(12):
    memory.episode.append(x[step : step + 4])
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    memory.end()
"""
FROZEN = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 1)
    def forward(self, x):
        return self.head(self.body(x))
model = Net()
model.body.requires_grad_(False)
model.body.eval()
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05)
for step in range(12):
    model.train()  # here
{}    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
"""
OWN_FUNCTION = """\
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3
    @staticmethod
    def backward(ctx, grad_output):
        x, = ctx.saved_tensors
        {}  # here
"""
PLAIN_TENSOR = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.weight = {}  # here
    def forward(self, x):
        return torch.tanh(self.body(x)) @ self.weight
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
ONE_LINE = f"for step in range(12):\n    loss = {MEAN}\n    {{}}\n"
NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
    def forward(self, x):
        out = self.last(torch.tanh(self.first(x)))
        return {}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
""" + loop("F.mse_loss(model(x), y)")


def sgd(rate: float) -> str:
    """An optimizer with a learning rate."""
    return f"optimizer = torch.optim.SGD(model.parameters(), lr={rate})\n"


def at_step(cell: str, new: str) -> str:
    """The cell with other code in place of the update."""
    return cell.replace("    optimizer.step()\n", new)


def before_backward(cell: str, new: str) -> str:
    """The cell with a line before the backward pass."""
    return cell.replace("    loss.backward()\n", f"{new}    loss.backward()\n")


MARKED = "    optimizer.step()  # here\n"
FAULTS = {
    "log_of_negative": Cell(loop("torch.log(model(x) - 10).mean()  # here"), "nanhunt", raises=True),
    "sqrt_of_zero": Cell(loop("torch.sqrt((model(x) * 0).sum())  # here"), "nanhunt", raises=True),
    "division_by_zero": Cell(loop("(model(x) / (y - y)).mean()  # here"), "nanhunt", raises=True),
    "bad_data": Cell(loop(MEAN, before="x = x.clone()\nx[3, 2] = float('nan')\n"), "nanhunt", raises=True),
    "overflow_of_exp": Cell(loop("(model(x) * 200).exp().mean()  # here"), "nanhunt", raises=True),
    "diverges": Cell(loop(MEAN, before=sgd(40) + LINEAR, steps=60), "gradwatch", ("%%nanhunt",), raises=True),
    "hooks_in_a_loop": Cell(HOOKED, "memtrace"),
    "state_of_an_earlier_step": Cell(WEIGHTED, "nanhunt", raises=True),
    "step_outside_of_the_loop": Cell(OUTSIDE.format(""), "autograd"),
    "detached_penalty": Cell(loop("F.mse_loss(model(x), y) + 0.1 * model(x).detach().pow(2).mean()  # here"), "autograd"),
    "detached_term": Cell(ADVERSARIAL.format("made.detach()"), "autograd"),
    "noise_from_before_the_step": Cell(TWO_NETS, "nanhunt", raises=True),
    "broadcast_loss": Cell(loop("F.mse_loss(model(x), y[:, 0])  # here"), "autograd"),
    "broadcast_module": Cell(loop("nn.L1Loss()(model(x), target)  # here", before="target = y.squeeze()\n"), "autograd"),
    "broadcast_by_hand": Cell(loop("((y.flatten() - model(x)) ** 2).mean()  # here"), "autograd"),
    "broadcast_metric": Cell(loop(MEAN, after="    hits = ((model(x) > 0).float() == (y[:, 0] > 0)).sum().item()  # here\n"), "autograd"),
    "best_state_without_a_copy": Cell(BEST.format("{}", "model.state_dict()"), "autograd"),
    "compared_with_itself": Cell(COMPARED.format("model[0].weight.data", "model[0].weight"), "autograd"),
    "history_of_one_memory": Cell(HISTORY.format("model[0].weight.data"), "autograd"),
    "history_of_states": Cell(HISTORY.format("model.state_dict()"), "autograd"),
    "history_of_one_list": Cell(EPISODES.format("self.episode"), "autograd"),
    "frozen_part_in_training_mode": Cell(FROZEN.format(""), "autograd"),
    "function_ignores_its_gradient": Cell(OWN_FUNCTION.format("return 3 * x ** 2") + loop(CUBED), "autograd"),
    "plain_tensor_in_a_module": Cell(PLAIN_TENSOR.format("torch.randn(16, 1, requires_grad=True)") + loop(MEAN), "autograd"),
    "backward_twice": Cell(at_step(loop(MEAN, steps=2), "    loss.backward()  # here\n    optimizer.step()\n"), "autograd", raises=True),
    "inplace": Cell(loop("(h := torch.exp(model(x)), h.add_(1), h.sum())[2]  # here"), "autograd", raises=True),
    "detached": Cell(loop("F.mse_loss(model(x).detach(), y)  # here"), "autograd", raises=True),
    "rewrapped": Cell(loop("torch.tensor(F.mse_loss(model(x), y).item(), requires_grad=True)  # here"), "autograd"),
    "not_in_optimizer": Cell(loop(WITH_HEAD, before=HEAD), "autograd"),
    "shared_line_order": Cell(ONE_LINE.format("loss.backward(); optimizer.zero_grad(); optimizer.step()  # here"), "autograd"),
    "shared_line_detach": Cell(
        ONE_LINE.format("optimizer.zero_grad(); loss = loss.detach(); loss.backward(); optimizer.step()  # here"), "autograd", raises=True
    ),
    "scores_of_one": Cell(SCORES.format("-1") + loop(MEAN), "autograd", also=("%%gradwatch",)),
    "branch_unused": Cell(BRANCHES.format("  # here", "self.head(h)") + loop(MEAN), "autograd"),
    "zeros_returned": Cell(NET.format("torch.zeros(len(x), 1)  # here"), "autograd", raises=True),
    "zeros_like_returned": Cell(NET.format("torch.zeros_like(out)  # here"), "autograd", raises=True),
    "layers_made_in_forward": Cell(IN_FORWARD, "autograd"),
    "model_made_in_each_step": Cell(IN_LOOP.format("  # here", 1), "autograd"),
    "schedule_to_zero": Cell(
        loop(MEAN, before="s = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0)  # here\n", after="    s.step()\n", steps=40),
        "gradwatch",
    ),
    "leaf_in_place": Cell("model[0].weight += 1  # here\n", "autograd", raises=True),
    "keeps_graphs": Cell(loop(MEAN, before="history = []\n", after="    history.append(loss)  # here\n", steps=30), "memtrace"),
    "dead": Cell(
        loop(MEAN, before="model[1] = nn.ReLU()\nwith torch.no_grad():\n    model[0].bias.fill_(-100.)\n", steps=40),
        "autograd",
        ("%%gradwatch",),
    ),
    "learning_rate_of_zero": Cell(loop(MEAN, before=sgd(0.0).replace("\n", "  # here\n"), steps=40), "gradwatch"),
    "clipped_before_backward": Cell(
        before_backward(loop(MEAN, steps=40), "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here\n"), "gradwatch"
    ),
    "wrong_size": Cell("model(torch.randn(4, 9))  # here\n", "shapes", raises=True),
    "wrong_labels": Cell(loop("F.cross_entropy(model(x), labels)  # here"), "shapes", raises=True),
    "integer_input": Cell("model(torch.ones(4, 8, dtype=torch.long))  # here\n", "shapes", raises=True),
}
TWO = {
    "never_zeroed_and_diverges": Cell(
        at_step(loop(MEAN, before=sgd(1.5) + LINEAR, zero="", steps=200), MARKED), "autograd", ("%%nanhunt",), raises=True
    ),
    "nan_and_growth": Cell(
        before_backward(loop("torch.log(model(x) + 2 - step).mean()  # here", before="kept = []\n", steps=30), KEEPS),
        "nanhunt", raises=True,
    ),
    "left_out_and_growth": Cell(
        loop(WITH_HEAD, before=f"{HEAD}kept = []\n", after=KEEPS, steps=30), "autograd", also=("%%memtrace",)
    ),
    "wrong_size_after_growth": Cell(
        loop(MEAN, before="kept = []\n", after=f"{KEEPS}model(torch.randn(4, 9))  # here\n", steps=30),
        "shapes", also=("%%memtrace",), raises=True,
    ),
    "error_after_silent_fault": Cell(loop(MEAN, zero="", after="loss.backward()  # here\n", steps=6), "autograd", raises=True),
    "nan_after_silent_fault": Cell(
        loop("torch.log(model(x) - step * 2 + 4).mean()  # here", zero="", steps=8), "nanhunt", also=("%%autograd",), raises=True
    ),
}  # fmt: skip
HEALTHY = {
    "one_model_a_fold": IN_LOOP.format("", 4),
    "accumulation": ACCUMULATES,
    "dropout_and_norm": loop(MEAN, before=NORM, steps=40, after=EVALUATES),
    "clipping_and_schedule": at_step(
        loop(MEAN, before="schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)\n", steps=40),
        "    nn.utils.clip_grad_norm_(model.parameters(), 10.)\n    optimizer.step()\n    schedule.step()\n",
    ),
    "scores_of_many": SCORES.format("1") + loop(MEAN, steps=40),
    "weighted_by_its_own_value": loop("F.mse_loss(model(x), y) * (1 + 0.1 * model(x).detach().pow(2).mean())"),
    "adversarial": ADVERSARIAL.format("made"),
    "frozen_part": FROZEN.format("    model.body.eval()\n"),
    "history_of_inputs": HISTORY.format("x"),
    "best_state_copied": BEST.format("{}", "{name: value.clone() for name, value in model.state_dict().items()}"),
    "state_loaded_at_once": loop(MEAN, after="    model.load_state_dict(model.state_dict())\n"),
    "compared_with_a_copy": COMPARED.format("model[0].weight.detach().clone()", "model[0].weight"),
    "squares": loop("((h := model(x) - y) * h).mean()", after="    tied = torch.equal(model[0].weight, model[0].weight)\n"),
    "function": OWN_FUNCTION.format("return grad_output * 3 * x ** 2") + loop(CUBED),
    "adapter": ADAPTER + loop(MEAN, steps=40),
    "branch_returned": BRANCHES.format("", "self.head(h), gate") + loop("F.mse_loss(model(x)[0], y)", steps=40),
    "decays_to_a_tenth": loop(
        MEAN, before="s = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.1)\n", after="    s.step()\n", steps=40
    ),
    "pairs_of_one_tensor": loop(f"{MEAN} + ((s := model(x)) - s.squeeze(1).detach()).abs().mean() * 0"),
    "pairs_on_purpose": loop(f"{MEAN} + 0.1 * (model(x)[:, 0].unsqueeze(1) - y[:, 0]).tanh().mean() ** 2"),
    "losses_as_numbers": loop(MEAN, before="history = []\n", after="    history.append(loss.item())\n", steps=40),
    "inference": "model.eval()\nwith torch.inference_mode():\n    for part in x.split(4):\n        out = model(part)\n",
    "masked_attention": loop("F.scaled_dot_product_attention(q(x)[None], q(x)[None], q(x)[None], mask).pow(2).mean()", before=ATTENTION),
}
