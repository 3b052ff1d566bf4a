"""Two runs: what differs is named with its op, line and cause; what does not differ raises no alarm, and leaves one run behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.instruments.deterministic.planted import HEALTHY, IMPORTS, PLANTED, Planted
from tests.unit.instruments.deterministic.planted_lines import PLANTED as LINES
from torchdebug_magics.instruments.deterministic.report import lines_of
from torchdebug_magics.instruments.deterministic.twice import culprit

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def ran(shell: InteractiveShell, cell: str) -> Any:
    result = shell.run_cell(cell, store_history=True)
    if result.error_before_exec is not None:
        raise result.error_before_exec
    return result


def verified(shell: InteractiveShell, setup: str, body: str, flags: str = "") -> Any:
    ran(shell, IMPORTS + setup).raise_error()
    ran(shell, f"%%deterministic --verify -q -o d {flags}\n{body}")
    return shell.user_ns["d"]


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_what_differs_is_named(shell: InteractiveShell, case: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    found = verified(shell, case.setup, case.body)
    assert found.verified is False, found
    assert found.problems == ()
    told = found.divergence
    assert (told.cause, told.op, told.location.line) == (case.cause, case.op, case.line + 1), told
    assert told.location.source == case.body.splitlines()[case.line - 1].strip()
    assert told.explanation
    changed = lines_of(told)[0]
    assert changed is not None
    assert changed in (told.location, told.other)
    assert f"{changed.place}: `{changed.source}` · " in found.verdict


BY_THE_CLOCK = pytest.mark.waits  # two runs may take equally many steps while others use the machine: then it is repeated alone


@pytest.mark.parametrize("name", [pytest.param(name, marks=BY_THE_CLOCK if "how long" in name else ()) for name in LINES])
def test_the_line_of_the_op_and_the_one_to_change_are_named(shell: InteractiveShell, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = LINES[name]
    found = verified(shell, case.setup, case.body)
    assert (found.verified, found.problems) == (False, ()), found
    told, lines = found.divergence, case.body.splitlines()
    assert told.cause == case.cause, told
    assert told.location.source.endswith("# <- op"), told
    assert told.other.source == next(line.strip() for line in lines if line.endswith("# <- source")), told


def test_further_runs_that_agree_by_chance_make_no_op_the_cause(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(culprit.Culprit, "_inputs_agree", lambda *_: True)
    body = "total = torch.zeros(())\nfor one in {torch.full((2,), float(i)) for i in range(60)}:\n    total = total + one.sum()"
    assert verified(shell, "", body).divergence.cause == "hash_order"


def test_a_generator_that_the_clock_seeds_is_told_of_its_seed(shell: InteractiveShell) -> None:
    told = verified(shell, "", "import time\ng = torch.Generator().manual_seed(time.time_ns())\na = torch.randn(3, generator=g)").divergence
    assert told.cause == "unseeded_generator"
    assert told.fix == "use `g.manual_seed(42)` instead of `.seed()` or a varying seed"


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_the_same_raises_no_alarm(shell: InteractiveShell, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup, body = HEALTHY[name]
    found = verified(shell, setup, body)
    assert found.verified is True, found.divergence
    assert (found.divergence, found.problems, found.unrestorable) == (None, (), ())
    assert not any(one.on == "race" for one in found.depends_on)
    assert found.ops_count > 0


@pytest.mark.parametrize("name", [name for name in HEALTHY if name not in {"a clock that does not matter", "workers"}])
def test_the_namespace_is_that_of_one_run(shell: InteractiveShell, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup, body = HEALTHY[name]
    begin = IMPORTS + "torch.manual_seed(3); np.random.seed(3); random.seed(3)\n" + setup
    ends = []
    for flags in ("--keep-rng", "--keep-rng --verify"):
        ran(shell, "%reset -f\n" + begin).raise_error()
        ran(shell, f"%%deterministic -q {flags}\n{body}").raise_error()
        ends.append((_plain(shell.user_ns, shell.user_ns_hidden), torch.get_rng_state().tolist()))
    assert ends[0] == ends[1]


def _plain(names: dict[str, Any], hidden: Any) -> dict[str, object]:
    return {name: _value(value, set()) for name, value in names.items() if name not in hidden and not name.startswith("_")}


def _value(value: Any, seen: set[int]) -> object:  # noqa: PLR0911 - one line a kind of value
    kind = type(value)
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        gradient = _value(value.grad, seen) if value.is_leaf and not value.is_inference() and value.grad is not None else None
        return str(value.dtype), dense.double().nan_to_num(7).tolist(), gradient, value.requires_grad
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if id(value) in seen:
        return "seen"
    if kind in {list, tuple, set}:
        return [_value(one, seen) for one in value]
    if isinstance(value, dict):
        return [(key if isinstance(key, str) else "key", _value(one, seen)) for key, one in value.items()]
    if kind.__module__.startswith("numpy.random"):
        return str(value.bit_generator.state) if hasattr(value, "bit_generator") else str(value.get_state())
    if kind in {int, float, str, bool, type(None)}:
        return value
    if kind.__module__ == "__main__" or isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        seen.add(id(value))
        return kind.__name__, [
            (name, _value(one, seen)) for name, one in vars(value).items() if not name.startswith(("__", "_torchdynamo"))
        ]
    return kind.__name__
