"""Edits that make one picture, or series, as large as another: padding, other strides upwards, interpolation."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, together
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.shapes.follow.origins import Made
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["interpolated", "padded", "stretched"]


def padded(facts: Facts, one: Operand, other: Operand) -> list[Edit]:
    """The one convolution, since the other was as large, that does not leave its picture as large as it was, padded so that it does."""
    spatial = one.sizes[2:]
    lacking = {there - here for here, there in zip(spatial, other.sizes[2:], strict=False)}
    short = lacking.pop() if len(lacking) == 1 else 0
    if not spatial or not short or short % 2:
        return []
    found: dict[str, list[Edit]] = {}
    for step in _smaller(one.made, len(one.sizes), spatial):
        module = facts.modules.get(step.module)
        if not isinstance(module, nn.modules.conv._ConvNd) or module.transposed or set(module.stride) != {1}:
            return []
        if isinstance(module.padding, str) or len(set(module.padding)) > 1:
            return []
        padding = int(module.padding[0]) + short // 2
        if {2 * padding} != {gap * (size - 1) for gap, size in zip(module.dilation, module.kernel_size, strict=True)}:
            return []
        found[step.module] = rebuilt_module(module, step.module, padding=padding, rank=3, why=f"leaves {shape(other.sizes[2:])}")
    return [functools.reduce(together, edits)] if (edits := [edit for each in found.values() for edit in each]) else []


def _smaller(made: Made | None, many: int, spatial: tuple[int, ...]) -> Iterator[Made]:
    """The convolutions on all ways to a picture, such as to a product of two, that made it as small as it is."""
    todo, seen = [made], set()
    while todo:
        step = todo.pop()
        if step is None or id(step) in seen or len(step.shape) != many or step.shape[2:] != spatial:
            continue
        seen.add(id(step))
        if step.op.startswith("conv") and step.inputs[0][0][2:] != spatial:
            yield step
        else:
            todo += [inner for _, inner in step.inputs]


def stretched(facts: Facts, one: Operand, other: Operand, *, rank: int = 4) -> list[Edit]:
    """The transposed convolutions on the way, whose strides leave several sizes to choose from, rebuilt to return the expected size."""
    if not one.sizes[2:] or len(one.sizes) != len(other.sizes):
        return []
    lacking = {there - here for here, there in zip(one.sizes[2:], other.sizes[2:], strict=True)}
    short = lacking.pop() if len(lacking) == 1 else 0
    edits: list[Edit] = []
    for step in steps(one.made):
        module = facts.modules.get(step.module)
        if short <= 0 or not isinstance(module, nn.modules.conv._ConvTransposeNd) or not step.op.startswith("conv_transpose"):
            continue
        stride, padding = module.stride[0], module.output_padding[0]
        if {*module.stride, *module.dilation} - {stride, 1} or {*module.output_padding} != {padding}:
            return []
        more = short % stride
        short //= stride  # what is lacking behind it, and not made by it, lacked before it
        why = f"leaves {shape(other.sizes[2:])}"
        edits += rebuilt_module(module, step.module, output_padding=int(padding) + more, rank=rank, why=why) if more else []
    return [functools.reduce(together, edits)] if edits and not short else []


def interpolated(other: str, sizes: tuple[int, ...]) -> Change:
    """As high and wide as another tensor, whose name is `other`."""
    return Change(
        lambda x: f"F.interpolate({x}, size={f'{other}.shape[2:]' if other else sizes[2:]})",
        lambda tensor: functional.interpolate(tensor, size=sizes[2:]),
    )
