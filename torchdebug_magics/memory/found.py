"""Who holds which storage, behind which variable a history grows, and how large the collections of plain objects are."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import islice
from operator import or_
from statistics import median
from types import FunctionType
from typing import Any

import torch

from torchdebug_magics.memory.containers import CONTAINERS, bases, is_a, is_outside, names_of_type
from torchdebug_magics.memory.objects import held_by, history_of, is_array, is_node, is_used_up, next_nodes, shown_bytes, storages_of
from torchdebug_magics.memory.paths import GRAPH, NOWHERE, HolderPath, Owner, Paths, owner_of
from torchdebug_magics.memory.walk import Rank, Root, Walk, roots
from torchdebug_magics.probing.graphs import MOST_NODES
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.state.attributes import attributes_of, undisturbed

_MOST_PASSES = 3_000_000
_CACHED: Any = type(lru_cache(len))
_STEPS = 5
_MOST_OBJECTS, _MOST_NODES, _MOST_NAMES = 30_000, 30_000, 50
"""Of all graphs together: see `probing.graphs`."""
_MOST_ASKED = 20
"""Nodes of one step that are asked whether they were let go."""
_MOST_PLAIN = 5_000
"""Of variables, and as many of modules: a large repository alone has more globals than that."""
_SAMPLES = 16
"""Things of a collection that are weighed."""
_FEWEST = 2


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Who holds one storage; as it stands here, nobody with a name."""

    path: HolderPath = NOWHERE
    """The best one."""
    root: str = ""
    """The name of the root that it begins at."""
    others: tuple[str, ...] = ()
    """The names of further roots that hold it, too: each would keep it alive for itself."""
    owner: Owner | None = None
    """Whose attribute it is, or is in; None where it is a variable's."""
    is_bounded: bool = False
    """Whether something with a limit holds it, which lets go of the oldest when it is full: a deque, or a function's cache."""
    is_sliced: bool = False
    """Whether it is held for the sake of less than half of it: by a slice, or by several."""
    has_history: bool = False
    """Whether it is held as a tensor with a graph behind it."""

    @property
    def in_graph(self) -> bool:
        """Whether it is held with a graph, or by one."""
        return self.has_history or self.path.through_graph


@dataclass(frozen=True, kw_only=True)
class Held:
    """The answer; only words, so that it holds nothing itself. A storage is known by its `_cdata`."""

    holdings: dict[int, Holding]
    """Of each storage that something with a name holds."""
    is_whole: bool
    """Whether all that could be seen was seen; False where the budget was reached."""

    @property
    def paths(self) -> dict[int, HolderPath]:
        """The best path to each."""
        return {storage: holding.path for storage, holding in self.holdings.items()}


def find_holders(
    wanted: Collection[int], *, extra_roots: Iterable[tuple[str, object]] = (), first: Collection[str] = (), most_visits: int = 300_000
) -> Held:
    """Who holds the storages with these `_cdata`.

    No code of the user's runs, and nothing is changed. `extra_roots` are further (name, object), as near as an exception; a root whose
    label is among `first` is the better answer, though another is somewhat nearer.
    """
    with undisturbed(), closing(Walk(roots(extra_roots), wanted, most_visits, first=first)) as walk:
        held_at, is_whole = roots_of(walk)
        ways = Paths(walk)
        holdings = {storage: _holding(walk, ways, numbers, held_at[storage]) for storage, numbers in walk.holders.items()}
        return Held(holdings=holdings, is_whole=is_whole)


def _holding(walk: Walk, ways: Paths, numbers: list[int], held_at: list[Root]) -> Holding:
    nearest = numbers[0]
    best, holder = ways.root_of(nearest), walk.objects[nearest]
    return Holding(
        path=ways.to(nearest),
        root=best.label,
        others=tuple(dict.fromkeys(root.label for root in held_at if root is not best)),
        owner=owner_of(walk, ways, nearest),
        is_bounded=_is_bounded(walk, nearest),
        is_sliced=is_sliced(walk, numbers),
        has_history=is_a(type(holder), torch.Tensor) and history_of(holder) is not None,
    )


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


def is_sliced(walk: Walk, holders: list[int]) -> bool:
    """Whether those objects, which stand for one storage, show less than half of it."""
    whole = next((storage.nbytes() for number in holders for storage in storages_of(walk.objects[number])), 0)
    among = frozenset(holders)
    shown = [_shown(walk, number) for number in holders if walk.first[number] not in among]  # the others are the bases of views
    return None not in shown and 0 < 2 * sum(one or 0 for one in shown) < whole


def _shown(walk: Walk, number: int) -> int | None:
    """By a tensor, or by what of it the arrays show that hold it."""
    found = shown_bytes(walk.objects[number])
    while found is not None and (number := walk.first[number]) >= 0 and is_array(type(walk.objects[number])):
        kind: Any = sys.modules["numpy"].ndarray
        found = min(found, int(kind.nbytes.__get__(walk.objects[number])))
    return found


def edges(sources: Iterable[int], targets: Iterable[int], among: Collection[int] | None = None) -> dict[int, list[int]]:
    """The targets of each source, where both are among some."""
    found: dict[int, list[int]] = {}
    for source, target in zip(sources, targets, strict=True):
        if among is None or (source in among and target in among):
            found.setdefault(source, []).append(target)
    return found


def reach(starts: Iterable[int], edges: dict[int, list[int]]) -> set[int]:
    """The starts, and all that they lead to."""
    found = set(starts)
    todo = list(found)
    while todo:
        for target in edges.get(todo.pop(), ()):
            if target not in found:
                found.add(target)
                todo.append(target)
    return found


