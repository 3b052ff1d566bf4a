"""From the first difference between two runs to its cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.documented import fix_for
from torchdebug_magics.instruments.deterministic.recorder import Recorder
from torchdebug_magics.instruments.deterministic.recording import Recording
from torchdebug_magics.instruments.deterministic.report import Divergence
from torchdebug_magics.instruments.deterministic.runs import Enough

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.compare import Comparison, Difference
    from torchdebug_magics.instruments.deterministic.recorder import Op
    from torchdebug_magics.instruments.deterministic.recording import Seen
    from torchdebug_magics.instruments.deterministic.runs import Runs
    from torchdebug_magics.report import Location

__all__ = ["culprit"]


@dataclass
class _Told:
    """Cause, explanation and fix."""

    cause: Any
    explanation: str
    fix: str = ""
    op: str = ""
    location: Location | None = None
    other: Location | None = None


def culprit(comparison: Comparison, error: Exception | None, runs: Runs) -> Divergence:
    """What differed between the first run and the second, and why."""
    difference = comparison.difference
    if difference is None:
        assert error is not None
        return _of_error(error)
    if difference.kind == "way":
        return _of_way(comparison.earlier, difference)
    op = difference.op
    assert op is not None
    told = _of_result(op, difference, runs) if difference.kind == "gave" else _of_outside(op)
    return Divergence(
        op=told.op or op.plan.name,
        module=difference.module,
        location=told.location or _location(difference),
        occurrence=comparison.earlier.occurrence(difference.place),
        cause=told.cause,
        explanation=told.explanation,
        fix=told.fix,
        other=told.other,
        phase=difference.phase,
    )


def _of_error(error: Exception) -> Divergence:
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0] if text else ''}"
    return Divergence(
        op="",
        module=None,
        location=None,
        occurrence=1,
        cause="state_leak",
        explanation=f"the second run raised {said}: it did not find what the first run began with",
        fix="make in the cell itself what the cell uses up",
    )


def _of_way(earlier: Recording, difference: Difference) -> Divergence:
    """The runs went different ways: another op, another line, or an end."""
    before = earlier[difference.place] if difference.place < len(earlier) else None
    first = None if before is None else earlier.places[before.line]
    name = difference.op.plan.name if difference.op is not None else ""
    first_name = "" if before is None else earlier.op_name(before.op)
    here, there = _location(difference), None if first is None else first.location
    if difference.op is None:
        said = f"the second run ended where the first one went on with `{first_name}`"
    elif before is None:
        said = f"the second run went on with `{name}` where the first one had ended"
    else:
        said = f"the first run went to `{first_name}` ({there}), the second one to `{name}` ({here})"
    return Divergence(
        op=first_name or name,
        module=difference.module,
        location=there or here,
        occurrence=earlier.occurrence(difference.place) if before is not None else 1,
        cause="control_flow",
        explanation=said,
        fix="",
        other=here if before is not None else None,
        phase=difference.phase,
    )


def _of_outside(op: Op) -> _Told:
    """What came into the op was not made by an op."""
    return _Told("outside_data", f"`{op.plan.name}` was given other data, which no op of torch's has made")


def _of_result(op: Op, difference: Difference, runs: Runs) -> _Told:
    if op.plan.is_random:
        return _of_generator(op, difference)
    if op.empty is not None:
        return _Told(
            "uninitialized_memory",
            f"`{op.plan.name}` reads memory that `torch.empty` has made ({op.empty.location}) and nobody has written",
            "`torch.zeros` in place of `torch.empty`, or write all of it before it is read",
            op="aten.empty.memory_format",
            location=op.empty.location,
            other=_location(difference),
        )
    if not _inputs_agree(difference.place, runs):
        return _of_outside(op)
    if op.plan.is_view or op.plan.moves or op.plan.is_pointwise:
        return _Told(
            "unknown", f"`{op.plan.name}` gave other numbers on equal inputs, which it cannot do by itself: something else wrote there"
        )
    fix = fix_for(op.plan.name)
    known = "as its documentation says it may" if fix else "and torch's documentation says nothing of it"
    return _Told("nondeterministic_op", f"`{op.plan.name}` gave other numbers on the very same inputs, {known}", fix)


def _of_generator(op: Op, difference: Difference) -> _Told:
    generator: Any = next((one for one in (*op.args, *op.kwargs.values()) if isinstance(one, torch.Generator)), None)
    if generator is None:
        return _Told(
            "unseeded_generator",
            f"`{op.plan.name}` draws from torch's global generator, which the cell itself has seeded anew (`torch.seed()`)",
            "`torch.manual_seed(42)`, or no seeding at all: this magic has seeded it",
        )
    # In here it is wrapped anew: it is known by what is behind it.
    held: list[tuple[str, Any]] = [(name, value) for name, value in difference.names.items() if isinstance(value, torch.Generator)]
    name = next((name for name, value in held if value._cdata == generator._cdata), "")
    called = f"`{name}`" if name else "a `torch.Generator`"
    return _Told(
        "unseeded_generator",
        f"`{op.plan.name}` draws from {called}, which has another seed in each run",
        f"`{name or 'generator'}.manual_seed(42)` in place of `.seed()`",
    )


def _inputs_agree(place: int, runs: Runs) -> bool:
    """Whether an op is given the same in two more runs, each of its inputs read just before it."""
    return _given_at(place, runs) == _given_at(place, runs)


def _given_at(place: int, runs: Runs) -> int | None:
    given: list[int] = []

    def seen(seen: Seen, op: Op) -> None:
        if op.place >= place:
            given.append(seen.given)
            raise Enough

    runs.again(Recorder(Recording(), seen, thorough_at=place))
    return given[0] if given else None


def _location(difference: Difference) -> Location | None:
    return None if difference.line is None else difference.line.location
