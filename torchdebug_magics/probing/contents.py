"""What tensors held before they were first written: kept just before the write, and put back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdebug_magics.probing.storages import is_freed, local_of


class _Kept(NamedTuple):
    """What a tensor held, and where: it may have been given another shape or other memory since."""

    tensor: torch.Tensor
    place: torch.Tensor
    """The same memory in the shape of that time."""
    copy: torch.Tensor
    version: int


class Contents:
    """What would be too much to copy beforehand (weights, running sums, data) costs memory only where it is written."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], _Kept] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy it, unless that was done before; of a DTensor, the part in this process."""
        tensor = local_of(tensor)
        key = memory_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        if key not in self._kept and not (key[0] and is_freed(tensor)):
            self._kept[key] = _kept(tensor, tensor.detach())

    def __len__(self) -> int:
        return len(self._kept)

    def tensors(self) -> list[torch.Tensor]:
        """Those that were kept."""
        return [one.tensor for one in self._kept.values()]

    def put_back(self) -> None:
        """Undo the writes, the last one first: an earlier copy of the same memory is the older one."""
        for one in reversed(self._kept.values()):
            _write(one)

    def exchange(self, now: Contents) -> None:
        """Put everything back; `now` gets what was there instead, in the memory of the copies, where none overlap.

        Each is in `now` before it is written: what an error cuts short, `now` can undo.
        """
        held = [key[0] for key in self._kept]
        if len(set(held)) < len(held):
            now._kept = {key: _kept(one.tensor, one.place) for key, one in self._kept.items()}
            self.put_back()
        else:
            for key, one in self._kept.items():
                present = now._kept[key] = _kept(one.tensor, one.place)
                _write(one)
                with torch.inference_mode():  # the only way to write a copy that was made in it
                    now._kept[key] = present._replace(copy=one.copy.copy_(present.copy))
        self._kept.clear()


def memory_of(tensor: torch.Tensor) -> int:
    """Where its storage is, or 0 where it has none of its own."""
    if (
        is_traceable_wrapper_subclass(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_nested
        or tensor._is_zerotensor()
        or tensor.is_quantized
    ):
        return 0
    try:
        address: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return 0
    return address


def _kept(tensor: torch.Tensor, place: torch.Tensor) -> _Kept:
    return _Kept(tensor, place, place.clone(), 0 if tensor.is_inference() else tensor._version)


def _write(kept: _Kept) -> None:
    tensor, place, copy, version = kept
    if memory_of(place) and is_freed(place):
        return
    with torch.inference_mode():  # one that was made in it is written in it alone; any other one can be, too
        place.copy_(copy)
    if not tensor.is_inference():  # a graph of the user's that saved it finds it as it was
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
