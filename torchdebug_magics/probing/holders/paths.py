"""The way from a root to an object, written as one would in code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.holders.containers import CONTAINERS
from torchdebug_magics.probing.holders.objects import names_in
from torchdebug_magics.probing.holders.outside import bases, is_a, module_of, names_of_type, of_type, whose_module
from torchdebug_magics.probing.holders.tensor_holders import is_node

if TYPE_CHECKING:
    from torchdebug_magics.probing.holders.roots import Root
    from torchdebug_magics.probing.holders.walk import Walk


_ARROW = " -> "
_GAP = "…"
_MOST_ARROWS, _MOST_PIECES = 3, 14
_END = 16
"""How many steps are looked at from each end of a long way."""
_EMPTIES = ("reset", "clear", "clear_memory", "flush")
_MOST_STEPS = 64


class Names:
    """How what an object holds is written behind its name; each holder is asked once."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, str]] = {}
        """By holder and what is held; both are objects of a walk, which stay."""

    def between(self, holder: object, held: object) -> str:
        """By the type of what is held where its place has no name."""
        return self.find(holder, held) or f".<{type(held).__name__}>"

    def find(self, holder: object, held: object) -> str | None:
        """None where the place has no name."""
        if id(holder) not in self._known:
            known: dict[int, str] = {}
            for piece, one in names_in(holder):
                known.setdefault(id(one), piece)
            self._known[id(holder)] = known
        return self._known[id(holder)].get(id(held))


class Paths:
    """The best ways to the objects of a walk; what many of them share is worked out once."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._names = Names()
        self._begins: dict[int, tuple[int, ...]] = {}
        """Of an object, the first steps of the way to it, from the root."""

    def to(self, number: int) -> str:
        """The way to the object of that number, as text."""
        begin, end = self._begin(number), self._end(number)
        label = self.root_of(number).label
        if begin[-1] in end:
            end = end[end.index(begin[-1]) + 1 :]
            return label + "".join(shortened(list(self._pieces([*begin, *end]))))
        return label + "".join(shortened([*self._pieces([*begin]), f"{_ARROW}{_GAP}", *self._pieces(end)]))

    def piece(self, holder: object, held: object) -> str:
        """How what an object holds is written behind its name; empty where its place has no name."""
        return self._names.find(holder, held) or ""

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

    def _end(self, number: int) -> list[int]:
        steps = [number]
        while len(steps) < _END and self._walk.first[steps[-1]] >= 0:
            steps.append(self._walk.first[steps[-1]])
        return steps[::-1]

    def _pieces(self, steps: list[int]) -> Iterator[str]:
        objects = [self._walk.objects[number] for number in steps]
        at = 0
        while at + 1 < len(objects):
            # The dict of its attributes is not written: `loader.cache`, not `loader.__dict__['cache']`.
            through = at + 2 < len(objects) and type(objects[at + 1]) is dict and of_type(CONTAINERS, type(objects[at])) is None
            piece = self._names.find(objects[at], objects[at + 2]) if through else None
            yield self._names.between(objects[at], objects[at + 1]) if piece is None else piece
            at += 1 if piece is None else 2


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
    path: str
    """To the object itself, as one writes it."""
    empties: str
    """A method without arguments that its class has for that, such as ``reset``; empty where it has none."""


def owner_of(walk: Walk, paths: Paths, number: int) -> Owner | None:
    """Of the object with that number in a walk; None where a variable holds it, with nothing but containers in between."""
    held = number
    for _ in range(_MOST_STEPS):
        number, below = walk.first[held], held
        if number < 0:
            return None
        holder = walk.objects[number]
        if not _is_passed(holder):
            name = paths.piece(holder, walk.objects[below])
            return owner_as(type(holder), name, paths.to(number)) if name.startswith(".") and name[1:].isidentifier() else None
        if type(holder) is dict and (up := walk.first[number]) >= 0 and not _is_passed(walk.objects[up]):
            name = paths.piece(walk.objects[up], walk.objects[below])  # the dict of its attributes
            if name.startswith(".") and name[1:].isidentifier():
                return owner_as(type(walk.objects[up]), name, paths.to(up))
        held = number
    return None


def _is_passed(value: object) -> bool:
    kind = type(value)
    return is_node(kind) or any(is_a(kind, one) for one in (torch.Tensor, CellType, FrameType, FunctionType, type, *CONTAINERS))


def owner_as(kind: Any, name: str, path: str) -> Owner:
    """An object of that type at that path, by whose attribute `name`, such as ``.rows``, something is held."""
    named = [base for base in bases(kind) if base is not object]
    functions = [one for base in named for one in names_of_type(base).values() if type(one) is FunctionType]
    own = [one for one in names_of_type(kind).values() if type(one) is FunctionType]
    known = {one.__name__: one for one in reversed(functions)}
    empties = (one for one in _EMPTIES if one in known and known[one].__code__.co_argcount - len(known[one].__defaults__ or ()) == 1)
    return Owner(
        type_names=tuple(base.__name__ for base in named),
        is_users=whose_module(module_of(kind)) == "user",
        file=next((one.__code__.co_filename for one in (*own, *functions)), ""),
        attribute=name[1:],
        path=path,
        empties=next(empties, ""),
    )
