"""The state that the first run has left, and the same seeds: what the cell finds changed when it is run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.deterministic.counterfactual.effect import effect_of
from torchdebug_magics.instruments.deterministic.ops.values import tensors
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.told import location_of
from torchdebug_magics.probing.contents import memory_of
from torchdebug_magics.probing.names import Named, values_found

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torchdebug_magics.instruments.deterministic.ops.recording import Recording
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.twice.compare import Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["carried_by"]

_MOST_NAMES = 3

Sow: TypeAlias = "Callable[[ExitStack], object]"


def carried_by(
    runs: Runs, earlier: Recording, results: Mapping[str, int], same_seeds: Sow, origin_of: Callable[[Difference], Origin | None]
) -> tuple[Dependence | None, tuple[str, ...]]:
    """The dependence, and the names of what the next run finds changed; None and nothing where the next run gives the same."""
    with runs.otherwise(same_seeds, from_end=lambda: True):
        effect = effect_of(runs, earlier, results)
    if effect is None or not effect.reached:
        return None, ()
    begin = min(effect.reached, key=lambda one: one.place)
    known = _named_memory(runs)
    paths = [path for one in effect.begins if one.place <= begin.place or one in effect.reached for path in _paths(one, known)]
    names = tuple(dict.fromkeys(path.partition(".")[0].partition("[")[0] for path in paths))
    at = location_of(begin)
    if not names:
        turns = cycle((False, True))
        with runs.otherwise(same_seeds, from_end=lambda: next(turns)):
            origin = origin_of(begin)
        if origin is not None:
            names, at = origin.names, origin.branch_head or origin.location
    op = "" if begin.op is None else begin.op.plan.name
    what, fix = _of_mode(begin) if not effect.has_backward else ("", "")
    if not what:
        what, fix = _in_words(runs, names[:_MOST_NAMES])
    names = names or runs.files
    return Dependence(on="carried_state", op=op, module=begin.module, location=at, what=what, fix=fix), names


def _named_memory(runs: Runs) -> dict[int, str]:
    """Names of tensors that the run has written to, by their storage."""
    names = (Named(name, value) for name, value in runs.body.left().items() if not name.startswith("_"))
    found = reversed(values_found(names, _has_memory))
    return {memory: one.name for one in found if (memory := memory_of(one.value)) in runs.written}


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _paths(begin: Difference, known: Mapping[int, str]) -> list[str]:
    if begin.op is None or begin.kind != "given":
        return []
    given = tensors([*begin.op.args, *begin.op.kwargs.values()])
    return [path for tensor in given if (path := known.get(memory_of(tensor)))]


def _of_mode(begin: Difference) -> tuple[str, str]:
    """Running statistics that move where nothing is trained: the mode is the fault."""
    if begin.module_kind is None or not issubclass(begin.module_kind, torch.nn.modules.batchnorm._NormBase):
        return "", ""
    what = f"`{begin.module or begin.module_kind.__name__}` is in training mode and updates its running statistics in each run"
    return what, "call `.eval()` of the model before it computes"


def _in_words(runs: Runs, names: tuple[str, ...]) -> tuple[str, str]:
    if not names and runs.files:
        files = listed([f"`{name}`" for name in runs.files[:_MOST_NAMES]])
        return f"the next run finds {files} as this run has left it", f"remove {files} at the top of this cell, or write it in another cell"
    if not names:
        return "the next run finds something changed that this run has left", "make what the cell changes in the cell itself"
    values = runs.body.left()
    quoted = listed([f"`{name}`" for name in names])
    if all(isinstance(values.get(name), (torch.nn.Module, torch.optim.Optimizer)) for name in names):
        return f"the next run begins with {quoted} as this run has trained it", f"make {quoted} in this cell"
    return f"the next run finds {quoted} changed by this run", f"make {quoted} in this cell, or work on a copy"
