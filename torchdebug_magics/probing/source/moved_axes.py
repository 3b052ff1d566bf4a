"""Whether a view reads a dimension in another place than it has: ``x.view(-1, channels)`` of a picture, where a permute was meant.

A view splits and merges neighbours: the numbers keep their order in memory. One whose sizes are those of the tensor in another order gives
each dimension the numbers of others, and raises nothing.
"""

from __future__ import annotations

import ast
import itertools
import math
from typing import NamedTuple, TypeAlias

from torchdebug_magics.format import shape
from torchdebug_magics.probing.source.syntax import as_atom, expression, names_in, nodes

_Part: TypeAlias = tuple[int, int, int]
"""(place of the dimension before, of the part of it, size) of what a view makes its dimensions of, in the order of the result."""
_LEAST = 3
"""Dimensions of more than one number: of two, one may be meant for the other."""


class _Written(NamedTuple):
    """How the sizes of a view are written."""

    has_names: bool
    is_computed: bool


class MovedAxis(NamedTuple):
    """A view after which a dimension stands elsewhere."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    dim: int
    """The dimension that moves."""
    dims: tuple[int, ...]
    """Those of more than one number."""
    parts: list[_Part]
    """Of these, in the order that the sizes name; empty where that is unknown."""

    @classmethod
    def of(
        cls, before: tuple[int, ...], after: tuple[int, ...], call: ast.AST | None = None, tree: ast.AST | None = None
    ) -> MovedAxis | None:
        """None where the view only splits and merges neighbours, and where whole sizes do not explain it.

        `call` is that of the view, in `tree`: two sizes of which one divides the other may be meant as they stand, if unnamed.
        """
        dims = tuple(dim for dim, size in enumerate(before) if size != 1)
        old, new = [before[dim] for dim in dims], [size for size in after if size != 1]
        known = all(type(size) is int and size for size in (*before, *after)) and math.prod(before) == math.prod(after)
        order = _order(old, new, _Written(_has_names(call, tree), _is_computed(call))) if known and len(old) >= _LEAST and new else None
        return None if order is None else cls(before, after, dims[order[1]], dims, order[0])

    def sentence(self, op: str, text: str) -> str:
        """What an op does with a tensor of which a text, that may be empty, is given."""
        of = f"`{text}` of {shape(self.before)}" if text else shape(self.before)
        mixed = f"dimension {self.dim} of size {self.before[self.dim]} is mixed with others"
        return f"`{op}` reads {of} as {shape(self.after)} in memory order: {mixed}"

    def permuted(self, call: ast.Call) -> ast.Call | None:
        """The call of the view on the tensor with its dimensions, or parts of them, in the order that was meant."""
        if not isinstance(call.func, ast.Attribute) or not self.parts:
            return None
        of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if of_torch and not call.args:
            return None
        node = call.args[0] if of_torch else call.func.value
        ordered = sorted(self.parts)
        ones = [dim for dim in range(len(self.before)) if dim not in self.dims]
        is_split = len(ordered) > len(self.dims)
        if ones and is_split:
            return None
        turn, view = [ordered.index(part) for part in self.parts], ""
        if is_split:
            whole = {place for place, _, size in ordered if size == self.before[self.dims[place]]}
            names = (f"{ast.unparse(node)}.size({self.dims[place]})" if place in whole else str(size) for place, _, size in ordered)
            view = f".view({', '.join(names)})"
        elif ones:
            turn = [*ones, *(self.dims[place] for place, _, _ in self.parts)]
        turned = expression(f"{as_atom(node)}{view}{_turn(turn)}")
        if of_torch:
            return ast.Call(call.func, [turned, *call.args[1:]], call.keywords)
        name = "reshape" if call.func.attr == "view" else call.func.attr
        return ast.Call(ast.Attribute(turned, name, ast.Load()), call.args, call.keywords)


def _turn(order: list[int]) -> str:
    moved = [dim for dim, old in enumerate(order) if dim != old]
    return f".transpose({moved[0]}, {moved[1]})" if len(moved) == 2 else f".permute({', '.join(map(str, order))})"  # noqa: PLR2004


def _has_names(call: ast.AST | None, tree: ast.AST | None) -> bool:
    """Whether the shape of the tensor was unpacked into these sizes: ``B, T, C = x.shape`` before ``x.view(T, B, C)``."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        return False
    shapes = {f"{ast.unparse(call.func.value)}.{end}" for end in ("shape", "size()")}
    unpacked = [names_in(*node.targets) for node in nodes(ast.Assign, tree) if ast.unparse(node.value) in shapes]
    return any({ast.unparse(argument) for argument in call.args} <= names for names in unpacked)


