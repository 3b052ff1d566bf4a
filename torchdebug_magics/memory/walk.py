"""A walk from the roots, where names begin, to all that they hold, the nearest first, within a budget."""

from __future__ import annotations

import contextvars
import sys
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from inspect import CO_OPTIMIZED
from itertools import islice
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.memory.containers import CONTAINERS, is_a, is_outside, of_type, running_frames, space_of, thread_names, whose_module
from torchdebug_magics.memory.objects import addresses_of, held_by, in_node
from torchdebug_magics.probing.graphs import MOST_NODES
from torchdebug_magics.probing.names import OUTPUT_NAME, named, user_namespaces, user_variables
from torchdebug_magics.probing.source.user_code import local_values, our_extension, running_shell

_ERRORS = ("last_traceback", "last_value", "last_exc")
_FARTHER = 4
"""Steps."""
_EDGES_EACH = 16
"""How many things an object is allowed to hold on average: the numbers in a list cost time, too."""


class Rank(IntEnum):
    """Which of two roots that are equally near is the better answer: the lower one."""

    VARIABLE = 0
    OUTPUT = 1
    ERROR = 2
    DEBUGGER = 3
    SESSION = 4
    """What the last session of ours keeps for inspection."""
    IN_FLIGHT = 5
    """An error that is being handled, or what the caller says."""
    MODULE = 6


class Root(NamedTuple):
    """A named place in which things are held."""

    label: str
    value: object
    rank: Rank
    name: str = ""
    """The variable of a running call, whose `function` the label has, too; empty where it is the label."""
    function: str = ""


def roots(extra: Iterable[tuple[str, object]] = ()) -> Iterator[Root]:
    """All of them; the same object may come under several names."""
    shell = running_shell()
    yield from (Root(name, value, Rank.VARIABLE) for name, value in user_variables())
    yield from _locals()
    yield from _outputs(shell)
    yield from (Root(label, value, Rank.IN_FLIGHT) for label, value in extra)
    yield from _errors(shell)
    yield from _session(shell)
    yield from _globals(user_namespaces())
    yield from _kept()


def namespaces() -> Iterator[object]:
    """Dicts that are roots by their items: whoever holds one of them is no holder of all that is in it."""
    yield sys.modules
    yield from (space_of(module) for module in list(sys.modules.values()))
    shell = running_shell()
    if shell is not None:
        yield from (shell.user_ns, shell.user_ns_hidden, outputs(shell), shell.user_ns.get("In"))


def _locals() -> Iterator[Root]:
    spaces = list(namespaces())  # held, as the id of one that is gone may be another's
    known = set(map(id, spaces))
    for thread, frame in running_frames():
        where = f" in thread {thread!r}" if thread else ""
        if frame.f_code.co_flags & CO_OPTIMIZED:  # it has locals of its own: at the top of a module or a cell, they are the namespace
            function = frame.f_code.co_name
            for name, value in local_values(frame).items():
                yield Root(f"{function}() local {name!r}{where}", value, Rank.VARIABLE, name, function)
        elif id(frame.f_locals) not in known:
            found = ((name, value) for name, value in local_values(frame).items() if not name.startswith("__"))
            yield from (Root(f"{name}{where}", value, Rank.VARIABLE, name) for name, value in found)


def outputs(shell: Any) -> dict[int, Any]:
    """`Out`, unless the user gave its name to something else."""
    held = shell.user_ns.get("_oh")
    return held if type(held) is dict else {}


def _outputs(shell: Any) -> Iterator[Root]:
    if shell is None:
        return
    yield from (Root(f"Out[{number}]", value, Rank.OUTPUT) for number, value in list(outputs(shell).items()))
    yield from (Root(name, value, Rank.OUTPUT) for name, value in named(shell.user_ns) if OUTPUT_NAME.match(name))
    hidden = named(shell.user_ns_hidden)
    yield from (Root(f"user_ns_hidden[{name!r}]", value, Rank.OUTPUT) for name, value in hidden if OUTPUT_NAME.match(name))
    yield from (Root(f"displayhook.{name}", getattr(shell.displayhook, name, None), Rank.OUTPUT) for name in ("_", "__", "___"))
    yield Root("last_execution_result.result", getattr(shell.last_execution_result, "result", None), Rank.OUTPUT)


def _errors(shell: Any) -> Iterator[Root]:
    for name in _ERRORS:
        yield Root(f"sys.{name}", getattr(sys, name, None), Rank.ERROR)
    for error in (sys.exc_info()[1], *sys._current_exceptions().values()):
        yield Root("exception in flight", error[1] if isinstance(error, tuple) else error, Rank.IN_FLIGHT)
    if shell is None:
        return
    for name in ("InteractiveTB", "SyntaxTB"):
        held = getattr(shell, name, None)
        yield from (Root(f"{name}.{part}", getattr(held, part, None), Rank.ERROR) for part in ("tb", "evalue", "last_syntax_error"))
        # What a debugger that was left stands on; it is of IPython's, and not entered as such.
        kept = getattr(getattr(held, "pdb", None), "__dict__", None) or {}
        yield from (Root(f"{name}.pdb.{part}", value, Rank.DEBUGGER) for part, value in kept.items())
    for name in ("error_in_exec", "error_before_exec"):
        yield Root(f"last_execution_result.{name}", getattr(shell.last_execution_result, name, None), Rank.ERROR)


