"""Two ways through a network that meet again: residual blocks, and skip connections between pictures of several sizes."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Repair, ValueChange, as_typed, on_operand, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import channels_first, comes_from, features_last, makers, of_inputs, steps
from torchdebug_magics.probing.source.syntax import names_in

_IMAGES = 4
"""Dimensions."""
_CONVOLUTIONS: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Convolutions by the dimensions of what they take."""
_DEEP = 2
"""Layers of a long way that make a short one worth a layer of its own; a single one would be made to fit."""
_NEXT_LEVEL = 1.5
"""How many times larger a picture of another level is, at least; less is the rounding of an odd size."""


def from_another_level(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """The one other picture among the user's variables that has the wanted shape: a skip connection from the wrong level."""
    x, site = facts.operands[at], facts.site
    if site is None or not facts.direct or {len(x.sizes), len(y.sizes)} != {_IMAGES} or x.name not in site.names or not of_inputs(x.made):
        return []
    is_rounded = all(max(pair) < _NEXT_LEVEL * min(pair) for pair in zip(x.sizes[2:], y.sizes[2:], strict=True))
    used = names_in(site.expression)  # what the other operand is computed of is no skip connection
    tensors = {name: value for name, value in site.names.items() if isinstance(value, torch.Tensor) and name not in used}
    fitting = [name for name, value in tensors.items() if tuple(value.shape) == y.sizes and value is not y.tensor]
    if len(fitting) != 1 or (is_rounded and x.sizes[1] == y.sizes[1]):
        return []
    change = ValueChange(lambda _: fitting[0], lambda tensor: tensor.new_zeros(y.sizes))
    return on_operand(facts, at, change, rank=rank, why=f"`{fitting[0]}` is {shape(y.sizes)}")


def projected(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """The short way of a residual block, through a Linear, or a convolution of one pixel, that changes features and size.

    An `nn.Identity`, or an empty `nn.Sequential`, that the block keeps for this way becomes that layer.
    """
    x, module = facts.operands[at], None
    if x.made is None or len(x.sizes) != len(y.sizes) or not comes_from(y.made, x.made) or x.sizes[0] != y.sizes[0]:
        return []
    if channels_first(y.made) and (convolution := _CONVOLUTIONS.get(len(x.sizes))) and x.sizes[1] != y.sizes[1]:
        strides = {-(-here // there) for here, there in zip(x.sizes[2:], y.sizes[2:], strict=True) if there}
        if len(strides) == 1:
            module = convolution(x.sizes[1], y.sizes[1], 1, stride=strides.pop(), device="meta")
    elif len(x.sizes) in {2, 3} and x.sizes[:-1] == y.sizes[:-1] and x.sizes[-1] != 1 and features_last(y.made):
        long_way = list(itertools.takewhile(lambda step: step is not x.made, makers(y.made)))
        module = nn.Linear(x.sizes[-1], y.sizes[-1], device="meta") if len(long_way) >= _DEEP else None
    own = {path: part for path, part in facts.modules.items() if path and path.rpartition(".")[0] == facts.path}
    kept = [path for path, part in own.items() if isinstance(part, nn.Identity) or (type(part) is nn.Sequential and not len(part))]
    why = "the skip connection with the shape of the main path"
    if module is None or len(kept) > 1:
        return []
    return rebuilt_module(module, kept[0], rank=rank, why=why) if kept else _with_shortcut(facts, at, module, y, rank, why)


def _with_shortcut(facts: FailureFacts, at: int, module: nn.Module, y: Operand, rank: int, why: str) -> list[Repair]:
    """The short way through a new layer, and through nothing in the other blocks of the same kind."""
    like = [as_typed(path) for path, part in facts.modules.items() if type(part) is type(facts.module) and part is not facts.module]
    others = "".join(f"{path}.shortcut = nn.Identity()\n" for path in like)

    def differs(args: Any) -> bool:
        return len({tuple(argument.shape) for argument in args if isinstance(argument, torch.Tensor)}) > 1

    change = ValueChange(lambda x: f"self.shortcut({x})", lambda tensor: tensor.new_zeros(y.sizes))
    return [
        replace(edit, code=f"{others}{made.code}\n{edit.code}", many=2, ops=(replace(op, run=run),))
        for edit in on_operand(facts, at, change, rank=rank, why=why)
        for op in edit.ops
        for run in [lambda func, args, kwargs, op=op: op.run(func, args, kwargs) if differs(args) else func(*args, **kwargs)]
        for made in rebuilt_module(module, f"{facts.path}.shortcut".lstrip("."))
    ]


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