def _is_computed(call: ast.AST | None) -> bool:
    """Whether a size is computed where it is given, as in ``padded.view(batch, heads, steps + 1, steps)``."""
    sizes = call.args if isinstance(call, ast.Call) else []
    return any(isinstance(size, ast.BinOp) and not isinstance(size.op, ast.Mult) for size in sizes)


def _order(before: list[int], after: list[int], written: _Written) -> tuple[list[_Part], int] | None:
    """The parts of the dimensions in the order in which the view's sizes want them, and a dimension that moves; None where none does."""
    parts: list[_Part] = []
    moved: int | None = None
    first = at = 0
    while first < len(before) and at < len(after):
        last, to = first + 1, at + 1
        while (left := math.prod(before[first:last])) != (right := math.prod(after[at:to])):
            last, to = (last + 1, to) if left < right else (last, to + 1)
        block = _block(before[first:last], after[at:to], written)
        if block is None:
            return None
        parts += [(first + dim, part, size) for dim, part, size in block[0]]
        if block[1] is not None and moved is None:
            moved = first + block[1]
        first, at = last, to
    is_whole = {place for place, _, _ in parts} == set(range(len(before)))
    return None if moved is None else (parts if is_whole else [], moved)


def _block(before: list[int], after: list[int], written: _Written) -> tuple[list[_Part], int | None] | None:
    """What `_order` gives, of the fewest neighbours that hold as many numbers on both sides; None where it is unknown."""
    kept = {(size, math.prod(after[at + 1 :])) for at, size in enumerate(after)}
    lost = [at for at, size in enumerate(before) if (size, math.prod(before[at + 1 :])) not in kept and size in after]
    split = _split(list(enumerate(before)), after) if not lost or len(before) == 1 or len(after) == 1 else None
    if split is not None:
        return [part for group in split for part in group], None
    if not lost:
        others = _gathered(list(enumerate(before)), after)
        return None if not others else ([(place, 0, before[place]) for part in others for place in part], others[0][0])
    is_pair = len(before) == len(after) == 2  # noqa: PLR2004 - two are exchanged, or one is split
    if is_pair and not (sorted(before) == sorted(after) and not written.is_computed and (written.has_names or max(before) % min(before))):
        return [], None
    if lost and sorted(before) == sorted(after):
        order = _exchanged(before, after)
        return [(place, 0, before[place]) for place in order], next(place for at, place in enumerate(order) if at != place)
    for place in () if written.is_computed else lost:
        to = after.index(before[place])
        rest = _split([(at, size) for at, size in enumerate(before) if at != place], [size for at, size in enumerate(after) if at != to])
        if rest is not None:
            rest.insert(to, [(place, 0, before[place])])
            return [part for group in rest for part in group], place
    return [], None


def _exchanged(before: list[int], after: list[int]) -> list[int]:
    """The places before of the same sizes in another order; of equal ones, the first goes first."""
    left = list(range(len(before)))
    order: list[int] = []
    for size in after:
        place = next(place for place in left if before[place] == size)
        left.remove(place)
        order.append(place)
    return order


def _gathered(before: list[tuple[int, int]], after: list[int]) -> list[list[int]]:
    """Which whole dimensions, in their order but not as neighbours, make each new one; empty where none do."""
    if not after:
        return [] if before else [[]]
    for many in range(1, len(before) - len(after) + 2):
        for chosen in itertools.combinations(before, many):
            if math.prod(size for _, size in chosen) == after[0]:
                rest = [dim for dim in before if dim not in chosen]
                if len(after) == 1:
                    return [] if rest else [[place for place, _ in chosen]]
                if further := _gathered(rest, after[1:]):
                    return [[place for place, _ in chosen], *further]
    return []


def _split(before: list[tuple[int, int]], after: list[int]) -> list[list[_Part]] | None:
    """The parts of the dimensions of which each new one is made, where that is by splitting and merging neighbours alone."""
    todo = [(place, 0, size) for place, size in before]
    groups: list[list[_Part]] = []
    for size in after:
        parts: list[_Part] = []
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
        groups.append(parts)
    return groups if not todo else None
