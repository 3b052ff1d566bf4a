"""Elementwise ops: sizes that are to be equal, or one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, as_typed, method, on_operand, parameter_edit
from torchdebug_magics.instruments.shapes.repair.history import came_from, comes_from, maker, of_inputs
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.inputs import shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.parts import Diagnosis, interpolated, orders, padded, producer_edits, shown, turned

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.facts import Facts, Operand

__all__ = ["broadcast", "clashes"]

_IMAGES = 4


def clashes(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    """Where two shapes do not broadcast, counted from the end: -1 is the last dimension."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return [-1 - at for at, (one, other) in enumerate(pairs) if one != other and 1 not in {one, other}]


def broadcast(facts: Facts) -> Diagnosis | None:
    """Any op of which two operands do not fit; asked last of all, as it looks at shapes alone."""
    if facts.op is None or facts.op.startswith("__get") or not _is_about_sizes(facts.text):
        return None
    pair = _pair(facts)
    if pair is None:
        return None
    a, b = pair
    one, other = facts.operands[a], facts.operands[b]
    dims = clashes(one.sizes, other.sizes)
    at = dims[0]
    text = (
        f"`{facts.site.text}`"
        if facts.site is not None and facts.site.text and facts.direct and len(facts.site.text) <= 60
        else f"`{facts.op.strip('_')}`"
    )
    where = f" in `{facts.path}`" if facts.path and not (facts.site is not None and facts.direct) else ""
    sizes = f"{one.sizes[at]} and {other.sizes[at]} in {_place(at, len(one.sizes), len(other.sizes))}"
    sentence = f"{text}{where} does not fit {_told(one)} to {_told(other)}: {sizes}"
    table, other_size = (one, other.sizes[at]) if not of_inputs(one.made) else (other, one.sizes[at])
    long = too_long(facts, other_size, table.sizes[at]) if not of_inputs(table.made) else ""
    sentence += f": {long}" if long else ""
    culprit, computed = other if one.made is None else one, of_inputs(one.made) and of_inputs(other.made)
    return Diagnosis(
        sentence, tuple(_edits(facts, a, b)), culprit, None if computed else (one.sizes[at], other.sizes[at]), rounded=computed
    )


def _is_about_sizes(text: str) -> bool:
    return any(
        word in text for word in ("must match the size of tensor", "broadcast", "match the existing size", "must match the existing")
    )


def _place(at: int, many: int, others: int) -> str:
    if at == -1:
        return "the last dimension"
    return f"dimension {at + many}" if many == others else f"dimension {at}"


def _told(one: Operand) -> str:
    source = came_from(one.made)
    named = shown(one)
    return f"{named}{f' ({source})' if source and (not one.name or one.name not in source) else ''}"


def _pair(facts: Facts) -> tuple[int, int] | None:
    every = range(len(facts.operands))
    return next(((a, b) for a in every for b in every if a < b and clashes(facts.operands[a].sizes, facts.operands[b].sizes)), None)


def _edits(facts: Facts, a: int, b: int) -> list[Edit]:
    edits: list[Edit] = []
    for at, to in ((b, a), (a, b)):
        one, other = facts.operands[at], facts.operands[to]
        later = 0 if at == b else 1
        edits += _spread(facts, at, other, 4 + later)
        edits += _moved(facts, at, other, 8 + later)
        edits += _squeezed(facts, at, other, 6 + later)
        if one.owned:
            edits += _sized(one, other)
        edits += _strided(facts, one, other)
        edits += padded(facts, one, other)
        edits += _another(facts, at, other, 7 + later)
        edits += _projected(facts, at, other, 9 + later)
        edits += _pictures(facts, at, other, 14 + later)
        edits += _cut(facts, at, other, 30 + later)
        dims = clashes(one.sizes, other.sizes)
        if len(dims) == 1 and not of_inputs(one.made):  # a table of positions
            edits += shortened(facts, other.sizes[dims[0]], one.sizes[dims[0]], rank=18)
        if len(dims) == 1:
            edits += producer_edits(facts, one, one.sizes[dims[0]], other.sizes[dims[0]], rank=20 + later)
    return edits


