"""From the first difference between two runs to its cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.knowledge import repair
from torchdebug_magics.instruments.deterministic.ops.recorder import Recorder
from torchdebug_magics.instruments.deterministic.ops.recording import Recording
from torchdebug_magics.instruments.deterministic.origin import first_difference
from torchdebug_magics.instruments.deterministic.report import Cause, Divergence
from torchdebug_magics.instruments.deterministic.twice.runs import Enough

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.ops.recorder import Empty, Op
    from torchdebug_magics.instruments.deterministic.ops.recording import Seen
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.twice.compare import Comparison, Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs
    from torchdebug_magics.report import Location

__all__ = ["culprit"]

_IN_THE_CELL = "make in the cell itself what the cell uses up"


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What is said of an op."""

    cause: Cause
    explanation: str
    fix: str = ""
    op: str = ""
    """Where another one is to blame."""
    location: Location | None = None
    other: Location | None = None


def culprit(comparison: Comparison, error: Exception | None, runs: Runs, unrestorable: Sequence[str]) -> Divergence:
    """What differed between the first run and the second, and why."""
    found = _Culprit(comparison, runs, unrestorable)
    return found.of_error(error) if comparison.difference is None and error is not None else found.of_difference()


class _Culprit:
    def __init__(self, comparison: Comparison, runs: Runs, unrestorable: Sequence[str]) -> None:
        self._comparison = comparison
        self._runs = runs
        self._unrestorable = unrestorable

    def of_error(self, error: Exception) -> Divergence:
        """The second run raised where the first one did not, after the very same ops."""
        text = str(error).strip().splitlines()
        said = f"the second run raised {type(error).__name__}: {text[0] if text else ''}"
        told = self._of_leak(said) or self._of_origin(len(self._comparison.earlier), said)
        return Divergence(
            op="", module=None, location=told.location, occurrence=1, cause=told.cause, explanation=told.explanation, fix=told.fix
        )

    def of_difference(self) -> Divergence:
        """An op differed."""
        difference, earlier = self._comparison.difference, self._comparison.earlier
        assert difference is not None
        told = self._told(difference)
        location = told.location or _location(difference)
        return Divergence(
            op=told.op or (difference.op.plan.name if difference.op is not None else ""),
            module=difference.module,
            location=location,
            occurrence=earlier.occurrence(difference.place) if difference.place < len(earlier) else 1,
            cause=told.cause,
            explanation=told.explanation,
            fix=told.fix,
            other=told.other if told.other != location else None,
            phase=difference.phase,
        )

    def _told(self, difference: Difference) -> _Told:
        if difference.kind == "way":
            return self._of_way(difference)
        op = difference.op
        assert op is not None
        if difference.kind == "given":
            return self._of_outside(op)
        if op.plan.is_random:
            return _of_generator(op, difference)
        agree = self._inputs_agree(difference.place)
        if op.empty is not None and (agree or self._origin(difference.place) is None):
            return _of_empty(op, op.empty, difference)
        return _of_kernel(op) if agree else self._of_outside(op)

    def _of_way(self, difference: Difference) -> _Told:
        """The runs went different ways: another op, another line, or an end."""
        earlier = self._comparison.earlier
        before = earlier[difference.place] if difference.place < len(earlier) else None
        line = None if before is None else earlier.places[before.line]
        there, here = None if line is None else line.location, _location(difference)
        went = [
            "to its end" if before is None else f"to `{earlier.op_name(before.op)}` ({there})",
            "to its end" if difference.op is None else f"to `{difference.op.plan.name}` ({here})",
        ]
        said = f"the first run went {went[0]}, the second one {went[1]}"
        leak = self._of_leak(said)
        if leak is not None:
            return replace(leak, cause="control_flow", op="" if before is None else earlier.op_name(before.op), location=there, other=here)
        origin = self._origin(difference.place)
        return _Told(
            cause="control_flow",
            explanation=f"{said}: {origin.explanation}" if origin is not None else said,
            fix=origin.fix if origin is not None else "",
            op="" if before is None else earlier.op_name(before.op),
            location=there,
            other=here if before is not None else None,
        )

    def _of_outside(self, op: Op) -> _Told:
        """What came into the op was not made by an op."""
        said = f"`{op.plan.name}` was given other data, which no op of torch's has made"
        return self._of_origin(op.place, said)

    def _of_origin(self, place: int, said: str) -> _Told:
        leak = self._of_leak(said)
        if leak is not None:  # no more runs: each would use up more
            return leak
        origin = self._origin(place)
        if origin is not None:
            return _Told(cause=origin.cause, explanation=origin.explanation, fix=origin.fix, other=origin.location)
        return _Told(cause="outside_data", explanation=said)

    def _of_leak(self, said: str) -> _Told | None:
        if self._unrestorable:
            gone = ", ".join(self._unrestorable)
            return _Told(
                cause="state_leak", explanation=f"{said}: the second run did not find {gone} as the first one did", fix=_IN_THE_CELL
            )
        if "backward through the graph a second time" in said:
            explanation = f"{said}: the graph was made before, and the first run has used it up"
            return _Told(cause="state_leak", explanation=explanation, fix="compute the loss in the cell that calls `backward()`")
        return None

    def _origin(self, place: int) -> Origin | None:
        """The line of Python on the way to an op at which two more runs begin to differ."""
        watch = self._recorder(_until(place))

        def run() -> None:
            nonlocal watch
            watch = self._recorder(_until(place))
            self._runs.through(watch)

        try:
            return first_difference(run, lambda: self._runs.back(watch), guard=self._runs.guard)
        finally:
            self._runs.back(watch)

    def _inputs_agree(self, place: int) -> bool:
        """Whether an op is given the same in two more runs, each of its inputs read just before it; not where it was not reached."""
        one = self._given_at(place)
        return one is not None and one == self._given_at(place)

    def _given_at(self, place: int) -> tuple[str, Location | None, int] | None:
        given: list[tuple[str, Location | None, int]] = []

        def seen(seen: Seen, op: Op) -> None:
            if op.place >= place:
                if op.place == place:
                    given.append((op.plan.name, None if op.line is None else op.line.location, seen.given))
                raise Enough

        self._runs.again(self._recorder(seen, thorough_at=place))
        return given[0] if given else None

    def _recorder(self, seen: Callable[[Seen, Op], None], *, thorough_at: int = -1) -> Recorder:
        return Recorder(Recording(), seen, self._runs.guard, self._runs.hooks, thorough_at=thorough_at)


