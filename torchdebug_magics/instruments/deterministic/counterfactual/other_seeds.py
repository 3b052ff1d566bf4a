"""The same start and other seeds: what draws from a generator that the cell does not seed."""

from __future__ import annotations

import multiprocessing.process
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.counterfactual.effect import effect_of
from torchdebug_magics.instruments.deterministic.counterfactual.unloaded_weights import unloaded
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.cause.op_causes import location_of
from torchdebug_magics.probing.rng import same_state

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torchdebug_magics.instruments.deterministic.counterfactual.effect import Effect
    from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.ritual.seedable import Seedable
    from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs
    from torchdebug_magics.report import Location

__all__ = ["Draws"]

_FUNCTIONAL = re.compile(r"[\w.]*\b(?:alpha_|feature_)?dropout[123]?d?\b(?=\()")
_FIRST_SEED = 20_011
_DROPPING = {"RReLU": "`RReLU`", "GaussianNoise": "noise"}
_LIBRARY = {"torch": "torch's generator", "numpy.random": "NumPy's global generator", "random": "Python's `random`"}


class Draws:
    """Which generators the first run has drawn from, and what changes when each of them has another seed."""

    def __init__(self, seedables: tuple[Seedable, ...]) -> None:
        self._begin = [(one, one.read()) for one in seedables]
        self._processes = _processes_count()
        self._drawn: tuple[Seedable, ...] = ()
        self._seeds = count(_FIRST_SEED)
        self.carried: tuple[str, ...] = ()
        """Generators that the user has seeded before the cell, and that the next run finds further on."""

    def over(self) -> None:
        """The first run has ended. Processes that it has started may draw from what they were forked with."""
        has_children = _processes_count() != self._processes
        self._drawn = tuple(one for one, state in self._begin if not same_state(one.read(), state) or has_children)

    def sow_as_before(self, _stack: ExitStack) -> None:
        """Let each generator stand where the first run found it."""
        for one, state in self._begin:
            one.write(state)

    def dependences(
        self, runs: Runs, earlier: Recording, results: Mapping[str, int], origin_of: Callable[[Difference], Origin | None]
    ) -> Iterator[Dependence]:
        """One for each generator whose seed moves the results; a run each, and a few more where Python hands the numbers to torch."""
        for one in self._drawn:
            seed = next(self._seeds)
            with runs.otherwise(lambda _, one=one, seed=seed: one.sow(seed)):  # type: ignore[misc]  # the names are bound anew in each round
                effect = effect_of(runs, earlier, results, hears=True)
            if effect is None or not (effect.reached or effect.prints):
                continue
            if effect.prints is not None:
                yield self._told(one, _seeded(one, effect.prints, "the number printed here comes"))
                continue
            begin = _begin_of(effect)
            with runs.otherwise(lambda _, one=one: one.sow(next(self._seeds))):  # type: ignore[misc]  # as above
                origin = None if begin.op is not None and begin.op.plan.is_random else origin_of(begin)
            found = _dependence(one, begin, origin)
            if not effect.has_backward:
                found = _of_dropout(found, begin) or unloaded(found, effect.differing, runs.body) or found
            yield self._told(one, found)

    def _told(self, generator: Seedable, found: Dependence) -> Dependence:
        if found.on == "carried_state":
            self.carried += (_LIBRARY.get(generator.name, generator.name),)
        return found


def _begin_of(effect: Effect) -> Difference:
    """Where the numbers are drawn: an op that draws is surer than what came to torch from Python, be it by way of the same generator."""
    first = min(effect.reached, key=lambda one: one.place)
    if first.op is not None and first.op.plan.is_random:
        return first
    drawn = [one for one in effect.begins if one.op is not None and one.op.plan.is_random and one.place < first.place]
    return drawn[-1] if drawn else first


def _dependence(generator: Seedable, begin: Difference, origin: Origin | None) -> Dependence:
    op = "" if begin.op is None else begin.op.plan.name
    base = "" if begin.op is None else begin.op.plan.base
    at: Location | None = location_of(begin) if origin is None else origin.branch_head or origin.location
    drawing = f"`{base}` draws" if origin is None and base and begin.op is not None and begin.op.plan.is_random else "this line draws"
    found = replace(_seeded(generator, at, drawing), op=op, module=begin.module)
    if found.on == "seed" and base == "randperm" and generator.name == "torch":
        return replace(found, fix=f"{found.fix}, or pass `generator=torch.Generator().manual_seed(42)`")
    return found


def _seeded(generator: Seedable, at: Location | None, drawing: str) -> Dependence:
    """By whom the generator was seeded."""
    whose = _LIBRARY.get(generator.name, f"`{generator.name}`")
    if generator.seeded in {"hand", "default", "ritual"} or (generator.seeded == "unknown" and not generator.is_global):
        what = f"{drawing} from {whose}, which was seeded before this cell and continues from where the last run left off"
        return Dependence(on="carried_state", op="", location=at, what=what, fix=f"add `{generator.fix}` at the top of this cell")
    return Dependence(
        on="seed", op="", location=at, what=f"{drawing} from {whose}, which is not seeded", fix=f"add `{generator.fix}` before this line"
    )


def _of_dropout(found: Dependence, begin: Difference) -> Dependence | None:
    """Dropout where nothing is trained: the mode is the fault, and no seed."""
    kind = begin.module_kind
    if kind is not None and begin.is_training and kind.__module__.startswith("torch.nn."):
        where = f" (`{begin.module}`)" if begin.module else ""
        what = f"{_DROPPING.get(kind.__name__, 'dropout')}{where} is in training mode and random in each run"
        return replace(found, on="seed", what=what, fix="call `.eval()` on the model before the forward pass")
    if found.location is not None and (called := _FUNCTIONAL.search(found.location.source)):
        what = f"`{called[0]}` also drops elements in eval mode: it ignores `model.training`"
        return replace(found, on="seed", what=what, fix=f"write `{called[0]}(..., training=self.training)` and call `.eval()` on the model")
    return None


def _processes_count() -> str:
    counter: Any = getattr(multiprocessing.process, "_process_counter", None)
    return repr(counter)
