"""Why another run would give other numbers: each cause with its line, only where it moves the results, and gone when the fix is applied."""

from __future__ import annotations

import os
import signal
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchdebug_magics
from tests.unit.instruments.deterministic.planted import IMPORTS
from torchdebug_magics.instruments.deterministic.counterfactual import dependences
from torchdebug_magics.instruments.deterministic.twice import culprit, run_comparison, runs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.instruments.deterministic.report import DeterministicReport


@dataclass(frozen=True)
class Told:
    """A cell, the first dependence of which is at the marked line."""

    setup: str
    body: str
    on: str
    op: str
    says: str
    fixed: tuple[str, str]
    """Of the whole notebook: the text before the fix, and after it."""
    carried: tuple[str, ...] = ()


TOLD = {
    "a split": Told(
        "",
        "data = TensorDataset(torch.arange(10.0))\ntrain, test = torch.utils.data.random_split(data, [8, 2])  # <-\n"
        "x = torch.stack([row for row, in test])",
        "seed",
        "aten.randperm.generator",
        "`randperm` draws from torch's generator, which is not seeded",
        ("data = Tensor", "torch.manual_seed(42)\ndata = Tensor"),
    ),
    "one in an object": Told(
        "class Augment:\n    def __init__(self): self.rng = np.random.default_rng()\naugment = Augment()",
        "x = torch.ones(3)\ny = x * augment.rng.random()  # <-",
        "seed",
        "",
        "draws from `augment.rng`, which is not seeded",
        ("x = torch", "augment.rng = np.random.default_rng(42)\nx = torch"),
    ),
    "running statistics where nothing is trained": Told(
        "torch.manual_seed(0)\nnet = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))",
        "y = net(torch.arange(12.0).view(4, 3))  # <-",
        "carried_state",
        "",
        "is in training mode",
        ("y = net", "net.eval()\ny = net"),
        ("net",),
    ),
    "a generator that was seeded before": Told(
        "torch.manual_seed(3)",
        "x = torch.randn(3)  # <-",
        "carried_state",
        "aten.randn.default",
        "was seeded before this cell",
        ("x = torch", "torch.manual_seed(42)\nx = torch"),
        ("torch's generator",),
    ),
    "weights": Told(
        "torch.manual_seed(0)\nnet = nn.Linear(3, 1)",
        "opt = torch.optim.Adam(net.parameters())\nfor _ in range(3):\n    loss = net(torch.ones(2, 3)).pow(2).mean()\n"
        "    opt.zero_grad()\n    loss.backward()\n    opt.step()  # <-",
        "carried_state",
        "aten.addmm.default",
        "starts with `net` as this run left it",
        ("opt = torch", "torch.manual_seed(0)\nnet = nn.Linear(3, 1)\nopt = torch"),
        ("net",),
    ),
}
CARRIED = {
    "a tensor that is bound anew": ("x = torch.ones(3)", "x = x * 2", "this run changes `x`", ("x",)),
    "gradients that add up": (
        "torch.manual_seed(0)\nnet = nn.Linear(3, 1)",
        "net(torch.ones(1, 3)).sum().backward()\ng = net.weight.grad.clone()",
        "adds to the gradients that this run left in `net`",
        ("net.grad",),
    ),
    "an attribute of a class": (
        (
            "class Net(nn.Module):\n    calls = 0\n    def forward(self, x):\n        Net.calls += 1\n        return x * Net.calls\n"
            "net = Net()"
        ),
        "y = net(torch.ones(2)) + 1",
        "this run changes `Net.calls`, and",
        ("Net.calls",),
    ),
    "an attribute of a function": (
        "def step(x):\n    step.n += 1\n    return x * step.n\nstep.n = 0",
        "y = step(torch.ones(2)) + 1",
        "this run changes `step.n`, and",
        ("step.n",),
    ),
    "a variable that a function closes over": (
        (
            "def make():\n    n = 0\n    def step(x):\n        nonlocal n\n        n += 1\n        return x * n\n    return step\n"
            "step = make()"
        ),
        "y = step(torch.ones(2)) + 1",
        "this run changes `n` in `step`, and",
        ("n in step",),
    ),
    "a global variable of a function": (
        "n = 0\ndef step(x):\n    global n\n    n += 1\n    return x * n",
        "y = step(torch.ones(2)) + 1",
        "this run changes `n`, and",
        ("n",),
    ),
    "the environment": (
        "",
        "n = int(os.environ.get('ROUND', '0'))\nos.environ['ROUND'] = str(n + 1)\ny = torch.ones(2) * n",
        "this run changes `os.environ['ROUND']`, and",
        ("os.environ['ROUND']",),
    ),
    "the default dtype": (
        "",
        "y = torch.ones(2) / 3\ntorch.set_default_dtype(torch.float64)\nz = y + 1",
        "this run changes the default dtype, and",
        ("the default dtype",),
    ),
    "not the environment, which changes as well": (
        "history = []",
        "os.environ['TOKENS'] = 'false'\nhistory.append(1)\ny = torch.ones(2) * len(history)",
        "this run changes `history`, and",
        ("history",),
    ),
    "what is taken out of a set": (
        "pool = {'delta', 'alpha', 'beta', 'gamma', 'kappa', 'zeta', 'eta'}",
        "n = pool.pop()\ny = torch.tensor([float(ord(n[0]))]) * 2",
        "this run changes `pool`, and",
        ("pool",),
    ),
}
CHILD = "import subprocess\nsubprocess.run(['sh', '-c', 'echo child >> children.txt'])\nx = torch.ones(2)"
SAME = {
    "a cache": (
        "import functools\n@functools.lru_cache\ndef table(n): return torch.arange(n) * 2.0",
        "x = table(4) + 1\ny = table(5).sum()",
    ),
    "weights that are written over": (
        "torch.manual_seed(0)\nsaved = nn.Linear(4, 4).state_dict()\ntorch.seed()",
        "net = nn.Linear(4, 4)\nnet.load_state_dict(saved)\ny = net(torch.ones(1, 4)).sum()\nprint(y.item())",
    ),
    "generators of the cell's own": ("", "g = torch.Generator().manual_seed(1)\nx = torch.randn(3, generator=g)"),
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With NumPy's global generator as in a kernel that has just begun: another test may have seeded it."""
    monkeypatch.chdir(tmp_path)
    stateful: Any = np.random
    before = stateful.get_bit_generator()
    stateful.set_bit_generator(np.random.MT19937())
    yield
    stateful.set_bit_generator(before)


def verified(shell: InteractiveShell, setup: str, body: str, flags: str = "") -> DeterministicReport:
    shell.run_cell(IMPORTS + "torch.seed()\n" + setup).raise_error()
    shell.run_cell(f"%%deterministic --verify -q -o d {flags}\n{body}", store_history=True).raise_error()
    report: DeterministicReport = shell.user_ns["d"]
    assert report.problems == ()
    assert report.verified
    return report


@pytest.mark.parametrize("name", TOLD)
def test_the_first_dependence_is_the_one_and_its_fix_ends_it(shell: InteractiveShell, name: str, tmp_path: Path) -> None:
    case = TOLD[name]
    report = verified(shell, case.setup, case.body)
    first = report.depends_on[0]
    assert (first.on, first.location is not None and first.location.source.endswith("# <-")) == (case.on, True), first
    assert case.says in first.what
    assert first.op == case.op or not case.op
    assert case.carried == report.carried[: len(case.carried)]
    assert first.what in report.verdict
    assert first.fix in report.verdict
    for file in tmp_path.iterdir():
        file.unlink()
    old, new = case.fixed
    assert old in case.body
    assert verified(shell, case.setup, case.body.replace(old, new, 1)).depends_on == ()


@pytest.mark.parametrize("name", SAME)
def test_what_depends_on_nothing(shell: InteractiveShell, name: str) -> None:
    report = verified(shell, *SAME[name])
    assert (report.depends_on, report.carried) == ((), ())
    assert "Same numbers twice" in report.verdict


def test_quick_leaves_out_what_is_carried(shell: InteractiveShell) -> None:
    case = TOLD["weights"]
    report = verified(shell, case.setup, case.body, "--quick")
    assert (report.depends_on, report.runs_count) == ((), 1)
    drawing = verified(shell, "", "x = torch.randn(3)", "--quick")
    assert [one.on for one in drawing.depends_on] == ["seed"]
    assert drawing.runs_count == 3


def test_only_the_settings_keep_the_order_of_a_sum(shell: InteractiveShell) -> None:
    setup = "torch.manual_seed(0)\nrows = torch.randint(0, 10, (500_000,))\nvalues = torch.randn(500_000)"
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        report = verified(shell, setup, "x = torch.zeros(10).index_put_((rows,), values, accumulate=True)\ny = x.sum()")
    finally:
        torch.set_num_threads(before)
    if report.depends_on:  # two threads may come in the same order by chance
        (first,) = report.depends_on
        assert (first.on, first.op) == ("settings", "aten.index_put_.default")
        assert "use_deterministic_algorithms(True)" in first.fix


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("a = os.urandom(2)[0]\nt = time.perf_counter()\nx = torch.tensor([a + t])", [("entropy", 2), ("clock", 3)]),
        (
            "seed = (int.from_bytes(os.urandom(4), 'big') ^ time.time_ns()) % 2**31\ntorch.manual_seed(seed)\nx = torch.rand(2)",
            [("entropy", 2), ("clock", 2)],
        ),
    ],
    ids=["two-lines", "one-line"],
)
def test_what_remains_when_one_cause_is_repaired_is_told_as_well(shell: InteractiveShell, body: str, told: list[tuple[str, int]]) -> None:
    shell.run_cell(IMPORTS).raise_error()
    shell.run_cell(f"%%deterministic --verify -q -o d\n{body}", store_history=True).raise_error()
    report: DeterministicReport = shell.user_ns["d"]
    assert [(one.on, one.location and one.location.line) for one in report.depends_on] == told
    assert all(one.fix in report.verdict for one in report.depends_on)


