"""Further runs as far as an op: what it is given there, and whether that is the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.ops.op_recorder import Recorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.twice.ending import Enough

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.ops.op_recording import Seen
    from torchdebug_magics.instruments.deterministic.ops.seen_op import Op
    from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs
    from torchdebug_magics.report import Location

__all__ = ["OpReruns"]


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
