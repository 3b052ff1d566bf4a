"""What tensors held before they were first written: kept just before the write, and put back."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Contents", "memory_of"]


class Contents:
    """What would be too much to copy beforehand (weights, running sums, data) costs memory only where it is written."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor, int]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy it, unless that was done before."""
        key = memory_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        if key not in self._copies:
            self._copies[key] = tensor, tensor.detach().clone(), _version(tensor)

    def __len__(self) -> int:
        return len(self._copies)

    def tensors(self) -> list[torch.Tensor]:
        """Those that were kept."""
        return [tensor for tensor, _, _ in self._copies.values()]

    def put_back(self) -> None:
        """Undo the writes, the last one first: an earlier copy of the same memory is the older one."""
        for tensor, copy, version in reversed(self._copies.values()):
            _write(tensor, copy, version)

    def exchange(self) -> Contents:
        """Put everything back, and return what was there instead; in the memory of the copies, where none overlap."""
        now = Contents()
        held = [key[0] for key in self._copies]
        if len(set(held)) < len(held):
            for tensor, _, _ in self._copies.values():
                now.keep(tensor)
            self.put_back()
        else:
            for key, (tensor, copy, version) in self._copies.items():
                present, present_version = tensor.detach().clone(), _version(tensor)
                _write(tensor, copy, version)
                now._copies[key] = tensor, copy.copy_(present), present_version
        self._copies.clear()
        return now


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


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _write(tensor: torch.Tensor, copy: torch.Tensor, version: int) -> None:
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # an inference tensor, outside its mode
        tensor.data.copy_(copy)
        # A graph of the user's that saved it finds it as it was.
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
