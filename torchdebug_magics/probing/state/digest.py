"""Numbers for bytes: equal for equal bits in equal order, whatever they mean, so that NaN equals NaN and -0.0 is not 0.0."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchdebug_magics.probing.storages import is_freed, local_of

EMPTY = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FACTOR = 0x100000001B3
_CHUNK_COUNT = 1 << 22
"""Elements of a GPU tensor that are hashed at once: each takes eight bytes meanwhile, several times over."""
_LARGE_BYTES = 1 << 15
_WIDTH = 1024
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def folded(first: int, second: int) -> int:
    """One number for two, which sees their order."""
    return ((first ^ second) * _FACTOR + 1) & _MASK


def of_tensor(tensor: torch.Tensor) -> int:
    """Digest its bytes, shape and dtype; of a DTensor, its part in this process. Without numbers, there is a shape all the same."""
    tensor = local_of(tensor)
    if isinstance(tensor, FakeTensor) or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return EMPTY
    digest = EMPTY
    for part in _parts(tensor):
        bits = 0 if is_freed(part) else _on_device(part) if part.device.type != "cpu" else _in_memory(part)
        digest = folded(folded(digest, bits), _of_kind(part.dtype, tuple(part.shape)))
    return digest


def of_plain(value: Any) -> int:
    """Digest a number, a text, or a nest of such; of anything else, its type. It is the same in every process."""
    kind = type(value)
    if kind is float or kind is complex:
        return zlib.crc32(struct.pack("d", value) if kind is float else struct.pack("dd", value.real, value.imag))
    if kind is int or kind is bool:
        return (int(value) * _FACTOR + (kind is bool)) & _MASK
    if kind is str:
        return zlib.crc32(value.encode(errors="replace"))
    if kind in {list, tuple}:
        digest = EMPTY
        for item in value:
            digest = folded(digest, of_plain(item))
        return digest
    return zlib.crc32(kind.__qualname__.encode())


def number_of(values: Iterable[int]) -> int:
    """One number for all of them, in their order."""
    digest = EMPTY
    for value in values:
        digest = folded(digest, value)
    return digest


@cache
def _of_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return zlib.crc32(f"{dtype}{shape}".encode())


def _parts(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Plain strided tensors that hold its numbers; none where they cannot be reached without computing."""
    if tensor.layout is torch.strided:
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor():
            return ()
        return (tensor.detach(),)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return ()


def _in_memory(tensor: torch.Tensor) -> int:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not (tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))):  # noqa: PLR2004 - images
        tensor = tensor.contiguous()
    size_bytes = tensor.nbytes
    if not size_bytes:
        return 0
    buffer = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return zlib.crc32(buffer) if size_bytes < _LARGE_BYTES else _by_sums(buffer, size_bytes)


def _by_sums(buffer: Any, size_bytes: int) -> int:
    """Several times faster: the bits as whole numbers in a table, summed by row and by column, so that what is moved is seen."""
    rows = size_bytes // (8 * _WIDTH)
    table = np.frombuffer(buffer, dtype=np.uint64, count=rows * _WIDTH).reshape(rows, _WIDTH)
    digest = zlib.crc32(memoryview(buffer)[rows * 8 * _WIDTH :])
    return zlib.crc32(np.add.reduce(table, 1), zlib.crc32(np.add.reduce(table, 0), digest))


def _on_device(tensor: torch.Tensor) -> int:
    """A sum of integers, each weighed by its place: exact, so that the order in which a GPU adds does not matter."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    digest = EMPTY
    for start in range(0, flat.numel(), _CHUNK_COUNT):
        part = flat[start : start + _CHUNK_COUNT].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        mixed = (part ^ (place * -7046029254386353131)) * -4417276706812531889
        digest = folded(digest, int(((mixed ^ (mixed >> 29)) * (2 * place + 1)).sum()) & _MASK)
    return digest