def test_two_generators_and_what_the_cell_changes_are_all_told(shell: InteractiveShell) -> None:
    setup = "torch.manual_seed(0)\nnet = nn.Linear(3, 1)\nx = torch.randn(8, 3)\nrows = [3.0]\ntorch.seed()"
    body = """\
order = torch.randperm(8)
noise = np.random.rand(8)
rows.append(1.0)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loss = (net(x[order]) - float(noise[0])).pow(2).mean() * len(rows)
loss.backward()
opt.step()
"""
    report = verified(shell, setup, body)
    assert [one.on for one in report.depends_on] == ["seed", "seed", "carried_state"]
    assert report.carried == ("net", "rows")
    assert all(fix in report.verdict for fix in ("torch.manual_seed(42)", "np.random.seed(42)"))


@pytest.mark.parametrize("name", CARRIED)
def test_what_the_next_run_finds_changed_is_named(shell: InteractiveShell, name: str) -> None:
    setup, body, says, carried = CARRIED[name]
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    try:
        report = verified(shell, setup, body)
    finally:
        torch.set_default_dtype(dtype)
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
    told = [one for one in report.depends_on if one.on == "carried_state"]
    assert says in told[0].what
    assert carried == report.carried or name == "a next run that raises"
    if says.endswith(", and"):
        assert told[0].location is not None
        assert any(
            word in told[0].location.source
            for word in (" += 1", "os.environ['ROUND'] =", "set_default_dtype", "history.append", "pool.pop")
        )


