"""What the numbers of a cell depend on, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torchdebug_magics.instruments.deterministic.counterfactual.arrival_order import on_arrival
from torchdebug_magics.instruments.deterministic.counterfactual.carried_state import carried_by
from torchdebug_magics.instruments.deterministic.counterfactual.effect import effect_of
from torchdebug_magics.instruments.deterministic.counterfactual.set_order import on_order, orderings
from torchdebug_magics.instruments.deterministic.counterfactual.settings_off import on_settings
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.origin_line import origin_before

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchdebug_magics.instruments.deterministic.counterfactual.other_seeds import Draws
    from torchdebug_magics.instruments.deterministic.ops.recording import Recording
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.report import Divergence, Potential
    from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
    from torchdebug_magics.instruments.deterministic.twice.compare import Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["Why", "dependences", "of_divergence", "of_potential"]

_FEW = 4

Why: TypeAlias = "tuple[tuple[Dependence, ...], tuple[str, ...]]"
"""(dependences, worst first; names that are carried)"""


def dependences(runs: Runs, earlier: Recording, results: Mapping[str, int], draws: Draws, ritual: Ritual, *, quick: bool) -> Why | None:
    """Of a cell whose second run agreed; `quick` leaves out all but other seeds. None if the cell differs by itself after all."""
    drawn = list(draws.dependences(runs, earlier, results, lambda begin: _origin(begin, runs)))
    unseeded, going_on = (tuple(one for one in drawn if (one.on == "seed") is is_seed) for is_seed in (True, False))
    if quick:
        return None if drawn and _differs_by_itself(runs, earlier, results) else ((*unseeded, *going_on), draws.carried)
    settings = on_settings(runs, earlier, ritual)
    order = on_arrival(runs, earlier, results, lambda begin: _origin(begin, runs))
    state: Dependence | None = None
    names: tuple[str, ...] = ()
    if runs.can_go_on:
        state, names = carried_by(runs, earlier, results, draws.sow_as_before, lambda begin: _origin(begin, runs))
    others = tuple(one for one in (order, settings, state) if one is not None)
    if (drawn or others) and _differs_by_itself(runs, earlier, results):
        return None
    return (*unseeded, *on_order(orderings(runs)), *others, *going_on), (*names, *draws.carried)


def _differs_by_itself(runs: Runs, earlier: Recording, results: Mapping[str, int]) -> bool:
    """Whether one more run with nothing otherwise differs, too: then what was changed is not to blame."""
    effect = effect_of(runs, earlier, results)
    return effect is not None and bool(effect.reached)


def _origin(begin: Difference, runs: Runs) -> Origin | None:
    return origin_before(begin.place, runs, is_way=begin.kind == "way", most_runs=_FEW)  # two of them differ for certain


def of_divergence(found: Divergence) -> tuple[Dependence, ...]:
    """What it is that differs even with the same start and the same seeds; nothing where that is not known."""
    if found.on is None:
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
