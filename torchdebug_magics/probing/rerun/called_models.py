"""The modules that are called outermost, and what is worked out once for each of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from torchdebug_magics.probing.buffers import BufferKeeper
from torchdebug_magics.probing.modules import fast_path_parts, live_modules, parts_of, unwrapped
from torchdebug_magics.probing.places import places_of
from torchdebug_magics.probing.tensors import kind_of, largest

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.probing.weak_snapshot import Place

__all__ = ["Known", "Models"]


@dataclass
class Known:
    """What is worked out once for a module. It is held weakly: a model that the user drops is gone."""

    module: weakref.ref[torch.nn.Module]
    parameters: dict[int, torch.Tensor]
    buffers: BufferKeeper
    places: list[Place]
    bad_from_start: frozenset[int]
    writes_input: bool = False
    """Whether a call of it was seen to write into its arguments."""


class Models:
    """In the order of their first calls."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._roots: list[weakref.ref[torch.nn.Module]] | None = None

    def __contains__(self, key: int) -> bool:
        return key in self._known

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._roots = None

    def know(self, module: torch.nn.Module, callers: Iterable[FrameType]) -> Known:
        """What is known of a module; worked out at its first call, by `callers`."""
        key = id(module)
        known = self._known.get(key)
        if known is None:
            parts = list(unwrapped(module).modules())
            own = [part for part in parts if not type(part).__module__.startswith("torch.nn.")]
            parameters: dict[int, torch.Tensor] = {id(parameter): parameter for parameter in unwrapped(module).parameters()}
            bad = () if math.isfinite(largest(parameters.values())) else (name for name, one in parameters.items() if kind_of(one))
            gone = weakref.ref(module, lambda _: self._known.pop(key, None))
            known = self._known[key] = Known(gone, parameters, BufferKeeper(parts), places_of(own, callers), frozenset(bad))
            self.found_another()
        return known

    def entered(self) -> list[torch.nn.Module]:
        """Those that are alive."""
        return [module for known in self._known.values() if (module := known.module()) is not None]

    def parameters(self, keys: Iterable[int]) -> dict[int, torch.Tensor]:
        """The parameters of modules, by id; to be read only."""
        held = [self._known[key].parameters for key in keys if key in self._known]
        return held[0] if len(held) == 1 else {number: one for parameters in held for number, one in parameters.items()}

    def bad_from_start(self) -> frozenset[int]:
        """Ids of parameters that were bad when their module was first called."""
        return frozenset().union(*(known.bad_from_start for known in self._known.values()))

    def found_another(self) -> None:
        """There may be other roots now."""
        self._roots = None

    def roots(self) -> list[torch.nn.Module]:
        """Modules that were called outermost, then those that hold them, without what is a part of another."""
        held = [reference() for reference in self._roots or ()]
        alive = [root for root in held if root is not None]
        if self._roots is None or len(alive) < len(held):
            alive = _roots_of([unwrapped(module) for module in self.entered()])
            self._roots = [weakref.ref(root) for root in alive]
        return alive


def _roots_of(entered: list[torch.nn.Module]) -> list[torch.nn.Module]:
    inside = {id(module) for root in entered for module in root.modules()}
    alive = list(live_modules())
    adopted = parts_of(alive)
    # What has a fused kernel carries no hook of ours, so nobody knows whether it was called: its names are good to have.
    known = inside | fast_path_parts(alive)
    tops = [module for module in alive if id(module) not in adopted and (id(module) in known or _holds(module, entered))]
    order = {id(module): place for place, module in enumerate(entered)}
    tops.sort(key=lambda module: order.get(id(unwrapped(module)), len(order)))
    return [*{id(root): root for root in [*map(unwrapped, tops), *entered]}.values()]


def _holds(module: torch.nn.Module, parts: list[torch.nn.Module]) -> bool:
    wanted = {id(part) for part in parts}
    return any(id(inner) in wanted for inner in module.modules())
