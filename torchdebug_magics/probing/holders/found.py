"""Who holds which storage: the question that is asked, and the answer in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch

from torchdebug_magics.probing.holders.edges import edges, reach
from torchdebug_magics.probing.holders.outside import is_a
from torchdebug_magics.probing.holders.owners import Owner, owner_of
from torchdebug_magics.probing.holders.paths import Paths
from torchdebug_magics.probing.holders.roots import Root, roots
from torchdebug_magics.probing.holders.slices import is_sliced
from torchdebug_magics.probing.holders.tensor_holders import history_of
from torchdebug_magics.probing.holders.walk import Walk, undisturbed

__all__ = ["Held", "find_holders", "roots_of"]

_MOST_PASSES = 3_000_000
_CACHED: Any = type(lru_cache(len))


@dataclass(frozen=True, kw_only=True)
class Held:
    """The answer; only words, so that it holds nothing itself. A storage is known by its `_cdata`."""

    paths: dict[int, str] = field(default_factory=dict)
    """The best path to each; none for one that nothing with a name holds."""
    roots: dict[int, str] = field(default_factory=dict)
    """The name of the root that the path begins at."""
    others: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The names of further roots that hold it, too: each would keep it alive for itself."""
    bounded: frozenset[int] = frozenset()
    """Those that are held by way of something with a limit, which lets go of the oldest when it is full: a deque, or a function's cache."""
    slices: frozenset[int] = frozenset()
    """Those that are held for the sake of less than half of them: by a slice, or by several."""
    with_history: frozenset[int] = frozenset()
    """Those that are held as a tensor with a graph behind it."""
    owners: dict[int, Owner] = field(default_factory=dict)
    """Of those that are held by way of an attribute: whose it is."""
    is_whole: bool = True
    """Whether all that could be seen was seen; False where the budget was reached."""


def find_holders(
    wanted: Collection[int],
    *,
    extra_roots: Iterable[tuple[str, object]] = (),
    first: Collection[str] = (),
    most_visits: int = 300_000,
) -> Held:
    """Who holds the storages with these `_cdata`.

    No code of the user's runs, and nothing is changed. `extra_roots` are further (name, object), as near as an exception; a root whose
    label is among `first` is the better answer, though another is somewhat nearer.
    """
    with undisturbed(), closing(Walk(roots(extra_roots), wanted, most_visits, first=first)) as walk:
        held_at, is_whole = roots_of(walk)
        ways, paths, best_roots, others, owners = Paths(walk), {}, {}, {}, {}
        for storage, numbers in walk.holders.items():
            if (owner := owner_of(walk, ways, numbers[0])) is not None:
                owners[storage] = owner
            paths[storage] = ways.to(numbers[0])
            best = ways.root_of(numbers[0])
            best_roots[storage] = best.label
            others[storage] = tuple(dict.fromkeys(root.label for root in held_at[storage] if root is not best))
        bounded = frozenset(storage for storage, numbers in walk.holders.items() if _is_bounded(walk, numbers[0]))
        with_history = frozenset(storage for storage, numbers in walk.holders.items() if _has_history(walk.objects[numbers[0]]))
        slices = frozenset(storage for storage, numbers in walk.holders.items() if is_sliced(walk, numbers))
        return Held(
            paths=paths,
            roots=best_roots,
            others=others,
            owners=owners,
            bounded=bounded,
            slices=slices,
            with_history=with_history,
            is_whole=is_whole,
        )


def _has_history(holder: Any) -> bool:
    return is_a(type(holder), torch.Tensor) and history_of(holder) is not None


def _is_bounded(walk: Walk, number: int) -> bool:
    while number >= 0:
        holder = walk.objects[number]
        if type(holder) is deque and holder.maxlen is not None:
            return True
        if type(holder) is _CACHED and holder.cache_info().maxsize is not None:
            return True
        number = walk.first[number]
    return False


def roots_of(walk: Walk) -> tuple[dict[int, list[Root]], bool]:
    """By storage: all roots from which it can be reached, in order; and whether all of them were found."""
    back = edges(walk.targets, walk.sources)
    relevant = reach([number for numbers in walk.holders.values() for number in numbers], back)
    named = [(number, root) for number, found in walk.roots.items() if number in relevant for root in found]
    named.sort(key=lambda one: one[1].rank)
    masks = dict.fromkeys(relevant, 0)
    for bit, (number, _) in enumerate(named):
        masks[number] |= 1 << bit
    todo, passes = deque(dict.fromkeys(number for number, _ in named)), 0
    forward = edges(walk.sources, walk.targets, relevant)
    while todo and passes < _MOST_PASSES:
        number = todo.popleft()
        for target in forward.get(number, ()):
            passes += 1
            if masks[number] & ~masks[target]:
                masks[target] |= masks[number]
                todo.append(target)
    known: dict[int, list[Root]] = {}
    found = {}
    for storage, numbers in walk.holders.items():
        mask = reduce(or_, (masks[number] for number in numbers))
        if mask not in known:
            known[mask] = [root for bit, (_, root) in enumerate(named) if mask >> bit & 1]
        found[storage] = known[mask]
    return found, walk.is_whole and not todo
