"""gather, scatter and index_select: positions that are not there."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, clashes, named, producer_edits, short_dtype, told
from torchdebug_magics.instruments.shapes.repair.rules.steps.earlier import squeezed

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["index"]

_OPS = frozenset(
    [
        *("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select"),
        *("index_add", "index_add_", "take_along_dim", "index_copy", "index_copy_", "index_fill", "select", "narrow", "index_put"),
        *("index_put_", "take"),
    ]
)


def index(facts: Facts) -> Diagnosis | None:
    """``x.gather(1, picked)`` and its like."""
    if facts.op in {"masked_scatter", "masked_scatter_"} and len(facts.operands) == 3:
        return _by_mask(facts)
    return _op(facts) if facts.op in _OPS and facts.operands else None


def _added(facts: Facts, x: Operand, dim: Any) -> Diagnosis | None:
    """What is added has to be as wide as what it is added to."""
    source = facts.operands[-1]
    if not isinstance(dim, int) or len(source.sizes) != len(x.sizes) or not x.sizes:
        return None
    wrong = [at for at, pair in enumerate(zip(x.sizes, source.sizes, strict=True)) if at != dim % len(x.sizes) and pair[0] != pair[1]]
    if not wrong:
        return None
    at = wrong[0]
    sizes = f"{source.sizes[at]} and {x.sizes[at]} in dimension {at}"
    sentence = f"`{facts.op}` along dimension {dim} adds {told(source)} to {told(x)}: {sizes}"
    return Diagnosis(sentence, tuple(producer_edits(facts, source, source.sizes[at], x.sizes[at])), source)


def _spread(facts: Facts, at: int, dim: int) -> list[Edit]:
    """An index of too few dimensions, the same in those that it lacks, and with one place in the one along which it is looked up."""
    x, one = facts.operands[0], facts.operands[at]
    source = facts.operands[-1] if (facts.op or "").startswith("scatter") and len(facts.operands) > at + 1 else None
    wanted = source.sizes if source is not None else x.sizes
    many, dim = len(wanted), dim % max(len(x.sizes), 1)
    fits = [*wanted[:dim], *([wanted[dim]] if source is not None else [1]), *wanted[dim + 1 :]] if many else []
    if many != len(x.sizes) or len(one.sizes) >= many:
        return []
    edits: list[Edit] = []
    for kept in itertools.combinations(range(many), len(one.sizes)):
        placed = dict(zip(kept, one.sizes, strict=True))
        free = source is None and dim in kept  # as many places are looked up as it has
        if any(size != fits[place] and not (free and place == dim) for place, size in placed.items()):
            continue
        index = tuple(slice(None) if place in kept else None for place in range(many))
        sizes = [fits[place] if place not in kept and fits[place] != 1 else -1 for place in range(many)]
        edits += on_operand(facts, at, _spread_change(index, sizes, source), rank=4 + (0 not in kept))
        if 0 in kept:  # a place for each row: it is not to be taken for one for all of them
            return edits[:1]
    return edits[:2]


def _spread_change(index: tuple[slice | None, ...], sizes: list[int], source: Operand | None) -> Change:
    lacking = [place for place, part in enumerate(index) if part is None]
    shown = ", ".join(":" if part is not None else "None" for part in index)
    lift = f"[{shown}]" if len(lacking) > 1 else f".unsqueeze({-1 if lacking[0] == len(index) - 1 else lacking[0]})"
    grow = "" if set(sizes) == {-1} else f".expand({', '.join(map(str, sizes))})"
    if grow and source is not None and source.name.isidentifier():
        grow = f".expand_as({source.name})"
    return Change(lambda x: f"{x}{lift}{grow}", lambda one: one[index].expand(sizes))


def _by_mask(facts: Facts) -> Diagnosis | None:
    """Each place that the mask names wants a value."""
    x, mask, source = facts.operands
    values = facts.values(mask.tensor)
    if values is None or clashes(x.sizes, mask.sizes):
        return None
    many, has = int(values.broadcast_to(x.sizes).sum()), math.prod(source.sizes)
    if many <= has:
        return None
    width = x.sizes[-1]
    rows = f" ({many // width} rows of {width})" if len(x.sizes) > 1 and not many % width else ""
    sentence = f"`{facts.op}` fills {many} elements{rows} of {told(x)}, and {told(source)} has {has}"
    return Diagnosis(sentence, tuple(producer_edits(facts, source, source.sizes[-1], width)) if source.sizes else (), source)


def _op(facts: Facts) -> Diagnosis | None:
    x = facts.operands[0]
    at = next((at for at, one in enumerate(facts.operands) if at and one.tensor.dtype in {torch.int64, torch.int32}), None)
    if at is None:
        at = next((at for at in range(1, len(facts.operands))), None)
        if at is None or ("int64" not in facts.text and "Long" not in facts.text and "index" not in facts.text):
            return None
        one = facts.operands[at]
        casts = on_operand(facts, at, method("long"), rank=2, why="indices are int64")
        return Diagnosis(f"`{facts.op}` expects an integer index, and {named(one, 'it')} is {short_dtype(one)}", tuple(casts), one)
    one = facts.operands[at]
    dim = facts.argument(1, "dim", 0)
    if isinstance(dim, int) and x.sizes and not -len(x.sizes) <= dim < len(x.sizes):
        lacks = f"`{facts.op}` uses dimension {dim}, which does not exist: {told(x)} has dimensions {-len(x.sizes)} to {len(x.sizes) - 1}"
        lost = squeezed(facts, x)
        return Diagnosis(f"{lacks}{lost.words}" if lost else lacks, lost.edits if lost else (), x)
    if facts.op in {"index_add", "index_add_"} and (found := _added(facts, x, dim)):
        return found
    size = x.sizes[dim] if isinstance(dim, int) and -len(x.sizes) <= dim < len(x.sizes) else 0
    values = facts.values(one.tensor)
    if values is not None and values.numel() and (int(values.max()) >= size or int(values.min()) < 0):
        wrong = int(values.max()) if int(values.max()) >= size else int(values.min())
        place = f"{named(one, 'the index')} of {shape(one.sizes)} into {told(x)}"
        sentence = f"`{facts.op}` along dimension {dim}, which has {size} (0 to {size - 1}), gets index {wrong}: {place}"
        return Diagnosis(sentence, (), one)
    edits: list[Edit] = _spread(facts, at, dim if isinstance(dim, int) else 0)
    if len(one.sizes) == len(x.sizes) + 1 and 1 in one.sizes:
        edits += on_operand(facts, at, method("squeeze", one.sizes.index(1)), rank=4)
    if facts.op in {"index_select", "index_add", "index_add_"} and len(one.sizes) > 1:
        edits += on_operand(facts, at, method("flatten"), rank=4)
    name = f"the index{f' `{one.name}`' if one.name else ''} of {shape(one.sizes)}"
    return Diagnosis(f"`{facts.op}` cannot use {name} along dimension {dim} of {told(x)}", tuple(edits), one)
