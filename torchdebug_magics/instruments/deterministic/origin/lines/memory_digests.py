"""What tensors and random generators hold, as a number or a text."""

from __future__ import annotations

import random
import zlib
from typing import Any

import torch

from torchdebug_magics.probing.tensors import is_traced

__all__ = ["bytes_of", "has_no_memory", "is_random", "state_of"]

_BLOCKS = 64
_NUMPY_DRAWS = frozenset({"Generator", "RandomState", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "SeedSequence"})


def is_random(value: object) -> bool:
    """Whether numbers are drawn from it."""
    kind = type(value)
    return isinstance(value, (random.Random, torch.Generator)) or (
        kind.__module__.startswith("numpy.random") and kind.__name__ in _NUMPY_DRAWS
    )


def state_of(value: Any) -> str:
    """What the next draw depends on."""
    if isinstance(value, random.SystemRandom):
        return "the system's"
    if isinstance(value, random.Random):
        return str(hash(random.Random.getstate(value)))
    if isinstance(value, torch.Generator):
        return str(bytes_of(value.get_state()))
    if type(value).__name__ == "RandomState":
        return _written_out(value.get_state())
    return _written_out(getattr(value, "bit_generator", value).state)


def _written_out(state: Any) -> str:
    """With every number of an array, which `repr` leaves out."""
    if isinstance(state, dict):
        return str({name: _written_out(part) for name, part in state.items()})
    if isinstance(state, tuple):
        return str([_written_out(part) for part in state])
    return str(state.tobytes() if hasattr(state, "tobytes") else state)


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether it stands for numbers that are not there."""
    return tensor._is_zerotensor() or is_traced(tensor)


def bytes_of(tensor: torch.Tensor, room_bytes: int = 1 << 20) -> int:
    """A number for its bytes, in order; of so many at most, from all over it. No mode and no hook of anybody's sees that."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        room = max(_BLOCKS, room_bytes // plain.element_size())
        if plain.numel() > room:
            ends = torch.linspace(0, plain.numel() - room // _BLOCKS, _BLOCKS, dtype=torch.float64).long().tolist()
            plain = torch.cat([plain[start : start + room // _BLOCKS] for start in ends])
        return zlib.crc32(plain.contiguous().cpu().view(torch.uint8).numpy().data) if plain.numel() else 0
