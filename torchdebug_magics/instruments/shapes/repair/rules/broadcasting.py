"""Elementwise ops: sizes that are to be equal, or one.

Often these are two ways through a network that meet again: residual blocks, and skip connections between pictures of several sizes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Repair, ValueChange, as_typed, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.local_call import LocalCall
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.candidates import as_large, interpolated, placed, subscript
from torchdebug_magics.instruments.shapes.repair.rules.earlier import otherwise
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import fitted, shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, clashes, orders, producer_edits, reorder, shown
from torchdebug_magics.instruments.shapes.repair.size_history import came_from, channels_first, comes_from, features_last, makers, of_inputs
from torchdebug_magics.probing.source.syntax import names_in

_IS_ABOUT_SIZES = re.compile("must match the size of tensor|broadcast|match the existing size|must match the existing")
_IMAGES = 4
"""Dimensions."""
_CONVOLUTIONS: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Convolutions by the dimensions of what they take."""
_DEEP = 2
"""Layers of a long way that make a short one worth a layer of its own; a single one would be made to fit."""
_NEXT_LEVEL = 1.5
"""How many times larger a picture of another level is, at least; less is the rounding of an odd size."""
_PICTURES = (4, 5)
"""Dimensions of a batch of pictures, or of volumes."""
_LONGEST = 62
"""Characters of an expression that stands in a sentence, with its quotes."""
_ROWS = 2
"""Dimensions of a row of steps, and how far from the end the steps stand where features are behind them."""


def broadcast(facts: FailureFacts) -> Diagnosis | None:
    """Any op with two operands that do not broadcast; the last rule, as it looks only at shapes."""
    if facts.op is None or facts.op.startswith("__get") or "attention" in facts.op or not _IS_ABOUT_SIZES.search(facts.text):
        return None
    every = range(len(facts.operands))
    pair = [(a, b) for a in every for b in every if a < b and clashes(facts.operands[a].sizes, facts.operands[b].sizes)]
    if not pair or not _is_elementwise(facts):
        return None
    a, b = pair[0]
    x, y = facts.operands[a], facts.operands[b]
    dims = clashes(x.sizes, y.sizes)
    at = dims[0]
    text = facts.written if len(facts.written) <= _LONGEST else f"`{facts.op.strip('_')}`"
    where = f" in `{facts.path}`" if facts.path and not (facts.site is not None and facts.direct) else ""
    sizes = f"{x.sizes[at]} and {y.sizes[at]} in {_place(at, len(x.sizes), len(y.sizes))}"
    sentence = f"{text}{where} cannot broadcast {_told(x)} with {_told(y)}: {sizes}"
    table, other_size = (x, y.sizes[at]) if not of_inputs(x.made) else (y, x.sizes[at])
    long = too_long(facts, other_size, table.sizes[at]) if not of_inputs(table.made) else ""
    sentence += f": {long}" if long else ""
    spread = {b: _spread(facts, b, facts.operands[a], 4), a: _spread(facts, a, facts.operands[b], 5)}
    unspread = any(spread.values())  # then their sizes are right, and stand in the wrong places
    culprit, computed = y if x.made is None else x, of_inputs(x.made) and of_inputs(y.made)
    fit = None if computed or unspread else (x.sizes[at], y.sizes[at])
    return Diagnosis(sentence, tuple(_edits(facts, spread)), culprit, fit, rounded=computed)


def _is_elementwise(facts: FailureFacts) -> bool:
    """Whether operands of one shape give that shape: so no product does, nor attention."""
    largest = (2, *max((operand.sizes for operand in facts.operands), key=len), 3)
    gives = LocalCall(facts).gives(dict.fromkeys(range(len(facts.operands)), lambda tensor: tensor.new_empty(largest)))
    return gives == [largest]


def _place(at: int, many: int, others: int) -> str:
    if at == -1:
        return "the last dimension"
    return f"dimension {at + many}" if many == others else f"dimension {at}"


def _told(x: Operand) -> str:
    source = came_from(x.made)
    named = shown(x)
    return f"{named}{f' ({source})' if source and (not x.name or x.name not in source) else ''}"


def _edits(facts: FailureFacts, spread: Mapping[int, list[Repair]]) -> list[Repair]:
    """The edits of both operands, the second one first; `spread` has those that put dimensions of one in the places that they lack."""
    edits: list[Repair] = []
    unspread = any(spread.values())
    for later, (at, to) in enumerate(itertools.permutations(spread)):
        x, y = facts.operands[at], facts.operands[to]
        edits += spread[at]
        edits += _moved(facts, at, y, 8 + later)
        edits += as_large(facts, x, y, rank=12)
        edits += reduced[1] if (reduced := otherwise(x, y.sizes.__eq__)) is not None else ()
        edits += _from_another_level(facts, at, y, 7 + later)
        edits += _projected(facts, at, y, 9 + later)
        edits += _resized(facts, at, y, 14 + later)
        edits += _cut(facts, at, y, 30 + later) if not unspread else []
        dims = clashes(x.sizes, y.sizes)
        pairs = {(x.sizes[dim], y.sizes[dim]) for dim in dims}
        if len(pairs) == 1 and not of_inputs(x.made):  # a table of positions, or a mask of them
            has, wants = pairs.pop()
            if wants > has or not all(_is_length(facts, x, y, dim) for dim in dims):  # else it is cut where it is used
                edits += fitted(facts, x, has, wants, rank=16)
            edits += shortened(facts, wants, has, rank=18)
        if len(dims) == 1 and dims[0] + len(x.sizes) and not unspread:  # no layer decides how many samples there are
            edits += producer_edits(facts, x, x.sizes[dims[0]], y.sizes[dims[0]], rank=20 + later)
    return edits


