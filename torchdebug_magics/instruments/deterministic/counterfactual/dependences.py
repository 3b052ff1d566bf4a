"""What the numbers of a cell depend on, worst first."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.counterfactual.arrival_order import on_arrival
from torchdebug_magics.instruments.deterministic.counterfactual.carried_state import carried_by
from torchdebug_magics.instruments.deterministic.counterfactual.effect import effect_of
from torchdebug_magics.instruments.deterministic.counterfactual.settings_off import on_settings
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.cause.op_causes import drawn_from
from torchdebug_magics.instruments.deterministic.twice.cause.origin_line import origin_before

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchdebug_magics.instruments.deterministic.counterfactual.other_seeds import Draws
    from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.report import Divergence, Potential
    from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
    from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["Search", "of_divergence", "of_potential"]

_FEW = 4


class Search:
    """What the numbers of a cell depend on whose second run agreed. What is found before an interrupt stays."""

    def __init__(
        self,
        runs: Runs,
        earlier: Recording,
        results: Mapping[str, int],
        draws: Draws,
        ritual: Ritual,
        orders: Iterable[Dependence],
        *,
        quick: bool,
    ) -> None:
        self._runs, self._earlier, self._results = runs, earlier, results
        self._draws, self._ritual = draws, ritual
        self._found = [(1, one) for one in orders]
        """How bad it is, and what; `orders` are those of sets."""
        self._carried: tuple[str, ...] = ()
        self._looks = {"other seeds": self._of_seeds}
        if not quick:
            self._looks |= {
                "the determinism settings": self._of_settings,
                "other orders of files and completed work": self._of_arrival,
                "the next run": self._of_what_is_carried,
            }

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What is still to be tried."""
        return tuple(self._looks)

    @property
    def depends_on(self) -> tuple[Dependence, ...]:
        """The worst first."""
        return tuple(one for _, one in sorted(self._found, key=operator.itemgetter(0)))

    @property
    def carried(self) -> tuple[str, ...]:
        """Names of what the next run finds changed."""
        return (*self._carried, *self._draws.carried)

    def run(self) -> bool:
        """Whether what was found holds: not if one more run with nothing otherwise differs, too."""
        is_steady = False
        for name, look in list(self._looks.items()):
            for found in look():
                is_steady = is_steady or not self._differs_by_itself()
                if not is_steady:
                    self._found.clear()
                    return False
                self._found.append(found)
            del self._looks[name]
        return True

    def _of_seeds(self) -> Iterator[tuple[int, Dependence]]:
        for one in self._draws.dependences(self._runs, self._earlier, self._results, self._origin):
            yield (0 if one.on == "seed" else 5), one

    def _of_settings(self) -> Iterator[tuple[int, Dependence]]:
        if (found := on_settings(self._runs, self._earlier, self._ritual)) is not None:
            yield 3, found

    def _of_arrival(self) -> Iterator[tuple[int, Dependence]]:
        if (found := on_arrival(self._runs, self._earlier, self._results, self._origin)) is not None:
            yield 2, found

    def _of_what_is_carried(self) -> Iterator[tuple[int, Dependence]]:
        if self._runs.can_go_on:
            found, names = carried_by(self._runs, self._earlier, self._results, self._draws.sow_as_before, self._origin)
            if found is not None:
                yield 4, found
                self._carried = names

    def _differs_by_itself(self) -> bool:
        effect = effect_of(self._runs, self._earlier, self._results)
        return effect is not None and bool(effect.reached)

    def _origin(self, begin: Difference) -> Origin | None:
        drawn = drawn_from(begin.op) if begin.op is not None and begin.op.plan.is_random else None
        return origin_before(begin.place, self._runs, drawn, is_way=begin.kind == "way", most_runs=_FEW)  # two of them differ for certain


def of_divergence(found: Divergence | None) -> tuple[Dependence, ...]:
    """What it is that differs even with the same start and the same seeds; nothing where that is not known."""
    if found is None or found.on is None:
        return ()
    at, other = found.location, found.other
    if other is not None and found.cause not in {"uninitialized_memory", "control_flow"}:
        at, other = other, at  # the line that makes the number, and the one at which it comes to torch
    return (
        Dependence(on=found.on, op=found.op, module=found.module, location=at, other=other, what=found.explanation, fix=found.fix),
        *found.further,
    )


def of_potential(found: Sequence[Potential]) -> tuple[Dependence, ...]:
    """What was the same in these runs by chance, or because they were made in one process."""
    return tuple(
        Dependence(
            on="race",
            op=one.op,
            module=one.module,
            location=one.location,
            what=one.explanation,
            fix=one.fix,
        )
        for one in found
    )
