"""What a recorder reads of the values that an op is given, and gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchdebug_magics.probing.contents import memory_of

__all__ = ["numbers", "size_bytes", "tensors", "view_of"]


def view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Which part of its memory it is."""
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def size_bytes(tensor: torch.Tensor) -> int:
    """Of all the memory that it is a part of; 0 where it has none of its own."""
    return tensor.untyped_storage().nbytes() if memory_of(tensor) else 0


def numbers(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Without the bytes beside them that an op keeps for its backward: scratch memory, of which a part is never written."""
    return [one for one in results if one.dtype is not torch.uint8] or results


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in a value, as an op takes and gives it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