def test_what_a_function_closes_over_is_named_for_verify_too() -> None:
    n = 0

    def step() -> torch.Tensor:
        nonlocal n
        n += 1
        return torch.ones(2) * n

    report = torchdebug_magics.verify(step)
    assert (report.carried, [one.on for one in report.depends_on]) == (("n in step",), ["carried_state"])


@pytest.mark.parametrize(
    "body",
    [
        "x = torch.rand(1).item()\nif abs(x - 0.8823) > 1e-3:\n    raise SystemExit(3)",
        "class Own(BaseException): pass\nx = torch.rand(1).item()\nif abs(x - 0.8823) > 1e-3:\n    raise Own",
    ],
    ids=["exit", "own"],
)
def test_what_a_hidden_run_raises_is_not_the_cells(shell: InteractiveShell, body: str) -> None:
    assert [one.on for one in verified(shell, "", body).depends_on] == ["seed"]


def test_a_loop_that_does_not_end_otherwise_is_ended(shell: InteractiveShell) -> None:
    body = "n += 3\nwhile n != 9:\n    n = n + 3\n    x = torch.ones(2)\ny = torch.full((2,), float(n))"
    assert verified(shell, "n = 0", body).problems == ()


def test_a_cell_that_runs_a_command_is_run_once(shell: InteractiveShell, tmp_path: Path) -> None:
    shell.run_cell(IMPORTS).raise_error()
    shell.run_cell(f"%%deterministic --verify -q -o d\n{CHILD}", store_history=True).raise_error()
    report = shell.user_ns["d"]
    assert (report.verified, "runs the command `sh`" in report.not_verified) == (None, True)
    assert (tmp_path / "children.txt").read_text() == "child\n"


