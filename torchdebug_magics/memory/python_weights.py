"""How large the collections of plain objects are that variables hold: lists of dicts, arrays, texts. Tensors are weighed elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from types import FunctionType
from typing import Any

import torch

from torchdebug_magics.memory.containers import CONTAINERS
from torchdebug_magics.memory.found import find_holders, is_attributes
from torchdebug_magics.memory.objects import held_by
from torchdebug_magics.memory.outside import bases, is_a, is_outside, names_of_type
from torchdebug_magics.memory.paths import HolderPath, Owner, Paths, owner_of
from torchdebug_magics.memory.roots import Rank, roots
from torchdebug_magics.memory.tensor_holders import is_node, storages_of
from torchdebug_magics.memory.walk import Walk
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.state.attributes import undisturbed

_MOST_OBJECTS = 5_000
"""Of variables, and as many of modules: a large repository alone has more globals than that."""
_WIDEST, _DEEPEST = 64, 6
_SAMPLES = 16
"""Things of a collection that are weighed."""
_FEWEST = 2
_OF_MODULES = frozenset(torch.nn.Module().__dict__)
"""Tables of torch's own, which every module has."""


@dataclass(frozen=True)
class PlainCollection:
    """A list, dict, set or deque."""

    length: int
    each_bytes: int
    """By a sample: what hangs on each of the things in it alone, without tensors; 0 where it was not weighed."""
    owner: Owner | None
    """Whose attribute it is, or it is in."""


def plain_collections(before: Mapping[HolderPath, PlainCollection]) -> dict[HolderPath, PlainCollection]:
    """By the path from a variable; the nearest, within a budget. Nothing of the user's is called.

    Weighed are those that are longer than `before`.
    """
    found: dict[HolderPath, PlainCollection] = {}
    seen: set[int] = set()
    with undisturbed(), ExitStack() as stack:
        for rank in (Rank.VARIABLE, Rank.MODULE):
            starts = [root for root in roots() if root.rank is rank]
            walk = Walk(starts, (), _MOST_OBJECTS, enters=_is_plain, most_steps=_DEEPEST, widest=_WIDEST)
            stack.enter_context(closing(walk))  # to the end, as the id of an object that is gone may be another's
            ways = Paths(walk)
            for number, value in enumerate(walk.objects):
                base = _base_of(type(value))
                if base is None or base.__len__(value) < _FEWEST or id(value) in seen or is_attributes(walk, number):
                    continue
                seen.add(id(value))
                path = ways.to(number)
                if path.pieces[-1:] and path.pieces[-1][1:] in _OF_MODULES:
                    continue
                length, known = base.__len__(value), before.get(path)
                each_bytes = _each_bytes(value, base) if known is not None and known.length < length else 0
                each_bytes = each_bytes or (0 if known is None else known.each_bytes)
                found[path] = PlainCollection(length, each_bytes, owner_of(walk, ways, number))
    return found


def _is_plain(kind: type) -> bool:
    return not is_a(kind, torch.Tensor) and not is_node(kind)


def _base_of(kind: type) -> Any:
    """The built-in container that a type is or derives from; None for any other."""
    return next((base for base in CONTAINERS if is_a(kind, base)), None)


def _each_bytes(value: Any, base: Any) -> int:
    """The median: what several of the samples lead to, such as their class, counts for the first of them alone."""
    count = base.__len__(value) * (2 if base is dict else 1)
    seen: dict[int, object] = {}
    try:
        samples = islice(CONTAINERS[base](value), 0, None, max(1, count // _SAMPLES) | 1)
        sizes = [_weight(sample, seen, 0) for sample in samples]
    except RuntimeError:  # as above
        return 0
    return round(median(sizes)) * (2 if base is dict else 1)  # of a dict, a key and a value


def _weight(value: object, seen: dict[int, object], depth: int) -> int:
    """Of what hangs on it; of many things that are alike, one stands for the others."""
    kind = type(value)
    if id(value) in seen or is_a(kind, torch.Tensor) or is_a(kind, type) or depth > _DEEPEST:
        return 0
    seen[id(value)] = value
    if is_outside(kind):
        return _own_bytes(value)
    held = list(islice(held_by(kind)(value), _WIDEST))
    weights = [_weight(one, seen, depth + 1) for one in held]
    base = _base_of(kind)
    count = base.__len__(value) * (2 if base is dict else 1) if base is not None else len(held)
    return _own_bytes(value) + sum(weights) * max(count, len(held)) // max(1, len(held))


def _own_bytes(value: object) -> int:
    """Without what it holds; a `__sizeof__` of the user's is not called."""
    written = next(names_of_type(base)["__sizeof__"] for base in bases(type(value)) if "__sizeof__" in names_of_type(base))
    return object.__sizeof__(value) if type(written) is FunctionType else sys.getsizeof(value)


def largest_holders(extra_roots: Iterable[tuple[str, object]] = (), *, most: int = 5) -> tuple[tuple[str, int], ...]:
    """(variable, bytes), the largest first; a storage that several variables share counts for the nearest one."""
    sizes: Counter[str] = Counter()
    storages = {
        storage._cdata: storage.nbytes()
        for tensor in live(torch.Tensor)
        for storage in storages_of(tensor)
        if storage.device.type != "meta"
    }
    for address, holding in find_holders(list(storages), extra_roots=extra_roots).holdings.items():
        sizes[holding.root] += storages[address]
    # Of plain objects by the largest collection of a variable, as others may be inside that one.
    unweighed = {path: replace(collection, length=0) for path, collection in plain_collections({}).items()}
    plain: Counter[str] = Counter()
    for path, collection in plain_collections(unweighed).items():
        plain[path.label] = max(plain[path.label], collection.length * collection.each_bytes)
    sizes += plain
    return tuple((label, size_bytes) for label, size_bytes in sizes.most_common(most) if size_bytes)
