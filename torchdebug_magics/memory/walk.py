"""A walk from the named roots to all that they hold, the nearest first, within a budget."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

from torchdebug_magics.memory.containers import CONTAINERS
from torchdebug_magics.memory.objects import held_by
from torchdebug_magics.memory.outside import is_outside, of_type
from torchdebug_magics.memory.roots import Rank, Root, namespaces
from torchdebug_magics.memory.tensor_holders import addresses_of, in_node
from torchdebug_magics.probing.graphs import MOST_NODES

_STEP = len(Rank)
"""Roots of a lower rank go first among those that are equally near."""
_FARTHER = 4
"""Steps."""
_EDGES_EACH = 16
"""How many things an object is allowed to hold on average: the numbers in a list cost time, too."""
_Way = Callable[[Any], Iterable[object]]


class Walk:
    """Objects are numbered as they are met; all are held until the walk is closed, as the id of one that is gone may be another's."""

    def __init__(
        self,
        starts: Iterable[Root],
        wanted: Collection[int] | None,
        most_visits: int,
        *,
        enters: Callable[[type], bool] = lambda _kind: True,
        most_steps: int | None = None,
        widest: int | None = None,
        first: Collection[str] = (),
    ) -> None:
        self.objects: list[Any] = []
        self.first = array("q")
        """The holder by which an object was met first on the best way; -1 for a root."""
        self.roots: dict[int, list[Root]] = {}
        """Of an object that is held at roots themselves: under which names, the best first."""
        self.holders: dict[int, list[int]] = {}
        """By storage: the tensors, or the storage itself, that stand for it."""
        self.sources, self.targets = array("q"), array("q")
        self.is_whole = True
        self._wanted = None if wanted is None else frozenset(wanted)  # None: all of them
        self._most = most_visits
        self._enters = enters
        self._deepest = None if most_steps is None else _STEP * (most_steps + 1)
        self._widest = widest
        """How many of the things that one object holds are met at most."""
        self._first = first
        """Roots that count as nearer than all others."""
        self._number: dict[int, int] = {}
        self._costs = array("q")
        self._depths = array("q")
        """How many nodes of autograd graphs led to it."""
        self._queue: list[list[int]] = []
        self._ways: dict[int, tuple[_Way, bool] | None] = {}
        self._types: list[type] = []
        self._spaces = list(namespaces())
        self._closed = {id(space) for space in self._spaces}
        for root in starts:
            self._begin(root)
        self._run()

    def close(self) -> None:
        """Let go of all: frames that run, ours with the walk in it among them, are what was met, and hold the walk in turn."""
        for held in (self.objects, self.roots, self._types, self._spaces):
            held.clear()

    def _begin(self, root: Root) -> None:
        if self._way(type(root.value)) is not None and id(root.value) not in self._closed:
            farther = _FARTHER * _STEP if self._first and root.label not in self._first else 0
            self._meet(root.value, -1, int(root.rank) + farther)
            self.roots.setdefault(self._number[id(root.value)], []).append(root)

    def _run(self) -> None:
        cost = 0
        while cost < len(self._queue) and (self._deepest is None or cost < self._deepest):
            # What is appended meanwhile, at no further cost, comes next.
            for number in self._queue[cost]:
                if self._costs[number] == cost:
                    self._costs[number] = -1 - cost  # so that it is entered once
                    self._enter(number, cost)
                if len(self.objects) > self._most or len(self.sources) > _EDGES_EACH * self._most:
                    self.is_whole = False
                    return
            cost += 1

    def _enter(self, number: int, cost: int) -> None:
        holder = self.objects[number]
        for address in addresses_of(holder):
            if self._wanted is None or address in self._wanted:
                self.holders.setdefault(address, []).append(number)
        if self._depths[number] > 2 * MOST_NODES:
            self.is_whole = False
            return
        ways, closed = self._ways, self._closed
        way, is_container = ways[id(type(holder))] or (tuple, True)  # never, as it would not have been met
        seen = 0
        try:
            for held in islice(way(holder), self._widest):
                seen += 1
                kind = type(held)
                if (ways[id(kind)] if id(kind) in ways else self._way(kind)) is None or id(held) in closed:
                    continue
                # The dict of an object's attributes, or one that is an attribute, is no step.
                self._meet(held, number, cost if kind is dict and not is_container else cost + _STEP)
        except Exception:  # noqa: BLE001 - another thread changed it under our hands, or torch refuses: what it holds is not seen
            self.is_whole = False
        self._most -= seen // _EDGES_EACH

    def _meet(self, held: object, holder: int, cost: int) -> None:
        number = self._number.get(id(held))
        if number is None:
            number = self._number[id(held)] = len(self.objects)
            self.objects.append(held)
            self.first.append(holder)
            self._costs.append(cost)
            way = self._ways.get(id(type(held)))
            is_node = way is not None and way[0] is in_node
            self._depths.append((self._depths[holder] if holder >= 0 else 0) + is_node)
            self._put(number, cost)
        elif cost < self._costs[number]:  # never, once it was entered
            self.first[number] = holder
            self._costs[number] = cost
            self._put(number, cost)
        if holder >= 0:
            self.sources.append(holder)
            self.targets.append(number)

    def _put(self, number: int, cost: int) -> None:
        while len(self._queue) <= cost:
            self._queue.append([])
        self._queue[cost].append(number)

    def _way(self, kind: type) -> tuple[_Way, bool] | None:
        """How to ask an object of that type what it holds, and whether it is a container; None for one that is passed by."""
        if id(kind) not in self._ways:
            self._types.append(kind)
            self._ways[id(kind)] = (
                (held_by(kind), of_type(CONTAINERS, kind) is not None) if not is_outside(kind) and self._enters(kind) else None
            )
        return self._ways[id(kind)]
