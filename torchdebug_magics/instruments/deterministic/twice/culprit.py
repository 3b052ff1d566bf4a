"""From the first difference between two runs to its cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from torchdebug_magics.instruments.deterministic.counterfactual.set_order import Ordering, dependence_of
from torchdebug_magics.instruments.deterministic.ops.op_recorder import Recorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, Seen
from torchdebug_magics.instruments.deterministic.origin import ON, Origin
from torchdebug_magics.instruments.deterministic.report import Dependence, Divergence
from torchdebug_magics.instruments.deterministic.twice.body import Enough, TooLong
from torchdebug_magics.instruments.deterministic.twice.op_causes import (
    Told,
    drawn_from,
    location_of,
    name_of,
    of_empty,
    of_kernel,
    origin_before,
    origin_in_workers,
    raised_at,
)
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Comparison, Difference
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.report import Location

_FIRST_ALONE = "later runs agree with the second one: the first run left state that could not be restored, such as a cache entry"
_IN_THE_CELL = "create what the cell consumes in the cell itself"
_TORCHS_OWN = "aten."


class Culprit:
    """What differed between the first run and the second, and why."""

    def __init__(
        self, comparison: Comparison, error: BaseException | None, runs: Runs, used_up: Sequence[str], orders: Iterable[Ordering]
    ) -> None:
        self._comparison = comparison
        self._error = error
        self._runs = runs
        self._reruns = OpReruns(runs, comparison.earlier)
        self._used_up = used_up
        self._orders = orders
        """Of the second run."""

    def unexplained(self) -> Divergence:
        """The op, before any further run looks for the cause."""
        return self._divergence(Told(cause="unknown", explanation="the search for the cause was interrupted"))

    def divergence(self) -> Divergence:
        """The op, and the cause: mostly by a few further runs."""
        difference = self._comparison.difference
        return self._divergence(self._of_error() if difference is None else self._told(difference))

    def _divergence(self, told: Told) -> Divergence:
        difference, earlier = self._comparison.difference, self._comparison.earlier
        if difference is None:
            assert self._error is not None
            at = told.location or raised_at(self._error)
            return Divergence(op="", module=None, location=at, occurrence=1, cause=told.cause, explanation=told.explanation, fix=told.fix)
        at = told.location or location_of(difference)
        return Divergence(
            op=told.op or (difference.op.plan.name if difference.op is not None else ""),
            module=difference.module,
            location=at,
            occurrence=earlier.occurrence(difference.place) if difference.place < len(earlier) else 1,
            cause=told.cause,
            explanation=told.explanation,
            fix=told.fix,
            on=told.on or ON.get(told.cause),
            further=tuple(
                Dependence(on=one.on, op="", location=one.location, what=one.explanation, fix=one.fix)
                for one in told.further
                if one.on is not None
            ),
            other=told.other if told.other != at else None,
            phase=difference.phase,
        )

    def _of_error(self) -> Told:
        """The second run raised where the first one did not, after the very same ops."""
        error = self._error
        if isinstance(error, TooLong):
            return Told(cause="control_flow", explanation="the second run continued past the end of the first one, and was stopped")
        text = str(error).strip().splitlines()
        said = f"the second run raised {type(error).__name__}: {text[0][:200] if text else ''}"
        told = self._of_leak(said) or self._of_origin(len(self._comparison.earlier), said)
        if told.explanation == said and self._reruns.raises_again(error):
            return Told(cause="state_leak", explanation=f"{said}: {_FIRST_ALONE}", fix=_IN_THE_CELL)
        return told

    def _told(self, difference: Difference) -> Told:
        if difference.kind == "way":
            return self._of_way(difference)
        op = difference.op
        assert op is not None
        if difference.kind == "given":
            return self._of_outside(op, difference)
        if op.plan.is_random:
            return self._of_generator(op, difference)
        agree = self._reruns.inputs_agree(difference.place)
        if op.empty is not None and (agree or self._origin(difference.place) is None):
            return of_empty(op, op.empty, difference)
        told = of_kernel(op)
        if agree and (told.fix or not op.plan.name.startswith(_TORCHS_OWN) or self._cause_before(difference.place) == "unknown"):
            return (self._of_set() or told) if told.cause == "unknown" else told
        return self._of_outside(op, difference)

    def _cause_before(self, place: int) -> str:
        """Of what reached an op of torch's that is not known to differ by itself: two further runs may have agreed by chance."""
        origin = self._origin(place)
        return "unknown" if origin is None else origin.cause

    def _of_generator(self, op: Op, difference: Difference) -> Told:
        """What the op draws from has another seed; and where it got that."""
        generator = drawn_from(op)
        origin = None if self._used_up else self._origin(op.place, generator)
        is_global = generator is torch.default_generator
        name = "" if is_global else name_of(generator, difference.names)
        if origin is not None and origin.cause == "unseeded_generator" and len(origin.names) == 1:
            name = name or origin.names[0]
        said = f"`{op.plan.name}` draws from "
        if is_global:
            said += "torch's global generator, which the cell itself reseeded"
            fix = "remove `torch.seed()`, as this magic has already seeded the generator, or replace it with `torch.manual_seed(42)`"
        else:
            said += f"{f'`{name}`' if name else 'a `torch.Generator`'}, which has a different seed in each run"
            fix = f"use `{name or 'generator'}.manual_seed(42)` instead of `.seed()` or a varying seed"
        if origin is None or origin.cause in {"unknown", "control_flow"}:
            return Told(cause="unseeded_generator", explanation=said, fix=fix)
        if origin.cause != "unseeded_generator":
            said, fix = f"{said}: {origin.explanation}", origin.fix if is_global else fix
        return Told(cause="unseeded_generator", on=origin.on, explanation=said, fix=fix, other=origin.location, further=origin.further)

    def _of_way(self, difference: Difference) -> Told:
        """The runs went different ways: another op, another line, or an end."""
        earlier = self._comparison.earlier
        before = earlier[difference.place] if difference.place < len(earlier) else None
        line = None if before is None else earlier.places[before.line]
        there, here = None if line is None else line.location, location_of(difference)
        went = [
            "to its end" if before is None else f"to `{earlier.op_name(before.op)}` ({there})",
            "to its end" if difference.op is None else f"to `{difference.op.plan.name}` ({here})",
        ]
        said = f"the first run continued {went[0]}, the second one {went[1]}"
        leak = self._of_leak(said)
        if leak is not None:
            return replace(leak, cause="control_flow", op="" if before is None else earlier.op_name(before.op), location=there, other=here)
        origin = self._origin(difference.place, is_way=True)
        is_leak = origin is None and self._reruns.is_first_alone(difference)
        name = "" if before is None else earlier.op_name(before.op)
        if origin is not None and difference.op is not None and _is_inside(here, origin.branch) and not _is_inside(there, origin.branch):
            there, here, name = here, there, difference.op.plan.name  # which run is the longer one is chance; the op in the loop is told
        return Told(
            cause="state_leak" if is_leak else "control_flow",
            explanation=f"{said}: {origin.explanation}" if origin is not None else f"{said}: {_FIRST_ALONE}" if is_leak else said,
            fix=origin.fix if origin is not None else _IN_THE_CELL if is_leak else "",
            on=None if origin is None else origin.on,
            op=name,
            location=there,
            other=origin.decided if origin is not None and origin.decided is not None else here if before is not None else None,
        )

    def _of_outside(self, op: Op, difference: Difference) -> Told:
        """What came into the op was not made by an op."""
        said = f"`{op.plan.name}` received different input, created outside PyTorch"
        told = self._of_origin(op.place, said)
        if told.explanation == said and (ordered := self._of_set()) is not None:
            return ordered
        if told.explanation == said and self._reruns.is_first_alone(difference):
            return Told(cause="state_leak", explanation=f"{said}: {_FIRST_ALONE}", fix=_IN_THE_CELL)
        return told

    def _of_set(self) -> Told | None:
        """Objects in a set stand where their addresses put them, and those differ in each run."""
        found = next((one for one in self._orders if one.kind == "address"), None)
        if found is None:
            return None
        dependence = dependence_of(found)
        return Told(cause="hash_order", explanation=dependence.what, fix=dependence.fix, other=found.location)

    def _of_origin(self, place: int, said: str) -> Told:
        leak = self._of_leak(said)
        if leak is not None:  # no more runs: each would use up more
            return leak
        origin = self._origin(place)
        if origin is not None and origin.cause == "worker_seed":
            origin = origin_in_workers(self._runs) or origin
        if origin is not None:
            return Told(
                cause=origin.cause,
                on=origin.on,
                explanation=origin.explanation,
                fix=origin.fix,
                other=origin.decided or origin.location,
                further=origin.further,
            )
        return Told(cause="outside_data", explanation=said)

    def _of_leak(self, said: str) -> Told | None:
        if self._used_up:
            gone = ", ".join(self._used_up)
            return Told(cause="state_leak", explanation=f"{said}: {gone} could not be restored for the second run", fix=_IN_THE_CELL)
        if "backward through the graph a second time" in said:
            explanation = f"{said}: the graph was built before this cell, and the first run freed it"
            return Told(cause="state_leak", explanation=explanation, fix="compute the loss in the cell that calls `backward()`")
        return None

    def _origin(self, place: int, drawn: object = None, *, is_way: bool = False) -> Origin | None:
        return origin_before(place, self._runs, drawn, is_way=is_way)


