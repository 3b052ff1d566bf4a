"""What grows and is no tensor, what an error holds while it is handled, and what is said where a loop was not understood."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.memtrace.test_growth import trace

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.corpus

TRAIN = "for i, (a, b) in enumerate(batches(40)):\n    learn(a, b)\n"
OBJECTS = {
    "a list of dicts": (
        f"rows = []\n{TRAIN}    rows.append([{{'id': n, 'text': str(n) * 40}} for n in range(1500)])",
        "rows",
        "rows.append([{'id': n, 'text': str(n) * 40} for n in range(1500)])",
    ),
    "arrays in an attribute": (
        f"""import numpy
class Log:
    def __init__(self):
        self.pictures = []
    def add(self, picture):
        self.pictures.append(picture)
log = Log()
{TRAIN}    log.add(numpy.ones(60_000))""",
        "log.pictures",
        "self.pictures.append(picture)",
    ),
}


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
def test_python_objects_that_grow_are_named_with_their_share(shell: InteractiveShell, name: str, light: bool) -> None:
    code, holder, line = OBJECTS[name]
    report = trace(shell, code, light=light)
    growth = report.growth
    assert (growth.what, growth.holder, growth.kept_at.source) == ("objects", holder, line)
    assert growth.share_ratio > 1 / 3
    assert f"`{holder}.clear()`" in growth.fix
    assert "outside its tensors: Python objects" in report.verdict


@pytest.mark.parametrize(
    "code",
    [
        f"{TRAIN}    rows = [{{'id': n, 'text': str(n) * 40}} for n in range(1500)]",
        f"last = deque(maxlen=3)\n{TRAIN}    last.append([{{'id': n}} for n in range(3000)])",
        f"seen = {{}}\n{TRAIN}    seen.setdefault(i % 4, [{{'id': n}} for n in range(3000)])",
        f"numbers = []\n{TRAIN}    numbers.append(learn(a, b).item())",
    ],
)
def test_objects_that_are_let_go_are_no_growth(shell: InteractiveShell, code: str) -> None:
    assert trace(shell, code).growth is None


def test_results_of_a_loop_that_trains_nothing_are_what_it_is_for(shell: InteractiveShell) -> None:
    code = """rows = []
with torch.no_grad():
    for a, b in batches(40):
        net(a)
        rows.append(['x' * 100 + str(n) for n in range(2000)])
"""
    assert trace(shell, code).growth is None


def test_a_profiler_that_runs_all_the_time(shell: InteractiveShell) -> None:
    code = """from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True) as prof:
    for a, b in batches(60):
        learn(a, b)
"""
    growth = trace(shell, code).growth
    assert (growth.what, growth.holder) == ("profiler", "prof")
    assert growth.kept_at.line == 3
    assert "`prof.step()`" in growth.fix


WORKERS = """class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [{'id': n, 'text': str(n) * 8} for n in range(120_000)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, at):
        row = self.rows[at]
        return torch.full((64,), float(row['id'] % 7)), len(row['text']) % 10
data = Rows()
loader = torch.utils.data.DataLoader(data, 2000, num_workers=2)
"""


def test_lists_of_objects_in_workers(shell: InteractiveShell) -> None:
    shell.run_cell("import torch, gc\n" + WORKERS + "gc.collect()")
    growth = trace(shell, "for a, b in loader:\n    learn(a, b)\n").growth
    assert (growth.what, growth.holder.endswith(".rows")) == ("workers", True)
    assert "as a NumPy array" in growth.fix


RETRY = """def forward(a):
    h = torch.tanh(a @ torch.randn(64, 4096))
    if len(a) > 64:
        raise RuntimeError('too large')
    return h.sum()
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, a):
        return self.scale * forward(a)
large = Large()
def attempt(a):
    try:
        return large(a)
    except RuntimeError:
        return large(a[:64])  # here
attempt(torch.randn(512, 64))
"""


def test_an_error_that_is_handled_holds_what_the_failed_call_had_made(shell: InteractiveShell) -> None:
    report = trace(shell, RETRY)
    found = report.undeleted
    assert found.location.source == "return large(a[:64])  # here"
    assert found.live_bytes >= 512 * 4096 * 4
    assert "-> forward:" in found.holder
    assert "after the `except` block" in found.fix
    assert report.verdict.startswith("8.0 MiB of the failed call stay allocated while its error is handled")


def test_a_retry_after_the_block_holds_nothing(shell: InteractiveShell) -> None:
    code = RETRY.replace("        return large(a[:64])  # here", "        pass\n    return large(a[:64])")
    assert trace(shell, code).undeleted is None


def test_a_refusal_while_an_error_is_handled_is_helped_by_the_retry_behind_it(shell: InteractiveShell) -> None:
    code = RETRY.replace("RuntimeError('too large')", "RuntimeError('too large')").replace(
        "    return h.sum()", "    raise torch.OutOfMemoryError('Tried to allocate 20.00 MiB')"
    )
    shell.run_cell("import torch")
    from tests.doors import MagicDoor
    from tests.unit.instruments.memtrace.loops import SETUP

    shell.run_cell(SETUP)
    report = MagicDoor(shell)("memtrace", code).report
    assert report.oom.kind == "handled error"
    assert "after the `except` block" in report.oom.best.what


def test_errors_that_are_kept_hold_the_calls_they_came_by(shell: InteractiveShell) -> None:
    code = """failed = []
