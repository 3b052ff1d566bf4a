"""Elementwise ops: sizes that are to be equal, or one."""

from __future__ import annotations

import ast
import itertools
import math

import torch

from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, on_operand, parameter_edit
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.local_call import LocalCall
from torchdebug_magics.instruments.shapes.repair.rules.candidates import placed, subscript
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.residual import as_large, from_another_level, projected, resized, strided
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import (
    Diagnosis,
    anywhere,
    clashes,
    orders,
    producer_edits,
    reorder,
    shown,
)
from torchdebug_magics.instruments.shapes.repair.rules.tabled import fitted
from torchdebug_magics.instruments.shapes.repair.size_history import came_from, channels_first, features_last, of_inputs, steps
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.probing.source.syntax import expression

_PICTURES = (4, 5)
"""Dimensions of a batch of pictures, or of volumes."""
_ROWS = 2
"""Dimensions of a row of steps, and how far from the end the steps stand where features are behind them."""
_UNPACKS = "_pad_packed_sequence"


def broadcast(facts: FailureFacts) -> Diagnosis | None:
    """Any op with two operands that do not broadcast; the last rule, as it looks only at shapes."""
    if facts.op is None or facts.op.startswith("__get") or "attention" in facts.op or not _is_about_sizes(facts.text):
        return None
    pair = _pair(facts)
    if pair is None or not _is_elementwise(facts):
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
    sentence = f"{text}{where} cannot broadcast {_told(one)} with {_told(other)}: {sizes}"
    table, other_size = (one, other.sizes[at]) if not of_inputs(one.made) else (other, one.sizes[at])
    long = too_long(facts, other_size, table.sizes[at]) if not of_inputs(table.made) else ""
    sentence += f": {long}" if long else ""
    unspread = any(_spreads(facts, a, b).values())
    culprit, computed = other if one.made is None else one, of_inputs(one.made) and of_inputs(other.made)
    return Diagnosis(
        sentence, tuple(_edits(facts, a, b)), culprit, None if computed or unspread else (one.sizes[at], other.sizes[at]), rounded=computed
    )


def _is_elementwise(facts: FailureFacts) -> bool:
    """Whether operands of one shape give that shape: so no product does, nor attention."""
    largest = (2, *max((operand.sizes for operand in facts.operands), key=len), 3)
    gives = LocalCall(facts).gives(dict.fromkeys(range(len(facts.operands)), lambda tensor: tensor.new_empty(largest)))
    return gives == [largest]


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


def _pair(facts: FailureFacts) -> tuple[int, int] | None:
    every = range(len(facts.operands))
    return next(((a, b) for a in every for b in every if a < b and clashes(facts.operands[a].sizes, facts.operands[b].sizes)), None)


def _edits(facts: FailureFacts, a: int, b: int) -> list[Repair]:
    edits: list[Repair] = []
    spread = _spreads(facts, a, b)
    unspread = any(spread.values())  # then their sizes are right, and stand in the wrong places
    for at, to in ((b, a), (a, b)):
        one, other = facts.operands[at], facts.operands[to]
        later = 0 if at == b else 1
        edits += spread[at]
        edits += _moved(facts, at, other, 8 + later)
        if one.owned and not unspread:
            edits += _sized(one, other)
        edits += strided(facts, one, other)
        edits += as_large(facts, one, other, rank=12)
        edits += unpacked_to(facts, one, other)
        edits += from_another_level(facts, at, other, 7 + later)
        edits += projected(facts, at, other, 9 + later)
        edits += resized(facts, at, other, 14 + later)
        edits += _cut(facts, at, other, 30 + later) if not unspread else []
        dims = clashes(one.sizes, other.sizes)
        pairs = {(one.sizes[dim], other.sizes[dim]) for dim in dims}
        if len(pairs) == 1 and not of_inputs(one.made):  # a table of positions, or a mask of them
            has, wants = pairs.pop()
            if wants > has or not all(_is_length(facts, one, other, dim) for dim in dims):  # else it is cut where it is used
                edits += fitted(facts, one, has, wants, rank=16)
            edits += shortened(facts, wants, has, rank=18)
        if len(dims) == 1 and dims[0] + len(one.sizes) and not unspread:  # no layer decides how many samples there are
            edits += producer_edits(facts, one, one.sizes[dims[0]], other.sizes[dims[0]], rank=20 + later)
    return edits


def _spreads(facts: FailureFacts, a: int, b: int) -> dict[int, list[Repair]]:
    return {b: _spread(facts, b, facts.operands[a], 4), a: _spread(facts, a, facts.operands[b], 5)}


def _spread(facts: FailureFacts, at: int, other: Operand, rank: int) -> list[Repair]:
    """A dimension of one put where the other has one more."""
    one = facts.operands[at]
    many = len(other.sizes)
    lacking = many - len(one.sizes)
    if lacking < 1 or not one.sizes:
        return []
    edits: list[Repair] = []
    # Rows to rows, and columns to columns, or to the channels of a picture, where there is a choice.
    features = 1 if channels_first(other.made) or (one.owned and many in _PICTURES) else many - 1
    places = list(itertools.combinations(range(many), len(one.sizes)))
    if lacking > 1:
        places.sort(key=lambda kept: (0 not in kept, features not in kept))
    for kept in places if lacking > 1 else [kept for kept in reversed(places) if 0 in kept]:
        index = tuple(slice(None) if dim in kept else None for dim in range(kept[0] if one.owned else 0, many))
        sizes = iter(one.sizes)
        if _fits(tuple(next(sizes) if dim in kept else 1 for dim in range(len(other.sizes))), other.sizes):
            edits += on_operand(facts, at, placed(index, lacking), rank=rank, owned=lacking > 1 and features in kept)
    return edits[:2]


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(here in {1, there} for here, there in zip(one, other, strict=True))


