"""``torch.cat`` and ``torch.stack``: sizes that differ where they are to be equal."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand, parameter_edit
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand
from torchdebug_magics.instruments.shapes.repair.rules.residual import interpolated, is_rounded, padded
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, orders, producer_edits, rewritten, shown, turned
from torchdebug_magics.instruments.shapes.repair.size_history import TURNS, comes_from, of_inputs
from torchdebug_magics.probing.syntax import expression

_CATS = frozenset({"cat", "concat", "concatenate"})
_IMAGES = (4, 5)


def join(facts: Facts) -> Diagnosis | None:
    """Either."""
    if facts.op not in {*_CATS, "stack"} or not facts.operands:
        return None
    if len({one.tensor.device for one in facts.operands}) > 1:
        return None
    parts = facts.operands
    many = {len(one.sizes) for one in parts}
    told = ", ".join(shown(one) for one in parts[:4])
    if facts.op == "stack":
        return _stack(facts, told)
    dim = _dim(facts)
    if len(many) > 1:
        sentence = f"`torch.cat` needs tensors with the same number of dimensions, gets {told}"
        return Diagnosis(sentence, tuple(_dimensions(facts, dim)), parts[-1])
    places = len(parts[0].sizes)
    if not -places <= dim < places:
        sentence = f"`torch.cat` joins along dimension {dim}, and {told} have {places}"
        return Diagnosis(sentence, tuple(_other_dims(facts, places, dim)), parts[0])
    wrong = [at for at in range(places) if at != dim % places and len({one.sizes[at] for one in parts}) > 1]
    if not wrong:
        return None
    sizes = " and ".join(dict.fromkeys(str(one.sizes[wrong[0]]) for one in parts))
    sentence = f"`torch.cat` along dimension {dim} expects all other sizes equal, and dimension {wrong[0]} is {sizes}: {told}"
    return Diagnosis(sentence, tuple(_sizes(facts, dim, wrong)), _odd(parts, wrong[0]), rounded=all(of_inputs(one.made) for one in parts))


def _dim(facts: Facts) -> int:
    dim = facts.kwargs.get("dim", facts.kwargs.get("axis", facts.args[1] if len(facts.args) > 1 else 0))
    return dim if isinstance(dim, int) else 0


def _odd(parts: tuple[Operand, ...], at: int) -> Operand:
    """The one that differs from the first."""
    return next((one for one in parts if one.sizes[at] != parts[0].sizes[at]), parts[-1])


def _dimensions(facts: Facts, dim: int) -> list[Edit]:
    edits: list[Edit] = []
    most = max(len(one.sizes) for one in facts.operands)
    whole = next(one for one in facts.operands if len(one.sizes) == most)
    few = [(at, one) for at, one in enumerate(facts.operands) if len(one.sizes) == most - 1]
    if len(few) == 1:
        at, one = few[0]
        for place in range(most):
            sizes = (*one.sizes[:place], 1, *one.sizes[place:])
            differ = [k for k, (here, there) in enumerate(zip(sizes, whole.sizes, strict=True)) if here != there and k != dim % most]
            if not differ:
                edits += on_operand(facts, at, method("unsqueeze", place), rank=4)
            elif differ == [place] and place:
                edits += _repeated(facts, at, place, whole)
    for at, one in enumerate(facts.operands):
        if len(one.sizes) == most and most > min(len(other.sizes) for other in facts.operands) == 2:
            edits += on_operand(facts, at, method("flatten", 1), rank=8)
    return edits


def _repeated(facts: Facts, at: int, place: int, whole: Operand) -> list[Edit]:
    """One for all: the same at every step, or every point."""
    sizes = tuple(size if dim == place else -1 for dim, size in enumerate(whole.sizes))
    size = f"{whole.name}.size({place})" if whole.name.isidentifier() else str(whole.sizes[place])
    told = ", ".join(size if dim == place else "-1" for dim in range(len(sizes)))
    change = Change(lambda x: f"{x}.unsqueeze({place}).expand({told})", lambda one: one.unsqueeze(place).expand(sizes))
    return on_operand(facts, at, change, rank=6, why="the same for each")


def _other_dims(facts: Facts, places: int, dim: int) -> list[Edit]:
    edits: list[Edit] = []
    for at in range(places - 1, -1, -1):
        same = all(len({one.sizes[k] for one in facts.operands}) == 1 for k in range(places) if k != at)
        if same and at != dim % max(places, 1):
            edits += _along(facts, -1 if at == places - 1 and places > 1 else at, rank=3)
    return edits


def _along(facts: Facts, dim: int, *, rank: int) -> list[Edit]:
    """The same call with another ``dim``."""

    def write(call: ast.Call) -> ast.expr | str:
        rest = [ast.keyword(one.arg, one.value) for one in call.keywords if one.arg not in {"dim", "axis"}]
        number = expression(str(dim))
        return ast.Call(call.func, call.args[:1], [*rest, ast.keyword("dim", number)]) if call.args else ""

    return rewritten(facts, write, lambda func, args, _: func(args[0], dim=dim), rank=rank)


def _sizes(facts: Facts, dim: int, wrong: list[int]) -> list[Edit]:
    parts = facts.operands
    places = len(parts[0].sizes)
    edits = _other_dims(facts, places, dim)
    if places in _IMAGES and all(at > 1 for at in wrong) and len(parts) == 2:
        # What was made later is fitted to what it is joined with: a picture on its way up to one on the way down.
        later = 1 if parts[0].made is not None and comes_from(parts[1].made, parts[0].made) else 0
        for at, (one, other) in enumerate(((parts[0], parts[1]), (parts[1], parts[0]))):
            edits += on_operand(
                facts,
                at,
                interpolated(other.name, other.sizes),
                rank=6 if at == later else 7,
                why=f"{shape(one.sizes[2:])} becomes {shape(other.sizes[2:])}",
            )
            if is_rounded(one, other) and all(here >= there for here, there in zip(one.sizes[2:], other.sizes[2:], strict=True)):
                edits += _cut(facts, at, other.sizes, rank=10)
    if len(wrong) == 1:
        at = wrong[0]
        for place, one in enumerate(parts):
            other = parts[1 - place] if len(parts) == 2 else parts[0]
            if one.sizes[at] == 1 and other.sizes[at] > 1:
                edits += on_operand(facts, place, _expanded(other, at), rank=5, why="the same for each", owned=True)
            edits += producer_edits(facts, one, one.sizes[at], other.sizes[at]) if at else []
            edits += parameter_edit(one, (*one.sizes[:at], other.sizes[at], *one.sizes[at + 1 :]), rank=12) if at else []
    edits += [edit for one in parts for edit in padded(facts, one, parts[0] if one is not parts[0] else parts[-1])]
    if len(wrong) == 1:
        for place in range(len(parts)):
            other = parts[1 - place] if len(parts) == 2 else parts[0]
            edits += _turned_to(facts, place, other, dim)
    return edits


def _expanded(like: Operand, dim: int) -> Change:
    """A dimension of one, as long as that of another tensor."""
    many, size = len(like.sizes), like.sizes[dim]
    told = f"{like.name}.size({dim})" if like.name.isidentifier() else str(size)
    text = ", ".join(told if place == dim else "-1" for place in range(many))
    return Change(lambda x: f"{x}.expand({text})", lambda one: one.expand([size if place == dim else -1 for place in range(many)]))


def _turned_to(facts: Facts, place: int, other: Operand, dim: int) -> list[Edit]:
    one = facts.operands[place]
    many = len(one.sizes)
    if one.made is not None and one.made.op in TURNS:  # as it stands, it was turned on purpose
        return []
    for order in orders(many):
        sizes = [one.sizes[at] for at in order]
        if order != tuple(range(many)) and all(
            here == there for at, (here, there) in enumerate(zip(sizes, other.sizes, strict=True)) if at != dim % many
        ):
            return turned(facts, place, order, rank=8)
    return []


def _cut(facts: Facts, at: int, sizes: tuple[int, ...], *, rank: int) -> list[Edit]:
    cut = ", ".join([":", ":", *(f":{size}" for size in sizes[2:])])
    ends = (slice(None), slice(None), *(slice(size) for size in sizes[2:]))
    return on_operand(facts, at, Change(lambda x: f"{x}[{cut}]", lambda one: one[ends]), rank=rank, why="cut at the edge")


def _stack(facts: Facts, told: str) -> Diagnosis | None:
    parts = facts.operands
    if len({one.sizes for one in parts}) <= 1:
        return None
    if edits := _as_the_others(facts):
        return Diagnosis(f"`torch.stack` expects equal shapes, gets {told}", tuple(edits), parts[-1])
    for dim in range(len(parts[0].sizes)):
        same = {(*one.sizes[:dim], *one.sizes[dim + 1 :]) for one in parts}
        if len(same) == 1 and len({len(one.sizes) for one in parts}) == 1:
            why = "joined along the dimension in which they differ"
            edits += rewritten(facts, partial(_as_cat, dim), _cat_along(dim), rank=8, why=why)
    return Diagnosis(f"`torch.stack` expects equal shapes, gets {told}", tuple(edits), parts[-1])


def _as_the_others(facts: Facts) -> list[Edit]:
    """What made the one part that is not as wide as all the others."""
    parts = facts.operands
    usual, many = Counter(one.sizes for one in parts).most_common(1)[0]
    odd = [one for one in parts if one.sizes != usual]
    if many < 2 or len(odd) != 1 or not usual or odd[0].sizes[:-1] != usual[:-1]:
        return []
    return producer_edits(facts, odd[0], odd[0].sizes[-1], usual[-1], rank=4)


def _as_cat(dim: int, call: ast.Call) -> str:
    return f"torch.cat({ast.unparse(call.args[0])}, dim={dim})" if call.args else ""


def _cat_along(dim: int) -> Callable[[Any, Any, Any], Any]:
    return lambda _, args, __: torch.cat(args[0], dim=dim)
