"""The models, optimizers and scalers that are alive, looked for once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.probing.modules import live_kinds, parts_of, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Alive", "roots_of"]


@dataclass(frozen=True)
class Alive:
    """Held only while the recorded steps are judged."""

    roots: list[torch.nn.Module]
    """The modules that are no part of another one."""
    optimizers: list[torch.optim.Optimizer]
    scalers: list[torch.amp.GradScaler]

    @classmethod
    def now(cls) -> Alive:
        """One pass over all objects."""
        found = live_kinds(torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
        made = [one for one in found[torch.optim.Optimizer] if "param_groups" in vars(one)]  # one whose constructor raised may be alive
        return cls(roots_of(found[torch.nn.Module]), made, found[torch.amp.GradScaler])

    def members(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by their names in `state_dict`."""
        for root in self.roots:
            if unwrapped(root) is root:
                yield from root.named_parameters()
                yield from root.named_buffers()

    def names(self, tensors: list[torch.Tensor]) -> tuple[str, ...]:
        """Of those that belong to a model."""
        name_of = {id(held): name for name, held in reversed(list(self.members()))}
        return tuple(name_of[id(one)] for one in tensors if id(one) in name_of)


def roots_of(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that are no part of another one."""
    made = [module for module in modules if "_modules" in getattr(module, "__dict__", ())]
    inner = parts_of(made)
    return [module for module in made if id(module) not in inner]