@dataclass(frozen=True, kw_only=True)
class History:
    """The nodes that lie behind what one variable holds."""

    steps: Mapping[int, int]
    """How many of them were made in each step."""
    used_up: frozenset[int]
    """The steps of which a backward pass has let go what its nodes had saved: no other can run through them."""
    is_whole: bool
    """False where there were more nodes than may be looked at."""
    is_number: bool
    """Whether it is that of tensors with a single number each."""
    begins_anew: bool
    """Whether all that it leads to are tensors that the user has made to require a gradient, and no parameters of a module."""
    is_collection: bool
    """Whether it is that of a list or the like, and not of one tensor."""
    in_records: bool
    """Whether it is that of a collection of objects that hold a tensor as an attribute."""
    entry: str
    """The key under which each item of the collection, a dict, holds its tensor; empty where it is not one key, or items are tensors."""
    owner: Owner | None
    latest: int
    """The sequence number of the node that was made last."""

    @property
    def count(self) -> int:
        """All of the nodes."""
        return sum(self.steps.values())


def histories(step_of: Callable[[int], int]) -> dict[HolderPath, History]:
    """By the path of a variable, or of the collection in one, such as ``total`` or ``trainer.losses``: the history of all that is named.

    `step_of` tells the step from the sequence number of a node; what was made in none, 0, is not counted, as what was made earlier leads
    to nothing later. A node that lies behind two of the paths counts for both; what is not reached within the budget is left out.
    """
    with undisturbed(), ExitStack() as stack:
        starts = [root for root in roots() if root.rank not in {Rank.ERROR, Rank.DEBUGGER, Rank.IN_FLIGHT}]
        walk = stack.enter_context(closing(Walk(starts, (), _MOST_OBJECTS, enters=lambda kind: not is_node(kind), most_steps=_STEPS)))
        ways, left, found = Paths(walk), _MOST_NODES, {}
        by_place: dict[int, HolderPath] = {}
        groups: dict[HolderPath, list[tuple[int, HolderPath]]] = {}
        for number, held in enumerate(walk.objects):
            if is_a(type(held), torch.Tensor) and history_of(held) is not None:
                holder = walk.first[number]
                path = by_place.get(holder) or ways.to(number).to(GRAPH)
                if holder >= 0 and path.pieces[-2:-1] == (path.place,):  # all that is in this collection is in the same variable's
                    by_place[holder] = path
                groups.setdefault(path.around, []).append((number, path))
        for around, members in list(groups.items())[:_MOST_NAMES]:
            tensors = [walk.objects[number] for number, _ in members]
            number, path = members[0]
            while number >= 0 and ways.to(number) != around:
                number = walk.first[number]
            entries = {path.entry for _, path in members}
            found[around] = _history(
                map(history_of, tensors),
                step_of,
                min(left, MOST_NODES),
                is_number=not any(map(torch._C.TensorBase.dim, tensors)),
                is_collection=not path.startswith(f"{around}{GRAPH}"),
                in_records=path.in_record,
                entry=path.entry if len(entries) == 1 else "",
                owner=owner_of(walk, ways, number) if number >= 0 else None,
            )
            left -= found[around].count
        return found


def _history(nodes: Iterable[Any], step_of: Callable[[int], int], most: int, **known: Any) -> History:
    todo = [node for node in nodes if step_of(node._sequence_nr())]
    seen = {id(node): node for node in todo}  # held, as the id of a wrapper that is gone may be another's
    steps, asked, used_up, latest = Counter[int](), Counter[int](), set[int](), 0
    leaves = set[bool]()
    while todo:
        node = todo.pop()
        number = node._sequence_nr()  # of those that collect a leaf's gradient, the highest number there is
        step, latest = step_of(number), max(latest, number)
        steps[step] += 1
        if step not in used_up and asked[step] < _MOST_ASKED:
            asked[step] += 1
            if is_used_up(node):
                used_up.add(step)
        for before in next_nodes(node):
            if "variable" in names_of_type(type(before)):
                leaves.add(is_a(type(before.variable), torch.nn.Parameter))
            if id(before) not in seen and step_of(before._sequence_nr()) and len(seen) < most:
                seen[id(before)] = before
                todo.append(before)
    return History(
        steps=steps, used_up=frozenset(used_up), is_whole=len(seen) < most, begins_anew=leaves == {False}, latest=latest, **known
    )


_WIDEST, _DEEPEST = 64, 6
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
            walk = Walk(starts, (), _MOST_PLAIN, enters=_is_plain, most_steps=_DEEPEST, widest=_WIDEST)
            stack.enter_context(closing(walk))  # to the end, as the id of an object that is gone may be another's
            ways = Paths(walk)
            for number, value in enumerate(walk.objects):
                base, holder = _base_of(type(value)), walk.first[number]
                is_attributes = holder >= 0 and type(value) is dict and attributes_of(walk.objects[holder]) is value
                if base is None or base.__len__(value) < _FEWEST or id(value) in seen or is_attributes:
                    continue
                seen.add(id(value))
                path = ways.to(number)
                if path.pieces[-1:] and path.pieces[-1][1:] in _OF_MODULES:
                    continue
                length, known = base.__len__(value), before.get(path)
                each_bytes = 0
                if known is not None:
                    each_bytes = (_each_bytes(value, base) if known.length < length else 0) or known.each_bytes
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
