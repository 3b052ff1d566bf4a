"""Which module owns a parameter, and what the user calls the model and the optimizer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.probing.modules import live_kinds, parts_of, unwrapped
from torchdebug_magics.probing.names import variable_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Owner", "Owners"]

_MOST_SEARCHES = 32
"""Each looks at every object of the process; afterwards, parameters of new models are named by their number."""
_KINDS = (torch.nn.Module, torch.amp.GradScaler)


@dataclass(frozen=True)
class Owner:
    """A module with parameters of its own."""

    model: int
    """The number of the root module, in the order in which they were met; -1 for tensors outside every module."""
    order: int
    """Among the modules of the model."""
    path: str
    kind: str = field(compare=False)
    """The class of the module."""
    kinds: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The classes of all modules of the model."""


class Owners:
    """Finds modules wherever they are held; keeps none alive."""

    def __init__(self) -> None:
        self.models: list[str] = []
        """What the user calls each root."""
        self._of: dict[int, tuple[weakref.ref[torch.Tensor], Owner]] = {}
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._searches = 0
        self._outside = 0

    def of(self, parameters: Iterable[torch.Tensor]) -> list[Owner]:
        """The owner of each, in their order."""
        parameters = list(parameters)
        if any(self._known(one) is None for one in parameters) and self._searches < _MOST_SEARCHES:
            self._search({id(one) for one in parameters if self._known(one) is None})
        return [self._known(one) or self._named_itself(one) for one in parameters]

    def scale(self) -> torch.Tensor | None:
        """The factor of the GradScaler that is in use; None where there is none, or more than one."""
        scales = [one._scale for ref in self._scalers if (one := ref()) is not None and one._enabled]
        return scales[0] if len(scales) == 1 else None

    def _known(self, parameter: torch.Tensor) -> Owner | None:
        ref, owner = self._of.get(id(parameter), (None, None))
        return owner if ref is not None and ref() is parameter else None

    def _search(self, wanted: set[int]) -> None:
        self._searches += 1
        found = live_kinds(*_KINDS)
        self._scalers = [weakref.ref(one) for one in found[torch.amp.GradScaler]]
        modules = [one for one in found[torch.nn.Module] if "_modules" in one.__dict__ and "_parameters" in one.__dict__]
        parts = parts_of(modules)
        roots = {id(root): root for root in (unwrapped(one) for one in modules if id(one) not in parts)}
        for root in roots.values():
            self._read(root, wanted)

    def _read(self, root: torch.nn.Module, wanted: set[int]) -> None:
        """A wrapper such as `DistributedDataParallel` gives its part no other name: its paths begin with ``module.``."""
        named = [(path, module) for path, module in root.named_modules() if wanted & {id(one) for one in _own(module)}]
        if not named:
            return
        number, kinds = len(self.models), frozenset(type(module).__name__ for module in root.modules())
        self.models.append(variable_of(root) or type(root).__name__)
        for order, (path, module) in enumerate(root.named_modules()):
            owner = Owner(number, order, path, type(module).__name__, kinds)
            for parameter in _own(module):
                if self._known(parameter) is None:  # one that is shared belongs to the first
                    self._of[id(parameter)] = (weakref.ref(parameter), owner)

    def _named_itself(self, parameter: torch.Tensor) -> Owner:
        self._outside += 1
        owner = Owner(-1, self._outside, variable_of(parameter) or f"tensor {self._outside}", "Tensor")
        self._of[id(parameter)] = (weakref.ref(parameter), owner)
        return owner


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [one for one in module.__dict__.get("_parameters", {}).values() if one is not None]
