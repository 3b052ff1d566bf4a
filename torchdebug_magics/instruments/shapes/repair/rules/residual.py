"""Two ways through a network that meet again: residual blocks, and skip connections between pictures of several sizes."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn import functional

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Repair, ValueChange, on_operand, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import (
    channels_first,
    comes_from,
    steps,
)

_IMAGES = 4
"""Dimensions."""
_CONVOLUTIONS: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Convolutions by the dimensions of what they take."""


def projected(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """The `nn.Identity`, or the empty `nn.Sequential`, that a residual block keeps for its short way, as a convolution of one pixel.

    That changes the channels and the size.
    """
    x = facts.operands[at]
    own = {path: part for path, part in facts.modules.items() if path and path.rpartition(".")[0] == facts.path}
    kept = [path for path, part in own.items() if isinstance(part, nn.Identity) or (type(part) is nn.Sequential and not len(part))]
    convolution = _CONVOLUTIONS.get(len(x.sizes)) if channels_first(y.made) else None
    if x.made is None or len(kept) != 1 or convolution is None or len(x.sizes) != len(y.sizes) or not comes_from(y.made, x.made):
        return []
    strides = {-(-here // there) for here, there in zip(x.sizes[2:], y.sizes[2:], strict=True) if there}
    if len(strides) != 1 or x.sizes[0] != y.sizes[0]:
        return []
    module = convolution(x.sizes[1], y.sizes[1], 1, stride=strides.pop(), device="meta")
    return rebuilt_module(module, kept[0], rank=rank, why="the skip connection with the shape of the main path")


def resized(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """A picture, interpolated to the size of the other."""
    x = facts.operands[at]
    if len(x.sizes) != _IMAGES or len(y.sizes) != _IMAGES or x.sizes[:2] != y.sizes[:2] or not x.tensor.is_floating_point():
        return []
    return on_operand(facts, at, interpolated(y.name, y.sizes), rank=rank, why=f"{shape(x.sizes[2:])} becomes {shape(y.sizes[2:])}")


def as_large(facts: FailureFacts, x: Operand, y: Operand, *, rank: int = 4) -> list[Repair]:
    """The transposed convolutions that made a picture, whose strides leave several sizes to choose from, so that it is as large as `y`."""
    lacking = {there - here for here, there in zip(x.sizes[2:], y.sizes[2:], strict=False)}
    short = lacking.pop() if len(lacking) == 1 and len(x.sizes) == len(y.sizes) else 0  # the same in each dimension
    edits: list[Repair] = []
    for step in steps(x.made):
        module = facts.modules.get(step.module)
        if short <= 0 or not isinstance(module, nn.modules.conv._ConvTransposeNd) or not step.op.startswith("conv_transpose"):
            continue
        stride, padding = module.stride[0], module.output_padding[0]
        if {*module.stride, *module.dilation} - {stride, 1} or {*module.output_padding} != {padding}:
            return []
        more = short % stride
        short //= stride  # what is lacking behind it, and not made by it, lacked before it
        why = f"leaves {shape(y.sizes[2:])}"
        edits += rebuilt_module(module, step.module, output_padding=int(padding) + more, rank=rank, why=why) if more else []
    return [functools.reduce(together, edits)] if edits and not short else []


def interpolated(name: str, sizes: tuple[int, ...]) -> ValueChange:
    """A change to the height and width of another tensor, which the code calls `name`."""
    return ValueChange(
        lambda x: f"F.interpolate({x}, size={f'{name}.shape[2:]' if name else sizes[2:]})",
        lambda tensor: functional.interpolate(tensor, size=sizes[2:]),
    )