def _spread(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """A dimension of one put where the other has one more."""
    x = facts.operands[at]
    many = len(y.sizes)
    lacking = many - len(x.sizes)
    if lacking < 1 or not x.sizes:
        return []
    edits: list[Repair] = []
    # Rows to rows, and columns to columns, or to the channels of a picture, where there is a choice.
    features = 1 if channels_first(y.made) or (x.owned and many in _PICTURES) else many - 1
    places = list(itertools.combinations(range(many), len(x.sizes)))
    if lacking > 1:
        places.sort(key=lambda kept: (0 not in kept, features not in kept))
    for kept in places if lacking > 1 else [kept for kept in reversed(places) if 0 in kept]:
        index = tuple(slice(None) if dim in kept else None for dim in range(kept[0] if x.owned else 0, many))
        sizes = iter(x.sizes)
        if all(next(sizes) in {1, size} for dim, size in enumerate(y.sizes) if dim in kept):
            edits += on_operand(facts, at, placed(index, lacking), rank=rank, owned=lacking > 1 and features in kept)
    return edits[:2]


def _moved(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    x = facts.operands[at]
    if 1 < len(x.sizes) < len(y.sizes) and not of_inputs(x.made):
        last = y.sizes[-len(x.sizes) :]
        fits = next((order for order in orders(len(x.sizes)) if tuple(x.sizes[dim] for dim in order) == last), None)
        return on_operand(facts, at, reorder(fits), rank=rank) if fits is not None else []
    if len(x.sizes) != len(y.sizes) or len(x.sizes) > 5:
        return []
    fitting = (order for order in orders(len(x.sizes)) if not clashes(tuple(x.sizes[dim] for dim in order), y.sizes))
    alone = not of_inputs(x.made)  # without a batch: what has one place may come to stand where the batch is
    largest = max(math.prod(x.sizes), math.prod(y.sizes))  # else every number of the one meets several of the other
    fitting = (order for order in fitting if alone or math.prod(map(max, (x.sizes[dim] for dim in order), y.sizes)) <= largest)
    kept = (order for order in fitting if order[0] == 0 or sorted(x.sizes) == sorted(y.sizes) or (alone and x.sizes[order[0]] == 1))
    order = next(kept, None)
    return on_operand(facts, at, reorder(order), rank=rank) if order is not None else []


def _cut(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    x = facts.operands[at]
    dims = clashes(x.sizes, y.sizes)
    if len(x.sizes) == len(y.sizes) and -len(x.sizes) in dims:  # rows of the batch are not thrown away
        return []
    if of_inputs(x.made) or any(x.sizes[dim] < y.sizes[dim] or not _is_length(facts, x, y, dim) for dim in dims):
        return []
    if x.owned:
        if not isinstance(x.tensor, torch.nn.Parameter):  # features are not thrown away
            return []
        # As long as each sequence; but a picture is as large as the model is made for.
        steps = [tensor.shape[1] for _, tensor in facts.inputs if tensor.dim() in {2, 3}]
        rank = 11 if all(y.sizes[dim] in steps for dim in dims) else 13
    ends = tuple(slice(y.sizes[dim]) if dim in dims else slice(None) for dim in range(-len(x.sizes), 0))
    name = y.name if y.name.isidentifier() else ""
    texts = [":" if end.stop is None else f":{f'{name}.size({dim - len(x.sizes)})' if name else end.stop}" for dim, end in enumerate(ends)]
    while texts[-1] == ":":
        texts.pop()
    return on_operand(facts, at, subscript(", ".join(texts), ends), rank=rank, why="only the length needed", owned=True)


def _is_length(facts: FailureFacts, x: Operand, y: Operand, dim: int) -> bool:
    """Whether a dimension counts steps or pixels, of which fewer will do; features, heads and channels are not thrown away."""
    if channels_first(y.made):
        return dim > 1 - len(y.sizes)
    if x.tensor.dtype is torch.bool or all(len(sizes) >= _ROWS and sizes[-1] == sizes[-2] for sizes in (x.sizes, y.sizes)):
        return dim >= -_ROWS
    lengths = {tensor.shape[1] for _, tensor in facts.inputs if tensor.dim() > 1}
    if dim != -1:  # with heads, these may stand there
        return dim == -_ROWS and (len(y.sizes) not in _PICTURES or y.sizes[dim] in lengths)
    lengths = {tensor.shape[1] for _, tensor in facts.inputs if tensor.dim() == _ROWS}
    return y.sizes[-1] in lengths and not features_last(y.made)


def _from_another_level(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
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


def _projected(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
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


def _resized(facts: FailureFacts, at: int, y: Operand, rank: int) -> list[Repair]:
    """A picture, interpolated to the size of the other."""
    x = facts.operands[at]
    if len(x.sizes) != _IMAGES or len(y.sizes) != _IMAGES or x.sizes[:2] != y.sizes[:2] or not x.tensor.is_floating_point():
        return []
    return on_operand(facts, at, interpolated(y.name, y.sizes), rank=rank, why=f"{shape(x.sizes[2:])} becomes {shape(y.sizes[2:])}")