def _spread(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    """A dimension of one put where the other has one more."""
    one = facts.operands[at]
    lacking = len(other.sizes) - len(one.sizes)
    if lacking == 1 and one.sizes:
        places = [dim for dim in range(1, len(one.sizes) + 1) if _fits((*one.sizes[:dim], 1, *one.sizes[dim:]), other.sizes)]
        return [
            edit
            for dim in places[:2]
            for edit in on_operand(facts, at, method("unsqueeze", -1 if dim == len(one.sizes) else dim), rank=rank)
        ]
    if lacking < 1 or not one.sizes:
        return []
    edits: list[Edit] = []
    many = len(other.sizes)
    # Rows to rows and columns to columns, where there is a choice.
    for kept in sorted(itertools.combinations(range(many), len(one.sizes)), key=lambda kept: (0 not in kept, many - 1 not in kept)):
        index = tuple(slice(None) if dim in kept else None for dim in range(len(other.sizes)))
        sizes = iter(one.sizes)
        if _fits(tuple(next(sizes) if dim in kept else 1 for dim in range(len(other.sizes))), other.sizes):
            text = ", ".join(":" if part is not None else "None" for part in index)
            edits += on_operand(facts, at, _subscript(text, index), rank=rank)
    return edits[:2]


def _subscript(text: str, index: tuple[slice | None, ...]) -> Change:
    return Change(lambda x: f"{x}[{text}]", lambda tensor: tensor[index])


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(here in {1, there} for here, there in zip(one, other, strict=True))


def _moved(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    one = facts.operands[at]
    if len(one.sizes) != len(other.sizes) or len(one.sizes) > 5:
        return []
    found = (order for order in orders(len(one.sizes)) if not clashes(tuple(one.sizes[dim] for dim in order), other.sizes))
    order = next((order for order in found if order[0] == 0 or sorted(one.sizes) == sorted(other.sizes)), None)
    return turned(facts, at, order, rank=rank) if order is not None else []


def _squeezed(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    one = facts.operands[at]
    found = [dim for dim, size in enumerate(one.sizes) if size == 1 and (*one.sizes[:dim], *one.sizes[dim + 1 :]) == other.sizes]
    return [edit for dim in found[:1] for edit in on_operand(facts, at, method("squeeze", dim), rank=rank)]


def _sized(one: Operand, other: Operand) -> list[Edit]:
    """The user's own parameter, as long as what it meets; where it broadcasts, it goes on doing so."""
    sizes = list(one.sizes)
    for dim in clashes(one.sizes, other.sizes):
        sizes[dim] = other.sizes[dim]
    return parameter_edit(one, tuple(sizes), rank=12)


def _strided(facts: Facts, one: Operand, other: Operand) -> list[Edit]:
    """A convolution beside another one that strides, as on the short way of a residual block."""
    step = maker(one.made)
    module = facts.modules.get(step.module) if step is not None else None
    if step is None or not isinstance(module, nn.modules.conv._ConvNd) or module.transposed or len(one.sizes) != len(other.sizes):
        return []
    ratios = {here / there for here, there in zip(one.sizes[2:], other.sizes[2:], strict=True) if there}
    ratio = round(ratios.pop()) if len(ratios) == 1 else 0
    if ratio < 2 or len(set(module.stride)) != 1:
        return []
    return rebuilt_module(module, step.module, stride=module.stride[0] * ratio, rank=5, why="strides as the other way does")


def _another(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    """The one other picture among the user's variables that has the wanted shape: a skip connection from the wrong level."""
    one, site = facts.operands[at], facts.site
    if (
        len(one.sizes) != _IMAGES
        or len(other.sizes) != _IMAGES
        or site is None
        or facts.op is None
        or not facts.direct
        or not of_inputs(one.made)
    ):
        return []
    found = {
        name: value
        for name, value in site.names.items()
        if isinstance(value, torch.Tensor) and tuple(value.shape) == other.sizes and value is not other.tensor and name.isidentifier()
    }
    if len(found) != 1 or one.name not in site.names:
        return []
    name, value = found.popitem()
    change = Change(lambda _: name, lambda tensor: tensor.new_zeros(value.shape))
    return on_operand(facts, at, change, rank=rank, why=f"`{name}` is {shape(other.sizes)}")


def _projected(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    """The short way of a residual block, through a convolution of one pixel that changes channels and size."""
    one = facts.operands[at]
    if len(one.sizes) != _IMAGES or len(other.sizes) != _IMAGES or one.sizes[0] != other.sizes[0] or one.sizes[1] == other.sizes[1]:
        return []
    if one.made is None or not comes_from(other.made, one.made):
        return []
    strides = {-(-here // there) for here, there in zip(one.sizes[2:], other.sizes[2:], strict=True) if there}
    stride = strides.pop() if len(strides) == 1 else 0
    if not stride or any(-(-here // stride) != there for here, there in zip(one.sizes[2:], other.sizes[2:], strict=True)):
        return []
    made = f"nn.Conv2d({one.sizes[1]}, {other.sizes[1]}, 1{f', stride={stride}' if stride > 1 else ''})"
    change = Change(lambda x: f"self.shortcut({x})", lambda tensor: tensor.new_zeros(other.sizes))
    edits = on_operand(facts, at, change, rank=rank, why="the short way as wide and as large as the long one")
    place = as_typed(f"{facts.path}.shortcut" if facts.path else "shortcut")
    return [replace(edit, code=f"{place} = {made}\n{edit.code}", many=2) for edit in edits if edit.ops]


def _pictures(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    one = facts.operands[at]
    if len(one.sizes) != _IMAGES or len(other.sizes) != _IMAGES or one.sizes[:2] != other.sizes[:2] or not one.tensor.is_floating_point():
        return []
    return on_operand(
        facts, at, interpolated(other.name, other.sizes), rank=rank, why=f"{shape(one.sizes[2:])} becomes {shape(other.sizes[2:])}"
    )


def _cut(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    one = facts.operands[at]
    dims = clashes(one.sizes, other.sizes)
    if len(one.sizes) == len(other.sizes) and -len(one.sizes) in dims:  # rows of the batch are not thrown away
        return []
    if of_inputs(one.made) or any(one.sizes[dim] < other.sizes[dim] for dim in dims):
        return []
    if one.owned:
        if -1 in dims or not isinstance(one.tensor, torch.nn.Parameter):  # features are not thrown away
            return []
        # As long as each sequence; but a picture is as large as the model is made for.
        steps = [tensor.shape[1] for _, tensor in facts.inputs if tensor.dim() in {2, 3}]
        rank = 11 if all(other.sizes[dim] in steps for dim in dims) else 13
    ends = tuple(slice(other.sizes[dim]) if dim in dims else slice(None) for dim in range(-len(one.sizes), 0))
    name = other.name if other.name.isidentifier() else ""
    texts = [_end(end, name, dim - len(one.sizes)) for dim, end in enumerate(ends)]
    while texts[-1] == ":":
        texts.pop()
    return on_operand(facts, at, _subscript(", ".join(texts), ends), rank=rank, why="as much of it as is needed", owned=True)


def _end(end: slice, name: str, dim: int) -> str:
    if end.stop is None:
        return ":"
    return f":{name}.size({dim})" if name else f":{end.stop}"
