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
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, ValueChange, as_typed, on_operand, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import (
    channels_first,
    comes_from,
    every_step,
    features_last,
    maker,
    makers,
    steps,
)

_IMAGES = 4
"""Dimensions."""
_CONVOLUTIONS: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Convolutions by the dimensions of what they take."""
_DEEP = 2
"""Layers of a long way that make a short one worth a layer of its own; a single one would be made to fit."""


def as_large(facts: FailureFacts, x: Operand, y: Operand, *, rank: int = 4) -> list[Repair]:
    """The convolutions that made one picture, made otherwise, so that they leave it as large as the other."""
    return [*padded(facts, x, y), *_stretched(facts, x, y, rank=rank)]


def strided(facts: FailureFacts, x: Operand, y: Operand) -> list[Repair]:
    """A convolution beside another one that strides, as on the short way of a residual block."""
    step = maker(x.made)
    module = facts.modules.get(step.module) if step is not None else None
    if step is None or not isinstance(module, nn.modules.conv._ConvNd) or module.transposed or len(x.sizes) != len(y.sizes):
        return []
    ratios = {here / there for here, there in zip(x.sizes[2:], y.sizes[2:], strict=True) if there}
    ratio = round(ratios.pop()) if len(ratios) == 1 else 0
    if ratio < 2 or len(set(module.stride)) != 1:
        return []
    return rebuilt_module(module, step.module, stride=module.stride[0] * ratio, rank=5, why="the stride of the other path")


def projected(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """The short way of a residual block, through a convolution of one pixel that changes channels and size.

    An `nn.Identity`, or an empty `nn.Sequential`, that the block keeps for this way becomes that convolution.
    """
    x = facts.operands[at]
    if x.made is None or len(x.sizes) != len(y.sizes) or not comes_from(y.made, x.made):
        return []
    convolution = _CONVOLUTIONS.get(len(x.sizes)) if channels_first(y.made) else None
    if convolution is None and len(x.sizes) in {2, 3} and x.sizes[:-1] == y.sizes[:-1] and x.sizes[-1] != 1:
        if not features_last(y.made) or len(list(itertools.takewhile(lambda step: step is not x.made, makers(y.made)))) < _DEEP:
            return []
        return _through(facts, at, nn.Linear(x.sizes[-1], y.sizes[-1], device="meta"), y, rank)
    if convolution is None or x.sizes[0] != y.sizes[0] or x.sizes[1] == y.sizes[1]:
        return []
    strides = {-(-here // there) for here, there in zip(x.sizes[2:], y.sizes[2:], strict=True) if there}
    stride = strides.pop() if len(strides) == 1 else 0
    if not stride or any(-(-here // stride) != there for here, there in zip(x.sizes[2:], y.sizes[2:], strict=True)):
        return []
    return _through(facts, at, convolution(x.sizes[1], y.sizes[1], 1, stride=stride, device="meta"), y, rank)


def _through(facts: FailureFacts, at: int, module: nn.Module, y: Operand, rank: int) -> list[Repair]:
    """The short way through this module: in the place of one that does nothing, or as a new one."""
    why = "the skip connection with the shape of the main path"
    own = {path: part for path, part in facts.modules.items() if path.rpartition(".")[0] == facts.path and path}
    kept = [path for path, part in own.items() if isinstance(part, nn.Identity) or (type(part) is nn.Sequential and not len(part))]
    if len(kept) == 1:
        return rebuilt_module(module, kept[0], rank=rank, why=why)
    place = f"{facts.path}.shortcut" if facts.path else "shortcut"
    like = [as_typed(path) for path, part in facts.modules.items() if type(part) is type(facts.module) and part is not facts.module]
    others = "".join(f"{path}.shortcut = nn.Identity()\n" for path in like)
    change = ValueChange(lambda x: f"self.shortcut({x})", lambda tensor: tensor.new_zeros(y.sizes))
    return [
        replace(edit, code=f"{others}{made.code}\n{edit.code}", many=2, ops=tuple(map(_where_it_differs, edit.ops)))
        for edit in on_operand(facts, at, change, rank=rank, why=why)
        for made in rebuilt_module(module, place)
        if edit.ops
    ]


def _where_it_differs(edit: OpEdit) -> OpEdit:
    """The line may stand in several blocks: where the two ways fit, the short one goes through nothing."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        fits = len({tuple(argument.shape) for argument in args if isinstance(argument, torch.Tensor)}) == 1
        return func(*args, **kwargs) if fits else edit.run(func, args, kwargs)

    return replace(edit, run=run)


def resized(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """A picture, interpolated to the size of the other."""
    x = facts.operands[at]
    if len(x.sizes) != _IMAGES or len(y.sizes) != _IMAGES or x.sizes[:2] != y.sizes[:2] or not x.tensor.is_floating_point():
        return []
    return on_operand(facts, at, interpolated(y.name, y.sizes), rank=rank, why=f"{shape(x.sizes[2:])} becomes {shape(y.sizes[2:])}")


def _short(x: Operand, y: Operand) -> int:
    """How many pixels it lacks, where that is the same in each dimension."""
    lacking = {there - here for here, there in zip(x.sizes[2:], y.sizes[2:], strict=False)}
    return lacking.pop() if len(lacking) == 1 else 0


def padded(facts: FailureFacts, x: Operand, y: Operand) -> list[Repair]:
    """The one convolution, since the other was as large, that does not leave its picture as large as it was, padded so that it does."""
    spatial, short = x.sizes[2:], _short(x, y)
    if not spatial or not short or short % 2:
        return []
    by_path: dict[str, list[Repair]] = {}
    for step in _smaller(x.made, len(x.sizes), spatial):
        module = facts.modules.get(step.module)
        if not isinstance(module, nn.modules.conv._ConvNd) or module.transposed or set(module.stride) != {1}:
            return []
        if isinstance(module.padding, str) or len(set(module.padding)) > 1:
            return []
        padding = int(module.padding[0]) + short // 2
        if {2 * padding} != {gap * (size - 1) for gap, size in zip(module.dilation, module.kernel_size, strict=True)}:
            return []
        by_path[step.module] = rebuilt_module(module, step.module, padding=padding, rank=3, why=f"leaves {shape(y.sizes[2:])}")
    return [functools.reduce(together, edits)] if (edits := [edit for each in by_path.values() for edit in each]) else []


def _smaller(made: Made | None, many: int, spatial: tuple[int, ...]) -> list[Made]:
    """The convolutions on all ways to a picture, such as to a product of two, that made it as small as it is."""

    def is_as_small(step: Made) -> bool:
        return len(step.shape) == many and step.shape[2:] == spatial

    def made_it(step: Made) -> bool:
        return step.op.startswith("conv") and step.inputs[0][0][2:] != spatial

    line = every_step(made, lambda step: is_as_small(step) and not made_it(step))
    return [step for step in line if is_as_small(step) and made_it(step)]


def _stretched(facts: FailureFacts, x: Operand, y: Operand, *, rank: int) -> list[Repair]:
    """The transposed convolutions on the way, whose strides leave several sizes to choose from, rebuilt to return the expected size."""
    short = _short(x, y) if len(x.sizes) == len(y.sizes) else 0
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
