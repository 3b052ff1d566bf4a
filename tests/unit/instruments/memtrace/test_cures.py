"""What else stays than a list that grows: sums that begin anew, cycles, what was deleted; and that what is said to cure it does."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.instruments.memtrace.test_growth import trace
from torchdebug_magics.instruments.memtrace.held.cured_line import adds_a_number, rewritten, target
from torchdebug_magics.instruments.memtrace.held.fixes import Cause, as_code, fix

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.corpus

EPOCHS = """for epoch in range(4):
    running_loss = 0.0
    for a, b in batches({count}):
        {keeps}
"""
METER = """class Meter:
    def __init__(self):
        self.sum = self.count = 0
    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
meters = {'train': {'loss': Meter()}}
for epoch in range(3):
    for a, b in batches(14):
        meters['train']['loss'].update(learn(a, b), 2)
    meters['train']['loss'] = Meter()
"""


@pytest.mark.parametrize("count", [6, 20])
def test_a_sum_that_begins_anew_with_each_epoch_keeps_the_graphs_of_one(shell: InteractiveShell, count: int) -> None:
    found = trace(shell, EPOCHS.format(count=count, keeps="running_loss += learn(a, b)")).graph_growth
    assert (found.holder, found.location.line) == ("running_loss", 5)
    assert "`running_loss += learn(a, b).detach()`" in found.fix
    assert trace(shell, EPOCHS.format(count=count, keeps="running_loss += learn(a, b).detach()")).graph_growth is None


def test_that_of_a_meter_names_the_line_in_its_class(shell: InteractiveShell) -> None:
    found = trace(shell, METER).graph_growth
    assert found.holder == "meters['train']['loss'].sum"
    assert found.location.source == "self.sum += value * n"


def test_the_last_losses_are_not_growth(shell: InteractiveShell) -> None:
    report = trace(shell, "last = deque(maxlen=5)\nfor a, b in batches(40):\n    last.append(learn(a, b))")
    assert (report.growth, report.graph_growth) == (None, None)


CYCLES = {
    "an output on ctx": (
        """class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        ctx.result = given.clone()
        return ctx.result
    @staticmethod
    def backward(ctx, grad):
        return grad
for _ in range(20):
    out = Copy.apply(torch.randn(100, 100, requires_grad=True))
""",
        "ctx.result = given.clone()",
        "ctx.save_for_backward",
    ),
    "a hook that closes over the module": (
        """class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(100, 100)
        def hook(module, given, out):
            self.seen = True
        self.register_forward_hook(hook)
for _ in range(12):
    Leaky()
""",
        "self.register_forward_hook(hook)",
        "`this = weakref.ref(self)`",
    ),
    "a method in an attribute": (
        """class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(100, 100)
        self.act = self.fast
    def fast(self, a):
        return a
for _ in range(12):
    Picks()
""",
        "self.act = self.fast",
        "weakref.WeakMethod",
    ),
    "a reentrant checkpoint": (
        """from torch.utils.checkpoint import checkpoint
def block(x):
    held = {'first': x * 0}
    def run(x):
        held
        return x * 1
    x = checkpoint(run, x, use_reentrant=True)
    held['x'] = x
    return x
x = torch.zeros(100, 100, requires_grad=True)
for _ in range(12):
    block(x).sum().backward()
""",
        "x = checkpoint(run, x, use_reentrant=True)",
        "use_reentrant=False",
    ),
    "an error that is kept": (
        """def attempt():
    big = torch.randn(100, 100)
    try:
        raise ValueError
    except ValueError as error:
        last = error
for _ in range(12):
    attempt()
""",
        "last = error",
        "del last",
    ),
}


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_leads_the_verdict_where_it_is_what_stays(shell: InteractiveShell, name: str) -> None:
    code, line, cure = CYCLES[name]
    gc.disable()  # as on a GPU, whose memory does not make it run
    try:
        report = trace(shell, code)
    finally:
        gc.enable()
    found = report.kept_by_cycles
    assert found is not None
    assert found.location.source == line
    assert found.count >= 3
    assert cure in found.fix
    assert "stayed in reference cycles" in report.verdict


def test_a_cycle_or_two_are_no_finding(shell: InteractiveShell) -> None:
    code, _, _ = CYCLES["a method in an attribute"]
    report = trace(shell, code.replace("range(12)", "range(2)"))
    assert report.kept_by_cycles is None
    assert sum(cycle.freed_bytes for cycle in report.cycles) > 0


def test_cycles_that_are_small_beside_the_rest_are_no_finding(shell: InteractiveShell) -> None:
    code, _, _ = CYCLES["an error that is kept"]
    assert trace(shell, f"large = torch.randn(1000, 1000)\n{code}").kept_by_cycles is None


def test_a_graph_in_a_gradient_is_not_cured_by_what_has_the_last_of_it(shell: InteractiveShell) -> None:
    code = """for i in range(20):
    x = torch.randn(100, 100, requires_grad=True)
    y = (x ** 3).sum()
    y.backward(create_graph=True)
    g = x.grad
