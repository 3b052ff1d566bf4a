"""Subscripts, gather, scatter and index_select: positions that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.history import came_from
from torchdebug_magics.instruments.shapes.repair.rules.earlier import squeezed
from torchdebug_magics.instruments.shapes.repair.rules.parts import Diagnosis, named, producer_edits, short_dtype

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.facts import Facts, Operand

__all__ = ["index"]

_OPS = frozenset(
    [
        "gather",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "index_select",
        "index_add",
        "index_add_",
        "take_along_dim",
        "index_copy",
        "index_copy_",
        "index_fill",
        "select",
        "narrow",
        "index_put",
        "index_put_",
        "take",
    ]
)


def index(facts: Facts) -> Diagnosis | None:
    """Of whichever kind."""
    if facts.op in {"__getitem__", "__setitem__", "getitem"}:
        return _subscript(facts)
    return _op(facts) if facts.op in _OPS and facts.operands else None


def _subscript(facts: Facts) -> Diagnosis | None:
    x = facts.operands[0]
    text = f"`{facts.site.text}`" if facts.site is not None and facts.direct and facts.site.text else "the subscript"
    floats = [at for at, one in enumerate(facts.operands) if at and one.tensor.is_floating_point()]
    if floats and "indices" in facts.text:
        one = facts.operands[floats[0]]
        edits = on_operand(facts, floats[0], method("long"), rank=2, why="indices are int64")
        return Diagnosis(
            f"{text} indexes by {named(one, 'a tensor')}, which is {short_dtype(one)}, and positions are whole numbers", tuple(edits), one
        )
    if "too many indices" in facts.text:
        given = facts.args[1] if len(facts.args) > 1 else ()
        many = sum(one is not None and one is not Ellipsis for one in given) if isinstance(given, tuple) else 1
        edits = (
            on_operand(facts, 0, method("unsqueeze", 0), rank=15, why="a batch of one", first=True)
            if many == len(x.sizes) + 1 and x.is_input
            else []
        )
        found = squeezed(facts, x)
        words, before = (found.words, found.edits) if found is not None else ("", ())
        return Diagnosis(f"{text} names {many} dimensions, and {_told(x)} has {len(x.sizes)}{words}", (*before, *edits), x)
    if "out of bounds" in facts.text or "out of range" in facts.text:
        return _bounds(facts, text, x)
    if "The shape of the mask" in facts.text or ("mask" in facts.text and len(facts.operands) > 1):
        mask = facts.operands[1]
        return Diagnosis(f"{text}: the mask of {shape(mask.sizes)} does not fit {_told(x)}", (), mask)
    return None


def _bounds(facts: Facts, text: str, x: Operand) -> Diagnosis:
    given = facts.args[1] if len(facts.args) > 1 else ()
    found = _beyond(given if isinstance(given, tuple) else (given,), x.sizes)
    if found is not None:
        dim, position = found
        size = x.sizes[dim]
        return Diagnosis(f"{text} asks for position {position} of dimension {dim}, which has {size} (0 to {size - 1}): {_told(x)}", (), x)
    values = _values(facts, facts.operands[1]) if len(facts.operands) > 1 else ""
    return Diagnosis(f"{text} asks for a position that {_told(x)} does not have{values}", (), x)


def _beyond(given: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[int, int] | None:
    named_dims = sum(one is not None and one is not Ellipsis for one in given)
    dim = 0
    for one in given:
        if one is Ellipsis:
            dim += len(sizes) - named_dims
        elif one is not None:
            if type(one) is int and dim < len(sizes) and not -sizes[dim] <= one < sizes[dim]:
                return dim, one
            dim += 1
    return None


def _values(facts: Facts, one: Operand) -> str:
    values = facts.values(one.tensor)
    if values is None or not values.numel() or values.is_floating_point():
        return ""
    return f": {named(one, 'the index')} holds {int(values.min())} to {int(values.max())}"


def _told(x: Operand) -> str:
    source = came_from(x.made)
    return f"{named(x, 'the tensor')} of {shape(x.sizes)}{f' {source}' if source and f'`{x.name}`' not in source else ''}"


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
    sentence = f"`{facts.op}` along dimension {dim} adds {_told(source)} to {_told(x)}: {sizes}"
    return Diagnosis(sentence, tuple(producer_edits(facts, source, source.sizes[at], x.sizes[at])), source)


def _op(facts: Facts) -> Diagnosis | None:
    x = facts.operands[0]
    at = next((at for at, one in enumerate(facts.operands) if at and one.tensor.dtype in {torch.int64, torch.int32}), None)
    if at is None:
        at = next((at for at in range(1, len(facts.operands))), None)
        if at is None or ("int64" not in facts.text and "Long" not in facts.text and "index" not in facts.text):
            return None
        one = facts.operands[at]
        casts = on_operand(facts, at, method("long"), rank=2, why="indices are int64")
        return Diagnosis(f"`{facts.op}` takes whole numbers as its index, and {named(one, 'it')} is {short_dtype(one)}", tuple(casts), one)
    one = facts.operands[at]
    dim = facts.argument(1, "dim", 0)
    if facts.op in {"index_add", "index_add_"} and (found := _added(facts, x, dim)):
        return found
    size = x.sizes[dim] if isinstance(dim, int) and -len(x.sizes) <= dim < len(x.sizes) else 0
    values = facts.values(one.tensor)
    if values is not None and values.numel() and (int(values.max()) >= size or int(values.min()) < 0):
        wrong = int(values.max()) if int(values.max()) >= size else int(values.min())
        place = f"{named(one, 'the index')} of {shape(one.sizes)} into {_told(x)}"
        sentence = f"`{facts.op}` along dimension {dim}, which has {size} (0 to {size - 1}), gets index {wrong}: {place}"
        return Diagnosis(sentence, (), one)
    edits: list[Edit] = []
    if len(one.sizes) == len(x.sizes) - 1:
        for place in (len(one.sizes), *range(len(one.sizes))):
            edits += on_operand(facts, at, method("unsqueeze", -1 if place == len(one.sizes) else place), rank=4)
    if len(one.sizes) == len(x.sizes) + 1 and 1 in one.sizes:
        edits += on_operand(facts, at, method("squeeze", one.sizes.index(1)), rank=4)
    if facts.op in {"index_select", "index_add", "index_add_"} and len(one.sizes) > 1:
        edits += on_operand(facts, at, method("flatten"), rank=4)
    sentence = f"`{facts.op}` along dimension {dim}: the index {named(one, '')} of {shape(one.sizes)} does not fit {_told(x)}".replace(
        "  ", " "
    )
    return Diagnosis(sentence, tuple(edits), one)
