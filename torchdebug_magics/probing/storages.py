"""The memory behind a tensor: its storages, whatever kind of tensor it is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Owner", "bytes_of", "is_freed", "owner_of", "storages"]

Owner = Literal["torch", "borrowed", "file"]
"""Whose memory a storage is: torch's own, another library's (``from_numpy``), or a mapped file's."""

_SHARED = ("/dev/shm/", "/memfd:")  # noqa: S108 - how the system names memory that processes share: no file stands behind it
_WORDS = 5
"""Of a storage that are read: up to its memory's context, behind which its device and its size stand."""
_COMPRESSED_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
_COMPRESSED_COLUMNS = frozenset({torch.sparse_csc, torch.sparse_bsc})


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Every storage that holds a part of it; nothing for a tensor without memory (meta, fake, wrapped by a transform)."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        if not tensor.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not tensor._is_zerotensor():
            yield tensor.untyped_storage()
        return
    if isinstance(tensor, FakeTensor) or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return
    for part in _parts(tensor):
        if part is tensor:
            yield from _own(part)
        else:
            yield from storages(part)


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's memory was freed under it, as FSDP does between two calls of a module: to read it kills the process."""
    return not tensor.is_meta and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """What they hold together; memory that several share counts once."""
    return sum({storage._cdata: storage.nbytes() for tensor in tensors for storage in storages(tensor)}.values())


def _parts(tensor: Any) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _COMPRESSED_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return tuple(one for one in inner if isinstance(one, torch.Tensor) and one is not tensor)
    return (tensor,)


def _own(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    try:
        storage = tensor.untyped_storage()
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            storage.data_ptr()  # refused for a wrapper, whose storage has a size and no memory
    except (NotImplementedError, RuntimeError, ValueError):  # opaque ones (mkldnn, lazy parameters) have none to be seen
        return
    yield storage


def owner_of(storage: torch.UntypedStorage) -> Owner:
    """Whose memory it is; what ``torch.load`` reads is torch's own, although torch does not resize it."""
    if storage.device.type != "cpu" or storage.resizable() or _is_freed_by_torch(storage):
        return "torch"
    if _is_mapped(storage.data_ptr()):
        return "file"
    return "torch" if storage.is_shared() else "borrowed"


def _is_freed_by_torch(storage: torch.UntypedStorage) -> bool:
    """Whether torch's CPU allocator frees it: only the storage's deleter says so, which has no name in Python."""
    position, deleter = _torch_deleter()
    return position is not None and _words(storage)[position] == deleter


@cache
def _torch_deleter() -> tuple[int | None, int]:
    """(position in a storage, address) of what frees torch's own memory; (None, 0) if this torch lays storages out otherwise."""
    own = [_words(torch.UntypedStorage(size, device="cpu")) for size in (8, 8, 64)]
    lent = [_words(torch.asarray(bytearray(size), dtype=torch.uint8, device="cpu", copy=False).untyped_storage()) for size in (8, 8, 64)]
    for position, deleter in enumerate(own[0]):
        others = {words[position] for words in lent}
        if deleter and {words[position] for words in own} == {deleter} and len(others) == 1 and not others & {0, deleter}:
            return position, deleter
    return None, 0


def _words(storage: torch.UntypedStorage) -> tuple[int, ...]:
    """What a storage begins with: its counts of references, its memory's address, deleter and context."""
    return tuple((ctypes.c_size_t * _WORDS).from_address(storage._cdata))


def _is_mapped(address: int) -> bool:
    """Whether a file stands behind the memory at an address, as after ``torch.load(mmap=True)``; False where the system does not tell."""
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            for line in maps:
                span, *_, name = line.split(maxsplit=5) if line.count(" ") > 4 else (line.split()[0], "")  # noqa: PLR2004 - the fields before the name
                first, _, last = span.partition("-")
                if int(first, 16) <= address < int(last, 16):
                    return name.startswith("/") and not name.startswith(_SHARED)
    except OSError:
        return False
    return False
