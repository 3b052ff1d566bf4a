"""Whose attribute or variable it is by which something is held: the type of the object, the name, and a method that empties it."""

from __future__ import annotations

from dataclasses import dataclass
from types import CellType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.holders.containers import CONTAINERS
from torchdebug_magics.probing.holders.outside import bases, is_a, module_of, names_of_type, whose_module
from torchdebug_magics.probing.holders.tensor_holders import is_node

if TYPE_CHECKING:
    from torchdebug_magics.probing.holders.paths import Paths
    from torchdebug_magics.probing.holders.walk import Walk

__all__ = ["Owner", "owner_as", "owner_of"]

_EMPTIES = ("reset", "clear", "clear_memory", "flush")
_MOST_STEPS = 64


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
