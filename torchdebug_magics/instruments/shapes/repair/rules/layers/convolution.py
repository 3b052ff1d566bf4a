"""Convolutions and pooling: dimensions, channels, and kernels that are larger than their input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, anywhere, gets, named, producer_edits, reordered
from torchdebug_magics.instruments.shapes.repair.rules.steps.earlier import earlier
from torchdebug_magics.instruments.shapes.repair.size_history import channels_first

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["convolution", "pooling"]

_WORDS = {1: "length", 2: "height, width", 3: "depth, height, width"}
_RGB = 3


def convolution(facts: Facts) -> Diagnosis | None:
    """A convolution, or a transposed one."""
    if facts.op is None or not facts.op.startswith("conv") or len(facts.operands) < 2:
        return None
    x, weight = facts.operands[0], facts.operands[1]
    spatial = len(weight.sizes) - 2
    if str(spatial) not in facts.op:
        words = f"`{facts.op}` takes weights of {int(facts.op[-2]) + 2} dimensions (out and in channels, {_WORDS[int(facts.op[-2])]})"
        return Diagnosis(f"{words}, and {named(weight, 'the weight')} is {shape(weight.sizes)}", (), weight)
    groups = facts.module.groups if isinstance(facts.module, nn.modules.conv._ConvNd) else facts.argument(6, "groups", 1)
    transposed = "transpose" in facts.op
    expected = weight.sizes[0] if transposed else weight.sizes[1] * (groups if isinstance(groups, int) else 1)
    if len(x.sizes) not in {spatial + 1, spatial + 2}:
        return _dimensions(facts, spatial)
    if isinstance(groups, int) and not transposed and groups > 0 and weight.sizes[0] % groups:
        return _groups(facts, groups)
    got = x.sizes[-spatial - 1]
    if got != expected:
        return _channels(facts, spatial, expected, got)
    return _kernel(facts, x, weight.sizes[2:], spatial)


def _dimensions(facts: Facts, spatial: int) -> Diagnosis:
    x = facts.operands[0]
    sentence = (
        f"{facts.who} expects {spatial + 2} dimensions (batch, channels, {_WORDS.get(spatial, 'space')}), gets {len(x.sizes)}: {_told(x)}"
    )
    edits: list[Edit] = []
    if len(x.sizes) == spatial:
        edits += on_operand(facts, 0, method("unsqueeze", 0), rank=8, why="one channel")
    weight = facts.operands[1]
    channels = weight.sizes[0] if "transpose" in (facts.op or "") else weight.sizes[1]
    if len(x.sizes) == 2 and x.sizes[1] == channels and spatial > 1:
        pixel = (slice(None), slice(None), *(None,) * spatial)
        change = Change(lambda name: f"{name}[:, :{', None' * spatial}]", lambda one: one[pixel])
        edits += on_operand(facts, 0, change, rank=3, why="each row becomes a 1x1 image")
    if len(x.sizes) == spatial + 3 and x.sizes[0] == 1:
        edits += on_operand(facts, 0, method("squeeze", 0), rank=6, why="without the dimension of size 1")
    if len(x.sizes) > spatial + 2:
        edits += on_operand(facts, 0, method("flatten", 0, len(x.sizes) - spatial - 2), rank=8, why="all images in one batch")
    return Diagnosis(sentence, tuple(edits), x)


def _channels(facts: Facts, spatial: int, expected: int, got: int) -> Diagnosis:
    x = facts.operands[0]
    many = len(x.sizes)
    last = x.sizes[-1] == expected and many > 1 and not channels_first(x.made)
    sentence = f"{_who(facts)} expects {expected} channels, gets {gets(x, got, -spatial - 1)}"
    if found := earlier(facts, x, expected, -spatial - 1):
        return Diagnosis(sentence + found.words, found.edits, x)
    if many == spatial + 1:
        sentence += (
            f": {shape(x.sizes)} is read as one image without a batch" if spatial > 1 else f": {shape(x.sizes)} is read without a batch"
        )
    elif last:
        sentence += f": its channels are last in {shape(x.sizes)}"
    square = spatial > 1 and len(set(x.sizes[-spatial:])) == 1
    edits = reordered(facts, 0, -spatial - 1, expected, rank=25 if square and x.sizes[0] != expected else 5, batched=expected == 1)
    edits = [] if channels_first(x.made) else edits
    if many == spatial + 1 and expected == 1:
        edits += on_operand(facts, 0, method("unsqueeze", 1), rank=3, why="one channel")
    if not (last and edits and not square and many == spatial + 2):  # made for its height, or its length, it would only come through
        edits += _for_channels(facts, got)
    if got == 1 and expected > 1:
        sizes = [-1] * many
        sizes[-spatial - 1] = expected
        edits += anywhere(facts, 0, method("expand", *sizes), rank=25, why=f"the one channel {expected} times")
    if got > expected and x.is_input and got == _RGB + 1 and expected == _RGB and many == spatial + 2:
        edits += on_operand(
            facts, 0, Change(lambda name: f"{name}[:, :{expected}]", lambda one: one[:, :expected]), rank=15, why="without alpha"
        )
    edits += producer_edits(facts, x, got, expected)
    return Diagnosis(sentence, tuple(edits), x)


def _who(facts: Facts) -> str:
    """The module; or the function, with its weight."""
    if isinstance(facts.module, nn.modules.conv._ConvNd):
        return facts.who
    weight = facts.operands[1]
    return f"`{facts.op}`{f' with `{weight.name}`' if weight.name else ''}"


def _groups(facts: Facts, groups: int) -> Diagnosis:
    """A filter for each group at least; one is the same for all."""
    weight = facts.operands[1]
    sentence = f"`{facts.op}` with {groups} groups expects a multiple of {groups} filters, and {named(weight, 'its weight')}"
    rest = ", -1" * (len(weight.sizes) - 1)
    change = Change(lambda x: f"{x}.expand({groups}{rest})", lambda one: one.expand(groups, *one.shape[1:]))
    edits = on_operand(facts, 1, change, rank=5, why="the same for every channel", owned=True) if weight.sizes[0] == 1 else []
    return Diagnosis(f"{sentence} is {shape(weight.sizes)}", tuple(edits), weight)


def _for_channels(facts: Facts, got: int) -> list[Edit]:
    module: Any = facts.module
    groups = getattr(module, "groups", 1)
    if groups > 1 and groups == module.in_channels and not module.out_channels % groups:  # a filter a channel
        out = got * (module.out_channels // groups)
        return rebuilt_module(module, facts.path, in_channels=got, out_channels=out, groups=got)
    return rebuilt_module(module, facts.path, in_channels=got)


def _kernel(facts: Facts, x: Operand, kernel: tuple[int, ...], spatial: int) -> Diagnosis | None:
    sizes = x.sizes[-spatial:]
    module: Any = facts.module
    padding = getattr(module, "padding", facts.argument(4, "padding", 0))
    if "transpose" in (facts.op or "") or not any(one > size for one, size in zip(kernel, sizes, strict=True)):
        return None
    padded = (
        f" (padding {padding[0] if isinstance(padding, tuple) and len(set(padding)) == 1 else padding})"
        if padding not in {0, (0,) * spatial}
        else ""
    )
    sentence = f"{facts.who} has a kernel of {shape(kernel)}, larger than its input of {shape(sizes)}{padded}"
    edits: list[Edit] = []
    if isinstance(module, nn.modules.conv._ConvNd):
        edits += rebuilt_module(module, facts.path, padding=_one([one // 2 for one in kernel]), rank=20, why="padded to keep the size")
        fitting = [min(one, size) for one, size in zip(kernel, sizes, strict=True)]
        edits += rebuilt_module(module, facts.path, kernel_size=_one(fitting), rank=25, why="a kernel that fits")
    return Diagnosis(sentence, tuple(edits), x, (min(sizes), max(kernel)))


def _one(values: list[int]) -> Any:
    return values[0] if len(set(values)) == 1 else tuple(values)


def pooling(facts: Facts) -> Diagnosis | None:
    """Pooling whose result would be empty."""
    if facts.op is None or "pool" not in facts.op or not facts.operands:
        return None
    x = facts.operands[0]
    kernel = getattr(facts.module, "kernel_size", facts.argument(1, "kernel_size"))
    spatial = next((int(sign) for sign in facts.op if sign.isdigit()), 2)
    if len(x.sizes) not in {spatial + 1, spatial + 2}:
        sentence = f"{facts.who} expects {spatial + 1} or {spatial + 2} dimensions, gets {len(x.sizes)}: {_told(x)}"
        edits = on_operand(facts, 0, method("unsqueeze", 1), rank=10, why="one channel") if len(x.sizes) == spatial else []
        return Diagnosis(sentence, tuple(edits), x)
    if not isinstance(kernel, (int, tuple, list)):
        return None
    window = tuple(kernel) if isinstance(kernel, (tuple, list)) else (kernel,) * spatial
    sizes = x.sizes[-spatial:]
    if not any(one > size for one, size in zip(window, sizes, strict=False)):
        return None
    sentence = f"{facts.who} pools windows of {shape(window)}, larger than its input of {shape(sizes)}"
    return Diagnosis(sentence, (), x, (min(sizes), max(window)))


def _told(x: Operand) -> str:
    return f"{f'`{x.name}` is ' if x.name else ''}{shape(x.sizes)}"
