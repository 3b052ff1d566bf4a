"""How large the collections of plain objects are that variables hold: lists of dicts, arrays, texts. Tensors are weighed elsewhere."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from types import FunctionType
from typing import Any, TypeAlias

import torch

from torchdebug_magics.memory.containers import CONTAINERS
from torchdebug_magics.memory.found import find_holders
from torchdebug_magics.memory.objects import held_by, is_entered, names_in
from torchdebug_magics.memory.outside import bases, is_a, names_of_type
from torchdebug_magics.memory.paths import HolderPath, Owner, owner_as
from torchdebug_magics.memory.roots import Rank, roots
from torchdebug_magics.memory.tensor_holders import is_node, storages_of
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.state.attributes import undisturbed

_MOST_OBJECTS = {Rank.VARIABLE: 4_000, Rank.MODULE: 5_000}
"""In all; variables come first, as the modules of a large repository alone have more globals than that."""
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
    seen: dict[int, object] = {}  # held, as the id of one that is gone may be another's
    with undisturbed():
        for rank, most in _MOST_OBJECTS.items():
            starts = [(HolderPath.of(root), root.value, None, 0) for root in roots() if root.rank is rank]
            for path, value, base, held_as in _reached(starts, seen, most):
                length, known = base.__len__(value), before.get(path)
                each_bytes = _each_bytes(value, base) if known is not None and known.length < length else 0
                owner = owner_as(*held_as) if held_as is not None else None
                found[path] = PlainCollection(length, each_bytes or (0 if known is None else known.each_bytes), owner)
    return found


_Held: TypeAlias = "tuple[type, str, HolderPath]"
"""The nearest object with attributes: its type, the name of the attribute, the path to it."""


def _reached(
    starts: Iterable[tuple[HolderPath, Any, None, int]], seen: dict[int, object], most: int
) -> Iterator[tuple[HolderPath, Any, Any, _Held | None]]:
    """The containers that are reached, with the plain type of each, until `most` objects are in `seen`."""
    todo: deque[tuple[HolderPath, Any, _Held | None, int]] = deque(starts)
    enters: dict[int, bool] = {}
    while todo and len(seen) < most:
        path, value, held_as, depth = todo.popleft()
        kind = type(value)
        if id(kind) not in enters:
            seen[id(kind)] = kind
            enters[id(kind)] = is_entered(kind) and not is_a(kind, torch.Tensor) and not is_node(kind)
        if id(value) in seen or not enters[id(kind)]:
            continue
        seen[id(value)] = value
        base: Any = next((one for one in CONTAINERS if is_a(kind, one)), None)
        if base is not None and base.__len__(value) >= _FEWEST:
            yield path, value, base, held_as
        with suppress(RuntimeError):  # another thread changed it under our hands
            todo.extend(_inside(path, value, held_as, depth, is_container=base is not None) if depth < _DEEPEST else ())


def _inside(
    path: HolderPath, value: Any, held_as: _Held | None, depth: int, *, is_container: bool
) -> Iterator[tuple[HolderPath, Any, _Held | None, int]]:
    is_module = is_a(type(value), torch.nn.Module)
    for piece, held in islice(names_in(value), _WIDEST):
        if not (is_module and piece[1:] in _OF_MODULES):
            is_attribute = not is_container and piece.startswith(".") and piece[1:].isidentifier()
            yield path.to(piece), held, (type(value), piece, path) if is_attribute else held_as, depth + 1


def _each_bytes(value: Any, base: Any) -> int:
    """The median: what several of the samples lead to, such as their class, counts for the first of them alone."""
    count = base.__len__(value) * (2 if base is dict else 1)
    seen: dict[int, object] = {}
    try:
        samples = islice(CONTAINERS[base](value), 0, None, max(1, count // _SAMPLES) | 1)
        sizes = [_weight(one, seen, 0) for one in samples]
    except RuntimeError:  # as above
        return 0
    return round(median(sizes)) * (2 if base is dict else 1)  # of a dict, a key and a value


def _weight(value: object, seen: dict[int, object], depth: int) -> int:
    """Of what hangs on it; of many things that are alike, one stands for the others."""
    kind = type(value)
    if id(value) in seen or is_a(kind, torch.Tensor) or is_a(kind, type) or depth > _DEEPEST:
        return 0
    seen[id(value)] = value
    if not is_entered(kind):
        return _own_bytes(value)
    held = list(islice(held_by(kind)(value), _WIDEST))
    weights = [_weight(one, seen, depth + 1) for one in held]
    base: Any = next((one for one in CONTAINERS if is_a(kind, one)), None)
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
    for label, size_bytes in _plain_sizes().items():
        sizes[label] += size_bytes
    return tuple((label, size_bytes) for label, size_bytes in sizes.most_common(most) if size_bytes)


def _plain_sizes() -> Counter[str]:
    """By variable: its largest collection, as others may be inside that one."""
    unweighed = {path: replace(collection, length=0) for path, collection in plain_collections({}).items()}
    sizes: Counter[str] = Counter()
    for path, collection in plain_collections(unweighed).items():
        sizes[path.label] = max(sizes[path.label], collection.length * collection.each_bytes)
    return sizes