def check(out):
    raise ValueError
for a, b in batches(12):
    out = learn(a, b)
    try:
        seen = net(a).detach().repeat(1, 8)
        check(seen)
    except ValueError as error:
        failed.append(error)
"""
    growth = trace(shell, code).growth
    assert growth.holder.startswith("failed[0]")
    assert "`error.with_traceback(None)`" in growth.fix


OPTIMIZERS = """kept = []
for epoch in range(6):
    update = torch.optim.Adam(net.parameters())
    kept.append(update)
    for a, b in batches(4):
        update.zero_grad(); F.cross_entropy(net(a), b).backward(); update.step()
"""


def test_optimizers_in_a_list_keep_their_states(shell: InteractiveShell) -> None:
    growth = trace(shell, OPTIMIZERS).growth
    assert growth.holder.startswith("kept[")
    assert growth.kept_at.source == "kept.append(update)"
    assert growth.fix.startswith("create the optimizer once, before the loop")


@pytest.mark.parametrize(
    "code",
    [
        OPTIMIZERS.replace("kept.append(update)", "kept = [update]"),
        """nets = [nn.Linear(64, 10) for _ in range(4)]
updates = [torch.optim.Adam(one.parameters()) for one in nets]
for a, b in batches(12):
    for one, update in zip(nets, updates):
        update.zero_grad(); F.cross_entropy(one(a), b).backward(); update.step()
""",
    ],
)
def test_optimizers_that_are_made_once_are_no_growth(shell: InteractiveShell, code: str) -> None:
    assert trace(shell, code).growth is None


CYCLES = """class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(600, 600)
        self.act = self.fast
    def fast(self, a):
        return a
for _ in range(16):
    Holds()
import gc
gc.collect()
"""


def test_cycles_that_went_before_the_cell_ended_are_found_where_they_were_the_peak(shell: InteractiveShell) -> None:
    gc.disable()
    try:
        report = trace(shell, CYCLES)
    finally:
        gc.enable()
    assert report.kept_by_cycles.location.source == "self.act = self.fast"
    assert report.verdict.startswith("")
    assert "stayed in reference cycles" in report.verdict


def test_what_a_name_leads_to_is_in_no_cycle(shell: InteractiveShell) -> None:
    assert (
        trace(
            shell, CYCLES.replace("    Holds()\n", "    kept.append(Holds())\n").replace("for _ in", "kept = []\nfor _ in")
        ).kept_by_cycles
        is None
    )


def test_a_loop_that_was_not_understood_is_named(shell: InteractiveShell) -> None:
    report = trace(shell, "kept = []\nfor i in range(6):\n    kept.append(torch.randn(100, 100))\n")
    assert report.unseen_loop.line == 3
    assert "growth was not checked in the loop at In[" in report.verdict


def test_what_no_variable_leads_to_is_not_called_no_growth(shell: InteractiveShell) -> None:
    code = """import ctypes
for a, b in batches(12):
    learn(a, b)
    hidden = torch.randn(64, 64)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(hidden.untyped_storage()))
    hidden = None
"""
    report = trace(shell, code)
    assert report.growth is not None or report.unnamed_bytes >= 12 * 64 * 64 * 4


@pytest.mark.parametrize(("kept", "size"), [("a * 2", 32 * 64 * 4), ("a.clone()", 32 * 64 * 4)])
def test_what_a_fix_frees_is_weighed(shell: InteractiveShell, kept: str, size: int) -> None:
    growth = trace(shell, f"kept = []\nfor a, b in batches(12):\n    learn(a, b)\n    kept.append({kept})\n").growth
    assert growth.frees_bytes == 12 * size


def test_what_another_variable_holds_too_is_not_freed(shell: InteractiveShell) -> None:
    code = """kept, also = [], []
for i, (a, b) in enumerate(batches(12)):
    learn(a, b)
    out = a * 2
    kept.append(out)
    also.append(out)
"""
    assert trace(shell, code).growth.frees_bytes <= 32 * 64 * 4