def _session(shell: Any) -> Iterator[Root]:
    session = getattr(our_extension(shell), "last_session", None)
    for name, kept in session.kept.items() if session is not None else ():
        yield Root(f"last_session().kept[{name!r}]", kept, Rank.SESSION)


def _globals(known: list[dict[str, Any]]) -> Iterator[Root]:
    tops: dict[str, bool] = {}  # an installed package has many modules, and all are its own
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if not (tops[top] if top in tops else tops.setdefault(top, whose_module(top) == "user")):
            continue
        space = space_of(module)
        if whose_module(name) != "user" or any(space is one for one in known):
            continue
        yield from (Root(f"{name}.{item}", value, Rank.MODULE) for item, value in named(space) if not item.startswith("__"))


def _kept() -> Iterator[Root]:
    for variable, value in contextvars.copy_context().items():
        yield Root(f"contextvar {variable.name}", value, Rank.MODULE)
    for info in list(getattr(weakref.finalize, "_registry", {}).values()):
        if type(library := info.weakref()) is torch.library.Library and library.ns == "prims":
            continue  # torch's own, a hundred, which are made of more objects than most users have
        kind: Any = type(info.func)
        called = info.func.__name__ if kind is FunctionType or kind is BuiltinFunctionType else kind.__name__
        yield Root(f"weakref.finalize of {called}", (info.func, info.args, info.kwargs), Rank.MODULE)
    for thread, (_, name) in zip(threading.enumerate(), thread_names(), strict=False):
        yield Root(f"thread {name!r}", thread, Rank.MODULE)


_STEP = len(Rank)
"""Roots of a lower rank go first among those that are equally near."""


class _Way(NamedTuple):
    """How objects of one type are asked for what they hold."""

    held_by: Callable[[Any], Iterable[object]]
    is_container: bool
    may_be_empty: bool
    """Whether it tells without any code of the user's that nothing is in it: no way leads through it then. A module has a dozen such."""
    has_memory: bool
    is_node: bool


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
        self._ways: dict[int, _Way | None] = {}
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
        way = self._way(type(root.value))
        if way is not None and id(root.value) not in self._closed:
            farther = _FARTHER * _STEP if self._first and root.label not in self._first else 0
            self._meet(root.value, way, -1, int(root.rank) + farther)
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
        ways, closed = self._ways, self._closed
        way = ways[id(type(holder))]
        assert way is not None  # as it was met
        for address in addresses_of(holder) if way.has_memory else ():
            if self._wanted is None or address in self._wanted:
                self.holders.setdefault(address, []).append(number)
        if self._depths[number] > 2 * MOST_NODES:
            self.is_whole = False
            return
        seen = 0
        try:
            for held in islice(way.held_by(holder), self._widest):
                seen += 1
                kind = type(held)
                met = ways[id(kind)] if id(kind) in ways else self._way(kind)
                if met is None or id(held) in closed or (met.may_be_empty and not held):
                    continue
                # The dict of an object's attributes, or one that is an attribute, is no step.
                self._meet(held, met, number, cost if kind is dict and not way.is_container else cost + _STEP)
        except Exception:  # noqa: BLE001 - another thread changed it under our hands, or torch refuses: what it holds is not seen
            self.is_whole = False
        self._most -= seen // _EDGES_EACH

    def _meet(self, held: object, way: _Way, holder: int, cost: int) -> None:
        number = self._number.get(id(held))
        if number is None:
            number = self._number[id(held)] = len(self.objects)
            self.objects.append(held)
            self.first.append(holder)
            self._costs.append(cost)
            self._depths.append((self._depths[holder] if holder >= 0 else 0) + way.is_node)
            self._put(number, cost)
        elif cost < self._costs[number]:  # never, once it was entered
            self.first[number], self._costs[number] = holder, cost
            self._put(number, cost)
        if holder >= 0:
            self.sources.append(holder)
            self.targets.append(number)

    def _put(self, number: int, cost: int) -> None:
        while len(self._queue) <= cost:
            self._queue.append([])
        self._queue[cost].append(number)

    def _way(self, kind: type) -> _Way | None:
        """How to ask an object of that type; None for one that is passed by."""
        if id(kind) not in self._ways:
            self._types.append(kind)
            asked, is_container = held_by(kind), of_type(CONTAINERS, kind) is not None
            has_memory = is_a(kind, torch.Tensor) or is_a(kind, torch.UntypedStorage)
            way = _Way(asked, is_container, is_container or kind is OrderedDict, has_memory, asked is in_node)
            self._ways[id(kind)] = None if is_outside(kind) or not self._enters(kind) else way
        return self._ways[id(kind)]