def _moved(facts: FailureFacts, at: int, other: Operand, rank: int) -> list[Repair]:
    one = facts.operands[at]
    if 1 < len(one.sizes) < len(other.sizes) and not of_inputs(one.made):
        last = other.sizes[-len(one.sizes) :]
        fits = next((order for order in orders(len(one.sizes)) if tuple(one.sizes[dim] for dim in order) == last), None)
        return anywhere(facts, at, reorder(fits), rank=rank) if fits is not None else []
    if len(one.sizes) != len(other.sizes) or len(one.sizes) > 5:
        return []
    found = (order for order in orders(len(one.sizes)) if not clashes(tuple(one.sizes[dim] for dim in order), other.sizes))
    alone = not of_inputs(one.made)  # without a batch: what has one place may come to stand where the batch is
    largest = max(math.prod(one.sizes), math.prod(other.sizes))  # else every number of the one meets several of the other
    found = (order for order in found if alone or math.prod(map(max, (one.sizes[dim] for dim in order), other.sizes)) <= largest)
    kept = (order for order in found if order[0] == 0 or sorted(one.sizes) == sorted(other.sizes) or (alone and one.sizes[order[0]] == 1))
    order = next(kept, None)
    return anywhere(facts, at, reorder(order), rank=rank) if order is not None else []


def _sized(one: Operand, other: Operand) -> list[Repair]:
    """The user's own parameter, as long as what it meets; where it broadcasts, it goes on doing so."""
    sizes = list(one.sizes)
    for dim in clashes(one.sizes, other.sizes):
        sizes[dim] = other.sizes[dim]
    return parameter_edit(one, tuple(sizes), rank=12)


def _cut(facts: FailureFacts, at: int, other: Operand, rank: int) -> list[Repair]:
    one = facts.operands[at]
    dims = clashes(one.sizes, other.sizes)
    if len(one.sizes) == len(other.sizes) and -len(one.sizes) in dims:  # rows of the batch are not thrown away
        return []
    if of_inputs(one.made) or any(one.sizes[dim] < other.sizes[dim] or not _is_length(facts, one, other, dim) for dim in dims):
        return []
    if one.owned:
        if not isinstance(one.tensor, torch.nn.Parameter):  # features are not thrown away
            return []
        # As long as each sequence; but a picture is as large as the model is made for.
        steps = [tensor.shape[1] for _, tensor in facts.inputs if tensor.dim() in {2, 3}]
        rank = 11 if all(other.sizes[dim] in steps for dim in dims) else 13
    ends = tuple(slice(other.sizes[dim]) if dim in dims else slice(None) for dim in range(-len(one.sizes), 0))
    name = other.name if other.name.isidentifier() else ""
    texts = [_end(end, name, dim - len(one.sizes)) for dim, end in enumerate(ends)]
    while texts[-1] == ":":
        texts.pop()
    return on_operand(facts, at, subscript(", ".join(texts), ends), rank=rank, why="only the length needed", owned=True)


def _is_length(facts: FailureFacts, one: Operand, other: Operand, dim: int) -> bool:
    """Whether a dimension counts steps or pixels, of which fewer will do; features, heads and channels are not thrown away."""
    if channels_first(other.made):
        return dim > 1 - len(other.sizes)
    if one.tensor.dtype is torch.bool or all(len(sizes) >= _ROWS and sizes[-1] == sizes[-2] for sizes in (one.sizes, other.sizes)):
        return dim >= -_ROWS
    lengths = {tensor.shape[1] for _, tensor in facts.inputs if tensor.dim() > 1}
    if dim != -1:  # with heads, these may stand there
        return dim == -_ROWS and (len(other.sizes) not in _PICTURES or other.sizes[dim] in lengths)
    lengths = {tensor.shape[1] for _, tensor in facts.inputs if tensor.dim() == _ROWS}
    return other.sizes[-1] in lengths and not features_last(other.made)


def _end(end: slice, name: str, dim: int) -> str:
    if end.stop is None:
        return ":"
    return f":{name}.size({dim})" if name else f":{end.stop}"


def unpacked_to(facts: FailureFacts, one: Operand, other: Operand) -> list[Repair]:
    """The user's call that unpacks them, with as many steps as what they meet has."""
    step = next((step for step in steps(one.made) if step.op == _UNPACKS), None)
    if step is None or step.line is None or step.shape[:2] != one.sizes[:2] or len(other.sizes) < 2:
        return []
    wrong = [dim for dim in (0, 1) if one.sizes[dim] < other.sizes[dim]]
    site = site_at(*step.line)
    call = site.expression
    if len(wrong) != 1 or not isinstance(call, ast.Call) or any(keyword.arg == "total_length" for keyword in call.keywords):
        return []
    many = other.sizes[wrong[0]]
    name, dim = next(((name, at) for name, one in facts.inputs for at, size in enumerate(one.shape) if at and size == many), ("", 0))
    told = f"{name}.size({dim})" if name.isidentifier() else str(many)
    new = ast.Call(call.func, call.args, [*call.keywords, ast.keyword("total_length", expression(told))])
    run = OpEdit(site, _UNPACKS, lambda func, args, _: func(*args[:-1], many))
    return [Repair(ast.unparse(new), "as long as before they were packed", 4, ops=(run,))]
