"""A short digest of data: equal for equal numbers in the same order, to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from torchdebug_magics.probing.shards import local_of
from torchdebug_magics.probing.tensors import tensors_in

__all__ = ["digest_of"]

_WHOLE_BYTES, _BLOCKS = 64 << 20, 64
"""Larger tensors are looked at in so many blocks, from all over."""


def digest_of(value: Any) -> str:
    """Of all tensors and arrays in it; of a loader or a data set, those that it holds, and its length. Draws nothing from either."""
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    value = value.dataset if isinstance(value, DataLoader) else value
    if isinstance(value, Subset):
        yield repr(list(value.indices)).encode()
        yield from _parts(value.dataset)
    elif isinstance(value, Dataset):
        yield repr(len(value) if hasattr(value, "__len__") else type(value).__name__).encode()
        yield from _parts(list(vars(value).values()))
    elif isinstance(value, Mapping):
        yield from _parts([part for key, one in value.items() for part in (repr(key), [one])])
    elif isinstance(value, (list, tuple)) and not any(isinstance(one, torch.Tensor) for one in value):
        for one in value:
            yield from _parts(one)
    elif isinstance(value, (str, int, float, bool, bytes)):
        yield repr(value).encode()
    elif type(value).__module__.startswith("numpy") and hasattr(value, "tobytes"):
        yield repr((value.dtype, value.shape)).encode()
        yield value.tobytes()
    else:
        for tensor in tensors_in(value):
            yield from _numbers(tensor)


def _numbers(tensor: torch.Tensor) -> Iterator[bytes]:
    tensor = local_of(tensor)
    yield repr((tensor.dtype, tuple(tensor.shape))).encode()
    if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if raw.numel() <= _WHOLE_BYTES:
        yield raw.cpu().numpy().tobytes()
        return
    step, size = raw.numel() // _BLOCKS, _WHOLE_BYTES // _BLOCKS
    for block in range(_BLOCKS):
        yield raw[block * step : block * step + size].cpu().numpy().tobytes()
