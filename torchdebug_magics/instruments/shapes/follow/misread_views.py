"""Views that read dimensions in another order: one keeps its size, but not its stride, and other numbers are read into it."""

from __future__ import annotations

import ast
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.broadcasts import suspected
from torchdebug_magics.instruments.shapes.repair.source import site_in
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.dry_runs.leaves import sizes
from torchdebug_magics.probing.where import locate

if TYPE_CHECKING:
    from types import FrameType

    from torchdebug_magics.instruments.shapes.repair.source import Site

__all__ = ["misread"]


def misread(name: str, x: torch.Tensor, out: Any, frame: FrameType, module: str | None) -> Failure | None:
    """What is wrong with a view, in words and with the permutation that was meant; None where it moves no dimension."""
    before = [(dim, size) for dim, size in enumerate(x.shape) if size != 1]
    after = [(dim, size) for dim, size in enumerate(out.shape) if size != 1] if isinstance(out, torch.Tensor) else []
    if len(before) < 3 or not after or any(type(size) is not int for _, size in (*before, *after)) or not x.numel():  # noqa: PLR2004
        return None
    order = _order([size for _, size in before], [size for _, size in after])
    if order is None:
        return None
    atoms, moved = order
    (place, size), site = moved, site_in(frame)
    text = site.operand_text(0, x, direct=True)
    of = f"`{text}` of {shape(sizes(x))}" if text else shape(sizes(x))
    mixed = f"dimension {before[place][0]} of size {size} is mixed with others"
    sentence = f"`{name}` reads {of} as {shape(sizes(out))} in memory order: {mixed}"
    return suspected(sentence, name, module, locate(frame), [sizes(x)], [text], _permuted(site, x, [dim for dim, _ in before], atoms))


_Atom = tuple[int, int, int]
"""(place of the dimension before, of the part of it, size) of what a view makes its dimensions of, in the order of the result."""


def _order(before: list[int], after: list[int]) -> tuple[list[_Atom], tuple[int, int]] | None:
    """The parts of the dimensions in the order in which the view's sizes want them, and a dimension that moves; None where none does.

    A view that splits and merges neighbours moves none. One that moves a dimension is told of only where whole sizes explain it.
    """
    atoms: list[_Atom] = []
    moved: tuple[int, int] | None = None
    first = at = 0
    while first < len(before) and at < len(after):
        last, to = first + 1, at + 1
        while (left := math.prod(before[first:last])) != (right := math.prod(after[at:to])):
            last, to = (last + 1, to) if left < right else (last, to + 1)
        found = _block(before[first:last], after[at:to])
        if found is None:
            return None
        parts, place = found
        atoms += [(first + one, part, size) for one, part, size in parts]
        if place is not None and moved is None:
            moved = first + place, before[first + place]
        first, at = last, to
    return None if moved is None else (atoms, moved)


def _block(before: list[int], after: list[int]) -> tuple[list[_Atom], int | None] | None:
    """The same of the fewest neighbours that hold as many numbers on both sides; None where it is unknown."""
    kept = {(size, math.prod(after[at + 1 :])) for at, size in enumerate(after)}
    lost = [at for at, size in enumerate(before) if (size, math.prod(before[at + 1 :])) not in kept and size in after]
    split = _split(list(enumerate(before)), after) if not lost or len(before) == 1 or len(after) == 1 else None
    if split is not None:
        return [atom for part in split for atom in part], None
    if not lost:
        others = _gathered(list(enumerate(before)), after)
        return None if not others else ([(place, 0, before[place]) for part in others for place in part], others[0][0])
    if len(before) == len(after) == 2 and not (max(before) % min(before) and sorted(before) == sorted(after)):  # noqa: PLR2004
        return [], None
    for place in lost:
        to = after.index(before[place])
        rest = _split([(at, size) for at, size in enumerate(before) if at != place], [size for at, size in enumerate(after) if at != to])
        if rest is not None:
            rest.insert(to, [(place, 0, before[place])])
            return [atom for part in rest for atom in part], place
    return [], None


def _gathered(before: list[tuple[int, int]], after: list[int]) -> list[list[int]]:
    """Which whole dimensions, in their order but not as neighbours, make each new one; empty where none do."""
    if not after:
        return [] if before else [[]]
    for many in range(1, len(before) - len(after) + 2):
        for chosen in itertools.combinations(before, many):
            if math.prod(size for _, size in chosen) == after[0]:
                rest = [one for one in before if one not in chosen]
                if len(after) == 1:
                    return [] if rest else [[place for place, _ in chosen]]
                if further := _gathered(rest, after[1:]):
                    return [[place for place, _ in chosen], *further]
    return []


def _split(before: list[tuple[int, int]], after: list[int]) -> list[list[_Atom]] | None:
    """Of which parts of the dimensions each new one is made, where that is by splitting and merging neighbours alone."""
    todo = [(place, 0, size) for place, size in before]
    found: list[list[_Atom]] = []
    for size in after:
        parts: list[_Atom] = []
        left = size
        while left > 1:
            if not todo:
                return None
            place, part, whole = todo.pop(0)
            if left % whole == 0:
                parts.append((place, part, whole))
                left //= whole
            elif whole % left == 0:
                parts.append((place, part, left))
                todo.insert(0, (place, part + 1, whole // left))
                left = 1
            else:
                return None
        found.append(parts)
    return found if not todo else None


def _permuted(site: Site, x: torch.Tensor, dims: list[int], atoms: list[_Atom]) -> list[Fix]:
    """The view of the tensor with its dimensions, or parts of them, in the order that was meant."""
    call = site.expression
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not atoms:
        return []
    of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    node = site.operand_node(0, x, direct=True)
    if node is None or (node is not call.func.value and not of_torch):
        return []
    ordered = sorted(atoms)
    ones = [dim for dim in range(x.dim()) if dim not in dims]
    if ones and len(ordered) > len(dims):
        return []
    turn = [ordered.index(atom) for atom in atoms]
    parts = ""
    if len(ordered) > len(dims):
        whole = {place for place, _, size in ordered if size == x.shape[dims[place]]}
        name = ast.unparse(node)
        parts = f".view({', '.join(f'{name}.size({dims[place]})' if place in whole else str(size) for place, _, size in ordered)})"
    elif ones:
        turn = [*ones, *(dims[place] for place, _, _ in atoms)]
    change = f"{parts}{_turn(turn)}"
    code = site.changed(node, lambda text: f"{text}{change}")
    if not of_torch and call.func.attr == "view":
        code = _as_reshape(code)
    return [Fix(code=code, verified=True, why="the dimensions in the order that the sizes name")]


def _turn(order: list[int]) -> str:
    moved = [dim for dim, old in enumerate(order) if dim != old]
    return f".transpose({moved[0]}, {moved[1]})" if len(moved) == 2 else f".permute({', '.join(map(str, order))})"  # noqa: PLR2004


def _as_reshape(code: str) -> str:
    tree = ast.parse(code, mode="eval")
    if isinstance(tree.body, ast.Call) and isinstance(tree.body.func, ast.Attribute):
        tree.body.func.attr = "reshape"
    return ast.unparse(tree)
