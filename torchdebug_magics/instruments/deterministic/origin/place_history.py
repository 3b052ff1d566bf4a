"""Which lines looked at each place where a value is kept, in their order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from inspect import CO_OPTIMIZED
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.deterministic.origin.step_questions import differing

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Place, Run, Step
    from torchdebug_magics.instruments.deterministic.origin.pairing import Pairing

__all__ = ["History", "Seen"]


class Seen(NamedTuple):
    """A look at a place."""

    number: int
    step: Step
    path: str
    """What the line calls it."""


class History:
    """Of the first run; lines that only the second run took stand where the runs parted."""

    def __init__(self, first: Run, second: Run, pairing: Pairing) -> None:
        self._pairing = pairing
        self._steps = first.steps
        self._seen: defaultdict[Place, list[Seen]] = defaultdict(list)
        for step in first.steps:
            self._index(step)
        for step in second.steps:
            if step not in pairing.partner:
                self._index(step)
        for entries in self._seen.values():
            entries.sort(key=lambda entry: entry.number)

    def of(self, place: Place) -> Sequence[Seen]:
        """All looks at it."""
        return self._seen.get(place, ())

    def common(self, place: Place) -> Place:
        """What a place of the second run is called in the first one."""
        if place[0] == "local":
            return ("local", self._pairing.activations.get(place[1], place[1]), *place[2:])
        return place

    def place_of(self, drawn: object, before: Step) -> Place | None:
        """Of a generator: in another run it may be another object, then it is the one whose state differs, if there is but one."""
        if drawn is None:
            return None
        place: Place = ("random", id(drawn))
        if place in self._seen:
            return place
        others = [one for one, entries in self._seen.items() if one[0] == "random" and self._ends_otherwise(entries, before)]
        return others[0] if len(others) == 1 else None

    def is_bound(self, name: str) -> bool:
        """Whether a line of the run binds it; else it is from before."""
        return any(step.statement is not None and name in step.statement.bound for step in self._steps)

    def handed(self, at: Step, name: str) -> Step | None:
        """The last line before that handed an object to a function, with something that is different each time, as `setattr` takes it."""
        for step in reversed(self._steps[: at.number]):
            calls = step.statement.calls if step.statement is not None and step.sources else ()
            if any(name in {one.partition(".")[0] for one in call.arguments} for call in calls):
                return step
        return None

    def binder(self, at: Step, name: str) -> Step | None:
        """The line before that bound a name, in the same function or in another statement of the cell."""
        code = at.activation.code
        for step in reversed(self._steps[: at.number]):
            own = step.activation is at.activation or (not code.co_flags & CO_OPTIMIZED and step.activation.code.co_name == code.co_name)
            if own and step.statement is not None and name in step.statement.bound:
                return step
        return None

    def _ends_otherwise(self, entries: list[Seen], before: Step) -> bool:
        for number, step, path in reversed(entries):
            partner = self._pairing.partner.get(step)
            if number < before.number and partner is not None:
                return differing(step, partner, path)[1]
        return False

    def _index(self, step: Step) -> None:
        fork = self._pairing.fork_of.get(step)
        number = step.number if fork is None or fork.after is None else fork.after.number
        for path in {*step.before, *step.after}:
            held = step.after.get(path) or step.before[path]
            self._seen[self.common(held.place)].append(Seen(number, step, path))
