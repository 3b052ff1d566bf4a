"""The way from a root to an object, written as one would in code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CellType, FrameType, FunctionType
from typing import Any, Self

import torch

from torchdebug_magics.memory.containers import CONTAINERS, bases, is_a, module_of, names_of_type, of_type, whose_module
from torchdebug_magics.memory.objects import is_node, names_in
from torchdebug_magics.memory.walk import Root, Walk

_ARROW = " -> "
_GAP = "…"
_MOST_ARROWS, _MOST_PIECES = 3, 14
_END = 16
"""How many steps are looked at from each end of a long way."""
_EMPTIES = ("reset", "clear", "clear_memory", "flush")
_MOST_STEPS = 64
GRAPH = ".grad_fn"
_STATES = frozenset(f"[{name!r}]" for name in ("exp_avg", "exp_avg_sq", "step", "momentum_buffer", "square_avg"))


class HolderPath(str):  # noqa: SLOT000 - it caches what it works out
    """The way from a named root to what it holds: as text, such as ``trainer.log[3]['loss'].grad_fn``, and in its pieces."""

    label: str
    """How the root is written in the text, such as ``train() local 'losses'``."""
    name: str
    """The root as one writes it in code: ``losses``."""
    function: str
    """The call of which it is a local; empty for any other root."""
    pieces: tuple[str, ...]
    """An attribute, a place in a collection, or a node of the graph each."""

    def __new__(cls, label: str = "", pieces: Iterable[str] = (), name: str = "", function: str = "") -> Self:
        """From the root and all pieces."""
        self = super().__new__(cls, label + "".join(pieces := tuple(pieces)))
        self.label, self.name, self.function = label, name or label, function
        # ``.state[...]`` comes in one, and is an attribute and a place in it.
        self.pieces = tuple(part for piece in pieces for part in _parts(piece))
        return self

    @classmethod
    def of(cls, root: Root, pieces: Iterable[str] = ()) -> Self:
        """From a root; an output is one of the many things in ``Out``."""
        if root.label.startswith("Out["):
            return cls("Out", (root.label.removeprefix("Out"), *pieces))
        return cls(root.label, pieces, root.name, root.function)

    def to(self, piece: str) -> Self:
        """One step further."""
        return type(self)(self.label, (*self.pieces, piece), self.name, self.function)

    @property
    def root(self) -> str:
        """The variable that it begins at, as one writes it."""
        return f"{self.name}{''.join(self.pieces[:1])}" if self.label == "Out" else self.name

    @cached_property
    def collection(self) -> str:
        """The collection at its start: ``trainer.log``; of what a function closes over, that variable."""
        return self.closed_over[1] or self.name + "".join(self.pieces[: self._cut])

    @property
    def variable(self) -> str:
        """The same as code: ``net[1].log`` for ``net.1.log``."""
        return self.closed_over[1] or self.name + "".join(map(_as_code, self.pieces[: self._cut]))

    @property
    def as_code(self) -> str:
        """All of it as code."""
        return self.name + "".join(map(_as_code, self.pieces))

    @property
    def around(self) -> Self:
        """The way to the collection that it is in, or whose records have it as an attribute; else to itself, without its graph."""
        at = self.pieces.index(GRAPH) if self.through_graph else len(self.pieces)
        while at and (self.pieces[at - 1][0] in "[{" or (at > 1 and self.pieces[at - 1][0] == "." and _is_place(self.pieces[at - 2]))):
            at -= 1
        return type(self)(self.label, self.pieces[:at], self.name, self.function)

    @property
    def inside(self) -> tuple[str, ...]:
        """The pieces behind the collection."""
        return self.pieces[self._cut :]

    @property
    def place(self) -> str:
        """Where in the collection it is, such as ``[3]``; empty where it is in none."""
        first = "".join(self.inside[:1])
        return first if _is_place(first) else ""

    @property
    def in_variable(self) -> bool:
        """Whether a variable holds it in a collection, as in ``outs[0]``: by no attribute, closure or graph."""
        pieces = list(self.pieces)
        while pieces and pieces[-1] == ".base":
            pieces.pop()
        is_plain = self.label.isidentifier() or (bool(self.function) and self.label.endswith("'"))
        return is_plain and bool(pieces) and all(piece[0] in "[{" for piece in pieces)

    @property
    def entry(self) -> str:
        """Behind a collection of dicts: the key under which each holds its tensor with a graph."""
        if self.place[:1] != "[" or self.inside[2:3] != (GRAPH,):
            return ""
        key = self.inside[1][2:-2]
        return key if self.inside[1] == f"[{key!r}]" else ""

    @property
    def in_record(self) -> bool:
        """Whether it is an attribute of one of many objects in a collection."""
        behind = "".join(self.inside[1:2])
        return self.place[:1] == "[" and behind != GRAPH and behind[1:2].isidentifier() and behind[0] == "."

    @property
    def through_graph(self) -> bool:
        """Whether a graph holds it."""
        return GRAPH in self.pieces

    @property
    def through_hook(self) -> bool:
        """Whether a hook does."""
        return any("_hooks" in piece for piece in self.pieces)

    @property
    def through_cache(self) -> str:
        """The path to the cache that holds it, a function's or one that is named so; empty where none does."""
        steps = (self.name, *map(_as_code, self.pieces))
        at = next((at for at, step in enumerate(steps) if "cache" in step.lower()), -1)
        return "".join(steps[: at + 1])

    @property
    def in_function_cache(self) -> bool:
        """Whether it is in that of ``functools.cache``."""
        return ".<cache>" in self.pieces

    @property
    def in_traceback(self) -> bool:
        """Whether the traceback of an error holds it."""
        return any(piece.startswith(_ARROW) and piece.rpartition(":")[2].isdigit() for piece in self.pieces)

    @property
    def is_hidden(self) -> bool:
        """Whether a cache, a closure or a default value holds it, and no variable that one sees."""
        return bool(self.through_cache) or any(piece.startswith(".<") for piece in self.pieces)

    @property
    def is_made_once(self) -> bool:
        """Whether the first step makes it: a gradient, or an optimizer's state, unless that is one of many in a list."""
        is_state = self.pieces[-3:-1] == (".state", "[...]") and self.pieces[-1] in _STATES
        return self.pieces[-1:] == (".grad",) or (is_state and self.collection.endswith(".state"))

    @cached_property
    def _cut(self) -> int:
        """How many pieces lead to the collection."""
        ends = (at for at, piece in enumerate(self.pieces) if _is_place(piece) or piece == GRAPH or piece.startswith((_ARROW, ".<")))
        return next(ends, len(self.pieces))

    @cached_property
    def closed_over(self) -> tuple[str, str]:
        """Of what is in no collection but one of a function's: (closure or default, name of the variable)."""
        brackets = (at for at, piece in enumerate(self.pieces) if piece[0] in "[{")
        before = self.pieces[: next(brackets, None)]
        kind, _, name = next((piece[2:-1] for piece in before[::-1] if piece.startswith((".<closure ", ".<default "))), "").partition(" ")
        return kind, name


