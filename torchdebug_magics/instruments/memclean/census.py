"""Which tensors' memory there is: to say what would be freed, and what was."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from torchdebug_magics.probing.holders import cycles_of, waiting_cycles
from torchdebug_magics.probing.holders.tensor_holders import storages_of
from torchdebug_magics.probing.holders.walk import undisturbed
from torchdebug_magics.probing.modules import live

__all__ = ["Census", "collect", "size_of"]

_PASSES = 3


class Census:
    """All storages that are there now, without holding them."""

    def __init__(self, known: Iterable[weakref.ref[Any]] = ()) -> None:
        refs = {storage._cdata: (one, size_of(storage)) for one in known if (storage := one()) is not None}
        with undisturbed():
            for tensor in live(torch.Tensor):
                for storage in storages_of(tensor):
                    refs.setdefault(storage._cdata, (weakref.ref(storage), size_of(storage)))
        self._refs = list(refs.values())

    def collect(self) -> str:
        """Run the collector; the cycle of references by which the most of what is gone then held itself, and empty where none did."""
        sizes = {storage._cdata: size for storage, size in ((ref(), size) for ref, size in self._refs) if storage is not None}
        freed: Counter[str] = Counter()
        for address, path in cycles_of([ref for ref, _ in self._refs]).paths.items():
            freed[path] += sizes[address]
        return max(freed, key=lambda path: freed[path], default="")

    def gone_bytes(self) -> int:
        """Of those that are gone since this was last asked."""
        gone = [size for ref, size in self._refs if ref() is None]
        self._refs = [one for one in self._refs if one[0]() is not None]
        return sum(gone)

    def waiting(self) -> tuple[int, str]:
        """(bytes that a collection would free, the cycle of references by which the most of it holds itself); nothing is collected."""
        paths = waiting_cycles([ref for ref, _ in self._refs]).paths
        sizes: Counter[str] = Counter()
        for ref, size in self._refs:
            storage = ref()
            if storage is not None and storage._cdata in paths:
                sizes[paths[storage._cdata]] += size
        return sum(sizes.values()), max(sizes, key=lambda path: sizes[path], default="")


def size_of(storage: torch.UntypedStorage) -> int:
    """Its bytes; none of one that has no memory."""
    return 0 if storage.device.type == "meta" else storage.nbytes()


def collect() -> None:
    """Until nothing more comes: a graph that was in a cycle may leave another one."""
    for _ in range(_PASSES):
        if not gc.collect():
            return