def test_what_differs_by_itself_is_not_blamed_on_what_was_changed(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 0, 0, 0, 0, *range(1, 10_000)])
    ticking: Any = types.ModuleType("ticking")
    ticking.tick = lambda: next(ticks)
    monkeypatch.setitem(sys.modules, "ticking", ticking)
    shell.run_cell(IMPORTS + "import ticking").raise_error()
    shell.run_cell("%%deterministic --verify -q -o d\nx = torch.ones(2) * float(ticking.tick())", store_history=True).raise_error()
    assert all(one.on not in {"seed", "settings"} for one in shell.user_ns["d"].depends_on)


def test_what_the_cell_puts_in_place_of_a_function_stays(shell: InteractiveShell) -> None:
    before = os.listdir
    try:
        verified(shell, "", "real = os.listdir\nos.listdir = lambda *a: sorted(real(*a))\nx = torch.ones(2)")
        assert os.listdir is not before
        assert shell.user_ns["real"] is before
    finally:
        os.listdir = before


# --- what reaches only `print` -------------------------------------------------------------------------------------------------------

PRINTED = {
    "a counter": ("n = 0", "n += 1\nprint('run', n)", "carried_state", "this run changes `n`, and", ("n",)),
    "a counter in an object": (
        "class Meter:\n    calls = 0\n    def __call__(self, x):\n        Meter.calls += 1\n        return x\nmeter = Meter()",
        "y = meter(torch.ones(2) * 2)\nprint(f'{Meter.calls} calls')",
        "carried_state",
        "this run changes `Meter.calls`",
        ("Meter.calls",),
    ),
    "a draw": ("", "y = torch.ones(2) * 2\nprint(random.random())", "seed", "comes from Python's `random`, which is not seeded", ()),
}
NOT_PRINTED = {
    "a clock": ("n = 0", "begin = time.time()\ny = torch.ones(2) * 2\nn += 1\nprint('took', time.time() - begin)"),
    "other words": ("seen = set()", "y = torch.ones(2) * 2\nprint('known' if 1 in seen else 'new')\nseen.add(1)"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_number_that_is_only_printed(shell: InteractiveShell, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup, body, on, says, carried = PRINTED[name]
    report = verified(shell, setup, body)
    (told,) = report.depends_on
    assert (told.on, says in told.what, told.location is not None, report.carried) == (on, True, True, carried), told
    assert on != "carried_state" or "+= 1" in told.location.source
    assert told.what in report.verdict
    assert len([line for line in capsys.readouterr().out.splitlines() if not line.startswith("Out[")]) == 1


@pytest.mark.parametrize("name", NOT_PRINTED)
def test_what_is_printed_otherwise_by_itself_or_in_other_words_is_no_finding(shell: InteractiveShell, name: str) -> None:
    assert verified(shell, *NOT_PRINTED[name]).depends_on == ()


# --- runs that do not end, or are interrupted --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner", ["n = n + 3", "try:\n        n = n + 3\n    except BaseException:\n        pass"], ids=["plain", "catching"]
)
def test_a_loop_without_ops_that_does_not_end_otherwise_is_ended(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    monkeypatch.setattr(runs, "_MORE_S", 0.3)
    before = signal.getsignal(signal.SIGPROF), signal.getsignal(signal.SIGINT)
    shell.run_cell(IMPORTS + "n = 0").raise_error()
    body = f"n += 3\nwhile n != 9:  # <-\n    {inner}\ny = torch.full((2,), float(n))"
    shell.run_cell(f"%%deterministic --verify -q -o d\n{body}", store_history=True).raise_error()
    report: DeterministicReport = shell.user_ns["d"]
    assert report.problems == ("a rerun was stopped after 10 times the CPU time of the first run",)
    (told,) = report.depends_on
    assert (told.on, "starts from that, so that it does not end" in told.what, report.carried) == ("carried_state", True, ("n",))
    assert (signal.getsignal(signal.SIGPROF), signal.getsignal(signal.SIGINT)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert shell.user_ns["n"] == 9


@pytest.mark.parametrize("is_caught", [False, True], ids=["plain", "caught-by-the-cell"])
def test_an_interrupt_keeps_what_was_found(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, *, is_caught: bool) -> None:
    def interrupting(ran: runs.Runs, _ritual: object) -> None:
        run_comparison.effect_of(ran, lambda _: signal.setitimer(signal.ITIMER_REAL, 0.05))

    monkeypatch.setattr(dependences, "on_settings", interrupting)
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    loop = "for _ in range(10):\n    time.sleep(0.02)"
    loop = f"try:\n    {loop.replace(chr(10), chr(10) + '    ')}\nexcept KeyboardInterrupt:\n    pass" if is_caught else loop
    try:
        shell.run_cell(IMPORTS + "torch.seed()").raise_error()
        ran = shell.run_cell(f"%%deterministic --verify -q -o d\nx = torch.randn(3)\n{loop}\nkept = x.clone()", store_history=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    report: DeterministicReport = shell.user_ns["d"]
    assert isinstance(ran.error_in_exec, KeyboardInterrupt)
    assert (report.interrupted, report.verified, [one.on for one in report.depends_on]) == (True, True, ["seed"])
    assert "`randn` draws from torch's generator, which is not seeded" in report.verdict
    assert report.verdict.endswith(
        "interrupted before the determinism settings, other orders of files and completed work, the next run could be checked"
    )
    assert torch.equal(shell.user_ns["kept"], shell.user_ns["x"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_in_the_search_for_a_cause_keeps_the_op(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(culprit, "asked_by", interrupted)
    shell.run_cell(IMPORTS).raise_error()
    ran = shell.run_cell("%%deterministic --verify -q -o d\nx = torch.ones(2) * time.perf_counter()", store_history=True)
    report: DeterministicReport = shell.user_ns["d"]
    assert isinstance(ran.error_in_exec, KeyboardInterrupt)
    assert (report.interrupted, report.verified) == (True, False)
    assert report.divergence is not None
    assert (report.divergence.op, report.divergence.location and report.divergence.location.line) == ("aten.mul.Tensor", 2)
    assert report.verdict.endswith("interrupted")