def _until(place: int) -> Callable[[Seen, Op], None]:
    """Ends a run at an op, once: what runs on the way out is let through."""
    is_over = False

    def seen(_seen: Seen, op: Op) -> None:
        nonlocal is_over
        if op.place >= place and not is_over:
            is_over = True
            raise Enough

    return seen


def _of_generator(op: Op, difference: Difference) -> _Told:
    generator: Any = next((one for one in (*op.args, *op.kwargs.values()) if isinstance(one, torch.Generator)), None)
    if generator is None:
        return _Told(
            cause="unseeded_generator",
            explanation=f"`{op.plan.name}` draws from torch's global generator, which the cell itself has seeded anew",
            fix="`torch.manual_seed(42)` in place of `torch.seed()`, or none of it: this magic has seeded it",
        )
    # In here it is wrapped anew: it is known by what is behind it.
    held: list[tuple[str, Any]] = [(name, value) for name, value in difference.names.items() if isinstance(value, torch.Generator)]
    name = next((name for name, value in held if value._cdata == generator._cdata), "")
    return _Told(
        cause="unseeded_generator",
        explanation=f"`{op.plan.name}` draws from {f'`{name}`' if name else 'a `torch.Generator`'}, which has another seed in each run",
        fix=f"`{name or 'generator'}.manual_seed(42)` in place of `.seed()`, or of a seed that changes",
    )


def _of_empty(op: Op, empty: Empty, difference: Difference) -> _Told:
    made = None if empty.line is None else empty.line.location
    maker = "torch.empty" if empty.plan.base == "empty" else f"{empty.plan.base}"
    zeros = {
        "empty": "`torch.zeros` in place of `torch.empty`, or ",
        "empty_like": "`torch.zeros_like` in place of `torch.empty_like`, or ",
    }
    return _Told(
        cause="uninitialized_memory",
        explanation=f"`{op.plan.name}` reads memory that `{maker}` has made{f' ({made})' if made else ''} and nobody has written",
        fix=f"{zeros.get(empty.plan.base, '')}write all of it before it is read",
        op=empty.plan.name,
        location=made,
        other=_location(difference),
    )


def _of_kernel(op: Op) -> _Told:
    if op.plan.is_view or op.plan.moves or op.plan.is_pointwise:
        said = f"`{op.plan.name}` gave other numbers on equal inputs, which it cannot do: something else wrote there"
        return _Told(cause="unknown", explanation=said)
    fix = repair(op.plan.base)
    known = "as its documentation says it may" if fix else "and torch's documentation says nothing of it"
    return _Told(cause="nondeterministic_op", explanation=f"`{op.plan.name}` gave other numbers on the very same inputs, {known}", fix=fix)


def _location(difference: Difference) -> Location | None:
    return None if difference.line is None else difference.line.location