def _is_inside(location: Location | None, branch: tuple[str, int, int] | None) -> bool:
    return location is not None and branch is not None and location.file == branch[0] and branch[1] <= location.line <= branch[2]


class OpReruns:
    """Of one body; `earlier` is its first run."""

    def __init__(self, runs: Runs, earlier: Recording) -> None:
        self._runs = runs
        self._earlier = earlier

    def raises_again(self, error: BaseException | None) -> bool:
        """Whether one more run raises an error of that kind, too."""
        return type(self._runs.again(self._recorder(_look_on))) is type(error)

    def is_first_alone(self, difference: Difference) -> bool:
        """Whether two more runs do what the second one did: then the first one has left something that it did not find itself."""
        seen = None if difference.seen is None else difference.seen._replace(gave=0)
        return all(self._seen_at(difference.place) == seen for _ in range(2))

    def _seen_at(self, place: int) -> Seen | None:
        found: list[Seen] = []

        def seen(seen: Seen, op: Op) -> None:
            if op.place >= place:
                found.append(seen._replace(gave=0))
                raise Enough

        self._runs.again(self._recorder(seen, recording=self._earlier.another()))
        return found[0] if found else None

    def inputs_agree(self, place: int) -> bool:
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

    def _recorder(self, seen: Callable[[Seen, Op], None], *, recording: Recording | None = None, thorough_at: int = -1) -> Recorder:
        return Recorder(Recording() if recording is None else recording, seen, self._runs.guard, self._runs.hooks, thorough_at=thorough_at)


def _look_on(_seen: Seen, _op: Op) -> None:
    return None
