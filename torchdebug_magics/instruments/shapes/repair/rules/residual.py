"""Two ways through a network that meet again: residual blocks, and skip connections between pictures of several sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, as_typed, on_operand
from torchdebug_magics.instruments.shapes.repair.history import comes_from, maker, of_inputs
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.parts import interpolated

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.facts import Facts, Operand

__all__ = ["from_another_level", "projected", "resized", "strided"]

_IMAGES = 4
"""Dimensions."""
_NEXT_LEVEL = 1.5
"""How many times larger a picture of another level is, at least."""


def strided(facts: Facts, one: Operand, other: Operand) -> list[Edit]:
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


def from_another_level(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
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
    if _is_rounded(one, other):
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


def _is_rounded(one: Operand, other: Operand) -> bool:
    """Whether they are of one level, and differ by the rounding of an odd size."""
    pairs = zip(one.sizes[2:], other.sizes[2:], strict=True)
    return one.sizes[1] == other.sizes[1] and all(max(pair) < _NEXT_LEVEL * min(pair) for pair in pairs)


def projected(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    """The short way of a residual block, through a convolution of one pixel that changes channels and size.

    An `nn.Identity`, or an empty `nn.Sequential`, that the block keeps for this way becomes that convolution.
    """
    one = facts.operands[at]
    if len(one.sizes) != _IMAGES or len(other.sizes) != _IMAGES or one.sizes[0] != other.sizes[0] or one.sizes[1] == other.sizes[1]:
        return []
    if one.made is None or not comes_from(other.made, one.made):
        return []
    strides = {-(-here // there) for here, there in zip(one.sizes[2:], other.sizes[2:], strict=True) if there}
    stride = strides.pop() if len(strides) == 1 else 0
    if not stride or any(-(-here // stride) != there for here, there in zip(one.sizes[2:], other.sizes[2:], strict=True)):
        return []
    kept = [(path, part) for path, part in facts.modules.items() if path.rpartition(".")[0] == facts.path and _is_idle(part)]
    if len(kept) == 1:
        with torch.device("meta"):
            convolution = nn.Conv2d(one.sizes[1], other.sizes[1], 1, stride=stride)
        return rebuilt_module(convolution, kept[0][0], rank=rank, why="the short way as wide and as large as the long one")
    made = f"nn.Conv2d({one.sizes[1]}, {other.sizes[1]}, 1{f', stride={stride}' if stride > 1 else ''})"
    change = Change(lambda x: f"self.shortcut({x})", lambda tensor: tensor.new_zeros(other.sizes))
    edits = on_operand(facts, at, change, rank=rank, why="the short way as wide and as large as the long one")
    place = as_typed(f"{facts.path}.shortcut" if facts.path else "shortcut")
    return [replace(edit, code=f"{place} = {made}\n{edit.code}", many=2) for edit in edits if edit.ops]


def _is_idle(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity) or (type(module) is nn.Sequential and not len(module))


def resized(facts: Facts, at: int, other: Operand, rank: int) -> list[Edit]:
    """A picture, interpolated to the size of the other."""
    one = facts.operands[at]
    if len(one.sizes) != _IMAGES or len(other.sizes) != _IMAGES or one.sizes[:2] != other.sizes[:2] or not one.tensor.is_floating_point():
        return []
    return on_operand(
        facts, at, interpolated(other.name, other.sizes), rank=rank, why=f"{shape(one.sizes[2:])} becomes {shape(other.sizes[2:])}"
    )
