"""The states of all random generators a step can draw from: taken, and put back."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["RandomState"]


@dataclass(frozen=True)
class RandomState:
    """Python's, NumPy's (where imported) and torch's generators, with those of the CUDA devices that are in use."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def take(cls) -> RandomState:
        """The states as they are now. Never initialises CUDA."""
        numpy = sys.modules.get("numpy")
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state(), cuda)

    def put_back(self) -> None:
        """Make every generator continue from here."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
