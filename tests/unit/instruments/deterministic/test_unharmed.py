"""Whatever fails in a look at a run, or is interrupted: the user's run is whole, and nothing is held when it is over."""

from __future__ import annotations

import builtins
import gc
import io
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchdebug_magics.instruments.deterministic import probe
from torchdebug_magics.instruments.deterministic.ops import digest_recorder as recorder
from torchdebug_magics.instruments.deterministic.twice import runs
from torchdebug_magics.probing import dispatch
from torchdebug_magics.probing.state import contents

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
X = torch.randn(8, 6)
"""
TRAIN = """\
optimizer.zero_grad()
loss = net(X).square().mean()
loss.backward()
optimizer.step()
"""


@pytest.fixture
def ready(shell: InteractiveShell) -> InteractiveShell:
    shell.run_cell(SETUP).raise_error()
    return shell


@pytest.fixture
def trained(ready: InteractiveShell) -> list[torch.Tensor]:
    """The weights after one step, as they are without us."""
    ready.run_cell(f"%%deterministic -q\n{TRAIN}").raise_error()
    weights = [one.detach().clone() for one in ready.user_ns["net"].parameters()]
    ready.run_cell(SETUP).raise_error()
    return weights


def failing(original: Callable[..., Any], at: int, error: type[BaseException] = MemoryError) -> Callable[..., Any]:
    """The same function, whose call number `at` fails."""
    calls = 0

    def instead(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        return original(*args, **kwargs)

    return instead


def weights_of(shell: InteractiveShell) -> list[torch.Tensor]:
    return [one.detach() for one in shell.user_ns["net"].parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("at", range(1, 9))
def test_no_memory_while_it_goes_back_to_the_start(
    ready: InteractiveShell, trained: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    over = runs.Runs.over

    def short_of_memory(self: runs.Runs, held: contents.Contents) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contents, "_kept", failing(contents._kept, at))
            over(self, held)

    monkeypatch.setattr(runs.Runs, "over", short_of_memory)
    ran = ready.run_cell(f"%%deterministic --verify -q -o d\n{TRAIN}")
    assert ran.error_in_exec is None
    assert same(weights_of(ready), trained)
    found = ready.user_ns["d"]
    assert (found.verified, found.not_verified) in {(None, "the second run did not finish"), (True, "")}
    assert bool(found.problems) == (found.verified is None)


@pytest.mark.parametrize("at", range(1, 5))
def test_a_second_interrupt_while_the_end_comes_back(
    ready: InteractiveShell, trained: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    finish = runs.Runs.finish
    is_first = True

    def interrupted(self: runs.Runs) -> None:
        nonlocal is_first
        with pytest.MonkeyPatch.context() as patch:
            if is_first:
                is_first = False
                patch.setattr(contents, "write_into", failing(contents.write_into, at, KeyboardInterrupt))
            finish(self)

    monkeypatch.setattr(runs.Runs, "finish", interrupted)
    ran = ready.run_cell(f"%%deterministic --verify -q\n{TRAIN}")
    assert isinstance(ran.error_in_exec, KeyboardInterrupt)
    assert same(weights_of(ready), trained)


@pytest.mark.parametrize("where", ["written_by", "folded", "of_tensor"])
@pytest.mark.parametrize("at", [1, 7, 40])
def test_a_failure_of_ours_is_no_error_of_the_users_op(
    ready: InteractiveShell, trained: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    monkeypatch.setattr(recorder, where, failing(getattr(recorder, where), at))
    ran = ready.run_cell(f"%%deterministic --verify -q -o d\n{TRAIN}")
    assert ran.error_in_exec is None
    assert same(weights_of(ready), trained)
    found = ready.user_ns["d"]
    assert (found.verified, found.not_verified) == (None, probe.NOT_SEEN)
    assert found.problems == ("recording an op failed: MemoryError: ",)


def test_the_second_run_is_cut_short_by_a_failure_of_ours(
    ready: InteractiveShell, trained: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "RunComparison", failing(probe.RunComparison, 1))
    ran = ready.run_cell(f"%%deterministic --verify -q -o d\n{TRAIN}")
    assert ran.error_in_exec is None
    assert ready.user_ns["d"].not_verified == "the second run did not finish"
    assert same(weights_of(ready), trained)


def test_what_stands_in_is_gone_though_its_end_was_interrupted(ready: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    before = builtins.open, builtins.input, io.open
    monkeypatch.setattr(dispatch, "take_off", failing(dispatch.take_off, 1, KeyboardInterrupt))
    ran = ready.run_cell(f"%%deterministic --verify -q\n{TRAIN}")
    assert isinstance(ran.error_in_exec, KeyboardInterrupt)
    assert (builtins.open, builtins.input, io.open) == before
    assert not dispatch.modes()


@pytest.mark.parametrize("flags", ["", "--verify", "-o d", "--save there.json"])
def test_when_it_is_over_nothing_is_held(ready: InteractiveShell, flags: str) -> None:
    ready.run_cell(f"%%deterministic -q {flags}\n{TRAIN}").raise_error()
    model = weakref.ref(ready.user_ns["net"])
    ready.run_cell("del net, optimizer, loss")
    gc.collect()
    assert model() is None
    Path("there.json").unlink(missing_ok=True)


@pytest.mark.parametrize("flags", ["-q", "--verify -q -o d"])
def test_in_code_that_was_exported(ready: InteractiveShell, flags: str) -> None:
    ready.run_line_magic("load_ext", "torchdebug_magics")
    ready.run_cell_magic("deterministic", flags, TRAIN)
    if "-o" in flags:
        assert ready.user_ns["d"].verified is True


def test_a_cell_that_fails_overwrites_no_earlier_print(ready: InteractiveShell) -> None:
    ready.run_cell("%%deterministic -q --save there.json\nX * 2").raise_error()
    before = Path("there.json").read_text(encoding="utf-8")
    ready.run_cell("%%deterministic -q -o d --save there.json\nX * 2\n1 / 0")
    assert Path("there.json").read_text(encoding="utf-8") == before
    assert ready.user_ns["d"].problems == ("there.json was not written because the cell raised ZeroDivisionError",)
    Path("there.json").unlink()


def test_where_it_cannot_be_saved_is_said_before_anything_runs(ready: InteractiveShell) -> None:
    ran = ready.run_cell("%%deterministic --save no/where.json\nran = 1")
    assert "there is no folder no" in str(ran.error_in_exec)
    assert "ran" not in ready.user_ns


def test_a_compiled_module_is_compiled_once_and_torch_warns_of_no_hook(ready: InteractiveShell) -> None:
    compiled: list[object] = []

    def backend(graph: Any, _inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    ready.user_ns["backend"] = backend
    counts = []
    for flags in ("-q", "-q -o d", "-q --verify -o d"):
        torch._dynamo.reset()
        compiled.clear()
        ready.run_cell("fast = torch.compile(net, backend=backend)").raise_error()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ready.run_cell(f"%%deterministic {flags}\ny = fast(X)\ny = fast(X) + 1").raise_error()
        counts.append(len(compiled))
    torch._dynamo.reset()
    assert counts == [1, 1, 1]
