"""What was bad already when the session began: anything else that is bad in a model became so in this cell."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchdebug_magics.instruments.nanhunt.causes.tensor_names import shares_memory
from torchdebug_magics.probing.storages import bytes_of
from torchdebug_magics.probing.tensors import kind_of, largest

__all__ = ["Beginning"]

_MOST_BYTES = 4 << 30
"""So much is read in about a second. Of a model that is larger nobody knows how it began."""


@dataclass(frozen=True)
class Beginning:
    """Of all parameters and buffers that were alive."""

    bad: tuple[weakref.ref[torch.Tensor], ...] = ()
    is_known: bool = False

    @classmethod
    def take(cls, modules: Iterable[torch.nn.Module]) -> Beginning:
        """As it is now; one reduction where all is finite."""
        held = {
            id(tensor): tensor
            for module in modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor)
        }
        tensors = list(held.values())
        if bytes_of(tensors) > _MOST_BYTES:
            return cls()
        bad = [] if math.isfinite(largest(tensors)) else [tensor for tensor in tensors if kind_of(tensor)]
        return cls(tuple(map(weakref.ref, bad)), is_known=True)

    def was_fine(self, tensor: torch.Tensor) -> bool:
        """Whether what holds these numbers was finite, or was not there yet."""
        alive = (reference() for reference in self.bad)
        return self.is_known and not any(one is not None and shares_memory(one, tensor) for one in alive)
