"""A number for each storage, which no later one gets: addresses are used again."""

from __future__ import annotations

import itertools
import weakref

import torch

from torchdebug_magics.probing.contents import memory_of

__all__ = ["StorageNumbers"]


class StorageNumbers:
    """Keeps no storage alive."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """By address."""

    def of(self, tensor: torch.Tensor) -> int:
        """0 for a tensor without a storage of its own."""
        if not (place := memory_of(tensor)):
            return 0
        storage = tensor.untyped_storage()
        address = _address(tensor) or place
        known = self._known.get(address)
        if known is None or known[0]() is None:  # two that are alive at one address are one memory, as with `torch.from_dlpack`
            known = self._known[address] = weakref.ref(storage), next(self._next)
        return known[1]


def _address(tensor: torch.Tensor) -> int:
    """Where its storage begins, without making a memory its own that it shares until somebody writes."""
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]
