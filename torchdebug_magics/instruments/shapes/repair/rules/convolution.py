"""Convolutions and pooling: dimensions, channels, and kernels that are larger than their input."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.cell_error.side_effects import number_named
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.earlier import earlier
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import (
    Diagnosis,
    anywhere,
    gets,
    named,
    producer_edits,
    reordered,
    shown,
    told,
    turned,
)
from torchdebug_magics.instruments.shapes.repair.rules.tabled import fitted
from torchdebug_magics.instruments.shapes.repair.size_history import channels_first
from torchdebug_magics.probing.syntax import nodes

_WORDS = {1: "length", 2: "height, width", 3: "depth, height, width"}
_RGB = 3
_MADE_BY_SIZES = frozenset(["zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full"])
_CALCULATED = re.compile(r"Calculated output size(?: per channel)?: \((?P<sizes>[-\dx ]+)\)")
_WAVES = 2
"""Dimensions of a batch of waves."""


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


def shuffle(facts: Facts) -> Diagnosis | None:
    """Channels are to divide by the square of the factor."""
    if facts.op != "pixel_shuffle" or len(facts.operands[0].sizes) < 3:
        return None
    x, factor = facts.operands[0], facts.argument(1, "upscale_factor")
    got = x.sizes[-3]
    if not isinstance(factor, int) or got % factor**2 == 0:
        return None
    wanted = -(-got // factor**2) * factor**2
    makes = f"{facts.who} makes {factor} x {factor} pixels from {factor**2} channels"
    sentence = f"{makes}, gets {gets(x, got, -3)}: not a multiple of {factor**2}"
    return Diagnosis(sentence, tuple(producer_edits(facts, x, got, wanted, rank=15)), x)


def grid(facts: Facts) -> Diagnosis | None:
    """One grid a picture, of as many coordinates as it has dimensions."""
    if facts.op not in {"grid_sample", "grid_sampler"} or len(facts.operands) < 2:
        return None
    x, points = facts.operands[0], facts.operands[1]
    if len(x.sizes) != len(points.sizes):
        return Diagnosis(f"`{facts.op}` expects a grid of as many dimensions as its input, gets {shown(x)} and {shown(points)}", (), points)
    if points.sizes[-1] != len(x.sizes) - 2:
        words = f"{len(x.sizes) - 2} coordinates in its last dimension"
        order = (0, *range(2, len(x.sizes)), 1)
        last = turned(facts, 1, order, rank=3, why="the coordinates last") if points.sizes[1] == len(x.sizes) - 2 else []
        return Diagnosis(f"`{facts.op}` of {shown(x)} expects a grid with {words}, gets {told(points)}", tuple(last), points)
    if points.sizes[0] == x.sizes[0]:
        return None
    sentence = f"`{facts.op}` expects one grid per image: {x.sizes[0]} of them in {told(x)}, and {points.sizes[0]} in {told(points)}"
    edits: list[Edit] = []
    if points.sizes[0] == 1:
        size = f"{x.name}.size(0)" if x.name.isidentifier() else str(x.sizes[0])
        rest = ", -1" * (len(points.sizes) - 1)
        change = Change(lambda y: f"{y}.expand({size}{rest})", lambda one: one.expand(x.sizes[0], *points.sizes[1:]))
        edits = on_operand(facts, 1, change, rank=4, why="the same grid for every image")
    return Diagnosis(sentence, tuple(edits), points)


def negative(facts: Facts) -> Diagnosis | None:
    """A size below zero: of a new tensor, or of what a kernel would leave."""
    if found := _CALCULATED.search(facts.text):
        x = facts.operands[0]
        settings = [
            f"{name} {_plain(getattr(facts.module, name))}" for name in ("kernel_size", "stride", "padding") if hasattr(facts.module, name)
        ]
        with_ = f" with {', '.join(settings)}" if settings else ""
        size = " x ".join(found["sizes"].replace("x", " ").split())
        return Diagnosis(f"{facts.who} would return a size of {size} for {told(x)}{with_}", (), x)
    if facts.op not in _MADE_BY_SIZES or not ("non-negative" in facts.text or "negative dimension" in facts.text):
        return None
    given: Any = [one for one in facts.args if not isinstance(one, torch.Tensor)]
    sizes = given[0] if given and isinstance(given[0], (tuple, list)) else given
    if not all(isinstance(one, int) for one in sizes) or min(sizes, default=0) >= 0:
        return None
    text = facts.written
    return Diagnosis(f"{text} requests a tensor of {shape(tuple(sizes))}{_why(facts, min(sizes))}", tuple(_cut(facts)))


def _cut(facts: Facts) -> list[Edit]:
    """The input from whose size the negative one came, such as ``8 - x.size(1)``, cut to the other number of the difference."""
    call, given = facts.written_call, dict(facts.inputs)
    names = facts.site.names if facts.site is not None else {}
    for part in ast.walk(call) if call is not None else ():
        if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.Sub):
            continue
        left, right = ast.unparse(part.left), ast.unparse(part.right)
        for name, dim in ((name, dim) for name, one in given.items() if name.isidentifier() for dim in range(one.dim())):
            size = given[name].shape[dim]
            if right not in {f"{name}.size({dim})", f"{name}.shape[{dim}]"} or (many := number_named(part.left, names)) is None:
                continue
            if 0 < many < size:
                change = _cut_at(dim, many, left)
                return [Edit(f"{name} = {change.text(name)}", f"as long as what it is filled up to: {many}", 10, inputs={name: change})]
    return []


def _cut_at(dim: int, many: int, told: str) -> Change:
    """``x[:, :self.length]``."""
    ends = (*(slice(None),) * dim, slice(many))
    return Change(lambda x: f"{x}[{':, ' * dim}:{told}]", lambda one: one[ends])


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _why(facts: Facts, size: int) -> str:
    """The tensors of which the expression for the size speaks."""
    site, call = facts.site, facts.written_call
    if site is None or call is None:
        return ""
    differences = [one for one in nodes(ast.BinOp, call) if isinstance(one.op, ast.Sub)]
    names = dict.fromkeys(one.id for one in nodes(ast.Name, *differences))
    known = [f"`{name}` is {shape(tuple(site.names[name].shape))}" for name in names if isinstance(site.names.get(name), torch.Tensor)]
    whole = [f"`{name}` is {site.names[name]}" for name in names if type(site.names.get(name)) is int]
    return (
        f": `{ast.unparse(differences[0])}` is {size}, as {' and '.join((*known, *whole))}"
        if len(differences) == 1 and (known or whole)
        else ""
    )


def spectrum(facts: Facts) -> Diagnosis | None:
    """A window of another length, or waves with a dimension of channels."""
    if facts.op not in {"stft", "istft"} or not facts.operands:
        return None
    x = facts.operands[0]
    if facts.op == "stft" and len(x.sizes) > _WAVES:
        sentence = f"`stft` takes one wave or a batch of them (batch, samples), and {told(x)} has {len(x.sizes)} dimensions"
        edits = on_operand(facts, 0, method("squeeze", 1), rank=3, why="without the channel") if x.sizes[1] == 1 else []
        flat = on_operand(facts, 0, method("flatten", 0, -2), rank=6, why="all channels in one batch")
        return Diagnosis(sentence, (*edits, *flat), x)
    if facts.op == "istft" and not x.tensor.is_complex():
        return Diagnosis(f"`istft` expects complex input, as `stft` returns it, and {told(x)} is {str(x.tensor.dtype)[6:]}", (), x)
    window = facts.argument(4, "window")
    length = facts.argument(3, "win_length") or facts.argument(1, "n_fft")
    if not isinstance(window, torch.Tensor) or not isinstance(length, int) or tuple(window.shape) == (length,):
        return None
    one = facts.operand(window)
    if one is None:
        return None
    sentence = f"`{facts.op}` expects a window of {length} (win_length, or else n_fft), gets {named(one, 'one')} of {shape(one.sizes)}"
    return Diagnosis(sentence, tuple(fitted(facts, one, one.sizes[-1], length, rank=8)) if one.sizes else (), one)


def ctc(facts: Facts) -> Diagnosis | None:
    """Its scores begin with the steps, and not with the batch."""
    if facts.op != "ctc_loss" or "batch_size" not in facts.text or len(facts.operands[0].sizes) != 3:
        return None
    scores, lengths = facts.operands[0], facts.argument(2, "input_lengths")
    many = len(lengths) if isinstance(lengths, (tuple, list)) or (isinstance(lengths, torch.Tensor) and lengths.dim()) else 0
    if scores.sizes[0] != many or scores.sizes[1] == many:
        return None
    sentence = f"`ctc_loss` reads {told(scores)} as steps x batch x classes, and has lengths for {many} samples"
    return Diagnosis(sentence, tuple(turned(facts, 0, (1, 0, 2), rank=2, why="the steps first")), scores)
