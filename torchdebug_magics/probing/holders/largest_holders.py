"""Which variables hold the most memory: tensors by their storages, collections of plain objects by a sample."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from torchdebug_magics.probing.holders.found import find_holders
from torchdebug_magics.probing.holders.python_weights import plain_collections
from torchdebug_magics.probing.holders.tensor_holders import storages_of
from torchdebug_magics.probing.modules import live

__all__ = ["largest_holders"]

_ROOT = re.compile(r"[^\[.{]+")


def largest_holders(extra_roots: Iterable[tuple[str, object]] = (), *, most: int = 5) -> tuple[tuple[str, int], ...]:
    """(variable, bytes), the largest first; a storage that several variables share counts for the nearest one."""
    sizes: Counter[str] = Counter()
    storages = {
        storage._cdata: storage.nbytes()
        for tensor in live(torch.Tensor)
        for storage in storages_of(tensor)
        if storage.device.type != "meta"
    }
    for address, label in find_holders(list(storages), extra_roots=extra_roots).roots.items():
        sizes[label] += storages[address]
    for label, size_bytes in _plain_sizes().items():
        sizes[label] += size_bytes
    return tuple((label, size_bytes) for label, size_bytes in sizes.most_common(most) if size_bytes)


def _plain_sizes() -> Counter[str]:
    """By variable: its largest collection, as others may be inside that one."""
    unweighed = {path: replace(collection, length=0) for path, collection in plain_collections({}).items()}
    sizes: Counter[str] = Counter()
    for path, collection in plain_collections(unweighed).items():
        found = _ROOT.match(path)
        if found is not None:
            sizes[found[0]] = max(sizes[found[0]], collection.length * collection.each_bytes)
    return sizes