def _parts(piece: str) -> tuple[str, ...]:
    name, bracket, rest = piece.partition("[")
    return (name, bracket + rest) if bracket and name.startswith(".") else (piece,)


def _is_place(piece: str) -> bool:
    return piece in {"[...]", "{...}"} or (piece[:1] == "[" and piece[1:-1].removeprefix("-").isdigit())


def _as_code(piece: str) -> str:
    return f"[{piece[1:]}]" if piece[1:].isdigit() and piece[0] == "." else piece


NOWHERE = HolderPath()
"""The path to what nothing with a name holds."""


class Names:
    """How what an object holds is written behind its name; each holder is asked once."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, str]] = {}
        """By holder and what is held; both are objects of a walk, which stay."""

    def find(self, holder: object, held: object) -> str | None:
        """None where the place has no name."""
        if id(holder) not in self._known:
            known: dict[int, str] = {}
            for piece, one in names_in(holder):
                known.setdefault(id(one), piece)
            self._known[id(holder)] = known
        return self._known[id(holder)].get(id(held))

    def along(self, objects: Sequence[object]) -> Iterator[tuple[str, int]]:
        """(how it is written, where it leads to) for each step of a way from object to object."""
        at = 0
        while at + 1 < len(objects):
            # The dict of its attributes is not written: `loader.cache`, not `loader.__dict__['cache']`.
            through = at + 2 < len(objects) and type(objects[at + 1]) is dict and of_type(CONTAINERS, type(objects[at])) is None
            piece = self.find(objects[at], objects[at + 2]) if through else None
            at += 1 if piece is None else 2
            # Where its place has no name, by the type of what is held.
            yield self.find(objects[at - 1], objects[at]) or f".<{type(objects[at]).__name__}>" if piece is None else piece, at


class Paths:
    """The best ways to the objects of a walk; what many of them share is worked out once."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.names = Names()
        self._begins: dict[int, tuple[int, ...]] = {}
        """Of an object, the first steps of the way to it, from the root."""

    def to(self, number: int) -> HolderPath:
        """The way to the object of that number."""
        begin, end = self._begin(number), self.end(number, _END)
        if begin[-1] in end:
            pieces = list(self._pieces([*begin, *end[end.index(begin[-1]) + 1 :]]))
        else:
            pieces = [*self._pieces([*begin]), f"{_ARROW}{_GAP}", *self._pieces(end)]
        return HolderPath.of(self.root_of(number), shortened(pieces))

    def root_of(self, number: int) -> Root:
        """Where that way begins."""
        return self._walk.roots[self._begin(number)[0]][0]

    def _begin(self, number: int) -> tuple[int, ...]:
        new = []
        while number >= 0 and number not in self._begins:
            new.append(number)
            number = self._walk.first[number]
        begin = self._begins[number] if number >= 0 else ()
        for one in reversed(new):
            begin = self._begins[one] = begin if len(begin) == _END else (*begin, one)
        return begin

    def end(self, number: int, most: int) -> list[int]:
        """The last steps of the way to it."""
        steps = [number]
        while len(steps) < most and self._walk.first[steps[-1]] >= 0:
            steps.append(self._walk.first[steps[-1]])
        return steps[::-1]

    def _pieces(self, steps: list[int]) -> Iterator[str]:
        return (piece for piece, _ in self.names.along([self._walk.objects[number] for number in steps]))