"""
    growth = trace(shell, code).growth
    assert growth.holder == ""
    assert growth.kept_at.line == 5
    assert "torch.autograd.grad(..., create_graph=True)" in growth.fix
    cured = code.replace("y.backward(create_graph=True)", "g, = torch.autograd.grad(y, x, create_graph=True)").replace(
        "    g = x.grad\n", ""
    )
    assert trace(shell, cured).growth is None


COLLECTS = """class Curve:
    def __init__(self):
        self.preds = []
    def update(self, preds):
        self.preds.append(preds)
    def reset(self):
        self.preds = []
curve = Curve()
for epoch in range(6):
    for a, b in batches(4):
        learn(a, b)
        with torch.no_grad():
            curve.update(net(a).repeat(1, 8))
"""


def test_a_metric_that_collects_is_to_be_reset(shell: InteractiveShell) -> None:
    growth = trace(shell, COLLECTS).growth
    assert growth.fix.startswith("call `curve.reset()`")
    assert growth.kept_at.source == "self.preds.append(preds)"
    assert trace(shell, f"{COLLECTS}    curve.reset()\n").growth is None


def test_what_cutting_the_graph_does_not_free_is_not_cured_so(shell: InteractiveShell) -> None:
    code = """log = []
for a, b in batches(16):
    loss = learn(a, b)
    log.append((loss, torch.randn(64, 256)))
"""
    growth = trace(shell, code).growth
    assert not growth.keeps_graph
    assert growth.fix.startswith("keep in `log` only what is needed")


def test_a_loop_over_models_is_a_loop(shell: InteractiveShell) -> None:
    code = """def look(model, a):
    def keep(module, given, out):
        module.seen = out.detach().repeat(1, 4)
    handle = model[1].register_forward_hook(keep)
    model(a).sum().backward()
    handle.remove()
models = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(10)]
for model in models:
    look(model, x)
"""
    growth = trace(shell, code).growth
    assert growth.holder.endswith(".seen")
    assert growth.kept_at.source == "module.seen = out.detach().repeat(1, 4)"
    assert growth.fix.startswith("delete it after use, `del module.seen`")


CACHED = """import functools
class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(200, 200)
    @functools.lru_cache(maxsize=8)
    def table(self, size):
        return torch.arange(size)
    def forward(self, a):
        return self.inner(a) + self.table(200)
model = Cached()
out = model(torch.randn(2, 200)).detach()
del model
"""


def test_a_model_that_a_cache_holds_is_not_freed_by_del(shell: InteractiveShell) -> None:
    report = trace(shell, CACHED)
    assert (report.undeleted.name, report.undeleted.location.line) == ("model", 14)
    assert "<cache>" in report.undeleted.holder
    assert report.verdict.startswith("`del model` freed none of its")


def test_a_model_that_goes_with_its_name_is_freed(shell: InteractiveShell) -> None:
    assert trace(shell, CACHED.replace("    @functools.lru_cache(maxsize=8)\n", "")).undeleted is None


def test_a_model_from_before_that_another_name_holds(shell: InteractiveShell) -> None:
    shell.run_cell("import torch\nbig = torch.nn.Linear(200, 200)\nkept = {'best': big}")
    report = trace(shell, "del big")
    assert (report.undeleted.name, report.undeleted.holder) == ("big", "kept['best'].weight")
    assert report.undeleted.fix == "also delete what holds it: `del kept`"


def test_a_tensor_that_is_resized_again_and_again_grows(shell: InteractiveShell) -> None:
    code = """seen = torch.empty(0)
for i, (a, b) in enumerate(batches(16)):
    learn(a, b)
    seen.resize_((i + 1) * 2048)
"""
    growth = trace(shell, code).growth
    assert (growth.holder, growth.location.line) == ("seen", 5)
    assert 8192 <= growth.bytes_per_iteration <= 9000
    assert growth.fix.startswith("allocate `seen` at its final size")
    assert trace(shell, code.replace("(i + 1) * 2048", "2048")).growth is None


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("total += loss", "total += loss.detach()"),
        ("total = total + a * b", "total = (total + a * b).detach()"),
        ("log['a'].append(loss)  # kept", "log['a'].append(loss.detach())"),
        ("log.append({'loss': loss})", ""),
        ("h, c = cell(a)", ""),
        ("for a in b: total += a", ""),
        ("log.append(loss", ""),
    ],
)
def test_a_line_with_its_cure(line: str, wanted: str) -> None:
    assert rewritten(line, ".detach()") == wanted


def test_what_a_line_does() -> None:
    assert adds_a_number("total += loss")
    assert not adds_a_number("ema = 0.9 * ema + 0.1 * loss")
    assert (target("module.input = a"), target("a = b"), target("a.b, a.c = d")) == ("module.input", "", "")


def test_a_path_as_python_has_it() -> None:
    assert as_code("net.1.x") == "net[1].x"
    assert as_code("blocks.0.attn.12") == "blocks[0].attn[12]"


@pytest.mark.parametrize(("path", "dim", "wanted"), [("keys", 1, "`keys = keys[:, -1000:]`"), ("bank", 0, "`bank = bank[-1000:]`")])
def test_a_tensor_is_bounded_where_it_grows(path: str, dim: int, wanted: str) -> None:
    assert wanted in fix(path, Cause(keeps_graph=False, trains=False, swells=True, dim=dim))


def test_what_cannot_be_written_is_not_said() -> None:
    said: Any = fix("cache.layers[...].keys", Cause(keeps_graph=False, trains=False, swells=True, dim=2))
    assert "-1000" not in said
