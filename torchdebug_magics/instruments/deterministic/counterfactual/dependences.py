"""What the numbers of a cell depend on, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from torchdebug_magics.instruments.deterministic.counterfactual.carried_state import carried_by
from torchdebug_magics.instruments.deterministic.counterfactual.settings_off import on_settings
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.origin_line import origin_before

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchdebug_magics.instruments.deterministic.counterfactual.other_seeds import Draws
    from torchdebug_magics.instruments.deterministic.ops.recording import Recording
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.report import Cause, Divergence, On, Potential
    from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
    from torchdebug_magics.instruments.deterministic.twice.compare import Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["Why", "dependences", "of_divergence", "of_potential"]

_ON: Final[Mapping[Cause, On]] = {
    "unseeded_generator": "seed",
    "python_random": "seed",
    "numpy_random": "seed",
    "worker_seed": "seed",
    "wall_clock": "clock",
    "os_entropy": "entropy",
    "hash_order": "order",
    "uninitialized_memory": "memory",
    "nondeterministic_op": "race",
    "state_leak": "carried_state",
    "control_flow": "race",
}


Why: TypeAlias = "tuple[tuple[Dependence, ...], tuple[str, ...]]"
"""(dependences, worst first; names that are carried)"""


def dependences(runs: Runs, earlier: Recording, results: Mapping[str, int], draws: Draws, ritual: Ritual, *, quick: bool) -> Why:
    """Of a cell whose second run gave the very same; `quick` leaves out all but other seeds."""
    found = list(draws.dependences(runs, earlier, results, lambda begin: _origin(begin, runs)))
    if quick:
        return _worst_first(found), draws.carried
    settings = on_settings(runs, earlier, ritual)
    state: Dependence | None = None
    names: tuple[str, ...] = ()
    if runs.can_go_on:
        state, names = carried_by(runs, earlier, results, draws.sow_as_before, lambda begin: _origin(begin, runs))
    found += [one for one in (settings, state) if one is not None]
    return _worst_first(found), (*names, *draws.carried)


def _worst_first(found: list[Dependence]) -> tuple[Dependence, ...]:
    return tuple(sorted(found, key=lambda one: one.on == "carried_state"))


def _origin(begin: Difference, runs: Runs) -> Origin | None:
    return origin_before(begin.place, runs, is_way=begin.kind == "way")


def of_divergence(found: Divergence) -> tuple[Dependence, ...]:
    """What it is that differs even with the same start and the same seeds; nothing where that is not known."""
    on = _ON.get(found.because or found.cause)
    if on is None:
        return ()
    return (Dependence(on=on, op=found.op, module=found.module, location=found.location, what=found.explanation, fix=found.fix),)


def of_potential(found: Sequence[Potential]) -> tuple[Dependence, ...]:
    """What was the same in these runs by chance, or because they were made in one process."""
    return tuple(
        Dependence(
            on="order" if one.op in {"set", "hash"} else "race",
            op=one.op if "." in one.op else "",
            module=one.module,
            location=one.location,
            what=one.explanation,
            fix=one.fix,
        )
        for one in found
    )