def shortened(pieces: list[str]) -> list[str]:
    """A long chain of the graph, or of anything, by its ends."""
    kept: list[str] = []
    at = 0
    while at < len(pieces):
        end = at
        while end < len(pieces) and pieces[end].startswith(_ARROW):
            end += 1
        chain = pieces[at:end]
        kept += chain if len(chain) <= _MOST_ARROWS else [chain[0], f"{_ARROW}{_GAP}", chain[-1]]
        if end < len(pieces):
            kept.append(pieces[end])
        at = end + 1
    half = _MOST_PIECES // 2
    return kept if len(kept) <= _MOST_PIECES else [*kept[:half], _GAP, *(piece for piece in kept[-half:] if _GAP not in piece)]


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The nearest object of a class around what is held."""

    type_names: tuple[str, ...]
    """Of its class and the bases of that."""
    file: str
    """In which the class is written; empty where it is not written in Python."""
    is_users: bool
    """Whether that is the user's own code."""
    attribute: str
    """By which it holds it."""
    path: HolderPath
    """To the object itself."""
    empties: str
    """How to empty it, as one would write it: ``metric.reset()``; empty where its class has no method for that."""


def owner_of(walk: Walk, paths: Paths, number: int) -> Owner | None:
    """Of the object with that number in a walk; None where a variable holds it, with nothing but containers in between."""
    steps = paths.end(number, _MOST_STEPS)
    objects = [walk.objects[step] for step in steps]
    way = list(paths.names.along(objects))
    begins = (0, *(at for _, at in way))
    for at in reversed(range(len(way))):
        if not _is_passed(objects[begins[at]]):
            name = way[at][0].partition("[")[0]  # of an optimizer, `.state['mu']` is one piece
            is_attribute = name.startswith(".") and name[1:].isidentifier()
            return _owner(type(objects[begins[at]]), name, paths.to(steps[begins[at]])) if is_attribute else None
    return None


def _is_passed(value: object) -> bool:
    kind = type(value)
    return is_node(kind) or any(is_a(kind, one) for one in (torch.Tensor, CellType, FrameType, FunctionType, type, *CONTAINERS))


def _owner(kind: Any, name: str, path: HolderPath) -> Owner:
    """An object of that type at that path, by whose attribute `name`, such as ``.rows``, something is held."""
    named = [base for base in bases(kind) if base is not object]
    functions = [one for base in named for one in names_of_type(base).values() if type(one) is FunctionType]
    own = [one for one in names_of_type(kind).values() if type(one) is FunctionType]
    known = {function.__name__: function for function in reversed(functions)}
    empties = (
        f"{path.as_code}.{one}()"
        for one in _EMPTIES
        if one in known and known[one].__code__.co_argcount - len(known[one].__defaults__ or ()) == 1
    )
    return Owner(
        type_names=tuple(base.__name__ for base in named),
        is_users=whose_module(module_of(kind)) == "user",
        file=next((one.__code__.co_filename for one in (*own, *functions)), ""),
        attribute=name[1:],
        path=path,
        empties=next(empties, ""),
    )
