"""``x[i]``, ``x[i] = y`` and embeddings: positions that are not there, and places of another shape than what is put there."""

from __future__ import annotations

import ast
import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import (
    OpEdit,
    Repair,
    ValueChange,
    as_written,
    method,
    on_operand,
    parameter_edit,
    then,
)
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.candidates import other_way, placed
from torchdebug_magics.instruments.shapes.repair.rules.earlier import squeezed
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import beyond, created, fitted, positions_in, shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, clashes, named, producer_edits, short_dtype, told
from torchdebug_magics.instruments.shapes.repair.size_history import came_from, maker, of_inputs, steps
from torchdebug_magics.probing.source.syntax import as_atom

_ROUNDS = frozenset(["floor", "round", "ceil", "trunc", "long", "int", "to"])
_OPS = {
    *("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select"),
    *("index_add", "index_add_", "take_along_dim", "index_copy", "index_copy_", "index_fill", "select", "narrow", "index_put"),
    *("index_put_", "take"),
}


def subscript(facts: FailureFacts) -> Diagnosis | None:
    """A subscript that is read, or given a value."""
    if facts.op not in {"__getitem__", "__setitem__", "getitem", "setitem"}:
        return None
    x = facts.operands[0]
    text = f"`{facts.site.text}`" if facts.site is not None and facts.direct and facts.site.text else "the subscript"
    if len(facts.args) > 2 and (cause := _assigned(facts, text, x)):
        return cause
    floats = [at for at, operand in enumerate(facts.operands) if at and operand.tensor.is_floating_point()]
    if floats and "indices" in facts.text:
        ids = facts.operands[floats[0]]
        edits = on_operand(facts, floats[0], method("long"), rank=2, why="indices are int64")
        sentence = f"{text} indexes with {named(ids, 'a tensor')}, which is {short_dtype(ids)}: indices must be integers"
        return Diagnosis(sentence, tuple(edits), ids)
    if "too many indices" in facts.text:
        given = facts.args[1] if len(facts.args) > 1 else ()
        many = sum(item is not None and item is not Ellipsis for item in given) if isinstance(given, tuple) else 1
        batch = on_operand(facts, 0, method("unsqueeze", 0), rank=15, why="a batch of 1", first=True)
        edits = batch if many == len(x.sizes) + 1 and x.is_input else []
        lost = squeezed(facts, x)
        words, before = (lost.words, lost.edits) if lost is not None else ("", ())
        return Diagnosis(f"{text} indexes {many} dimensions, and {told(x)} has {len(x.sizes)}{words}", (*before, *edits), x)
    if "out of bounds" in facts.text or "out of range" in facts.text:
        return _bounds(facts, text, x)
    if "The shape of the mask" in facts.text or ("mask" in facts.text and len(facts.operands) > 1):
        mask = facts.operands[1]
        return Diagnosis(f"{text}: the mask of {shape(mask.sizes)} does not fit {told(x)}", (), mask)
    return None


def _assigned(facts: FailureFacts, text: str, x: Operand) -> Diagnosis | None:
    """``x[i] = y``: what is given has to fit the place."""
    place = _place(x, facts.args[1])
    given = next((operand for operand in facts.operands[1:] if operand.tensor is facts.args[2]), None)
    wrong = clashes(place, given.sizes) if place is not None and given is not None else []
    if place is None or given is None or not wrong:
        return None
    at = wrong[0]
    sizes = f"{place[at]} and {given.sizes[at]} in {'the last dimension' if at == -1 else f'dimension {at + len(place)}'}"
    sentence = f"{text} selects {shape(place)} of {told(x)}, is assigned {told(given)}: {sizes}"
    edits = producer_edits(facts, given, given.sizes[-1], place[-1]) if wrong == [-1] else []
    if len(place) == len(x.sizes) and wrong == [-1] and place[-1] == x.sizes[-1]:
        edits += created(facts, x, (*x.sizes[:-1], given.sizes[-1]), rank=18)
    is_strided = isinstance(facts.args[1], tuple) and isinstance(facts.args[1][-1], slice) and (facts.args[1][-1].step or 1) > 1
    if is_strided and wrong == [-1] and given.sizes[-1] == place[-1] + 1:
        edits += _cut(facts, place[-1])
    return Diagnosis(sentence, tuple(edits), given)


def _cut(facts: FailureFacts, width: int) -> list[Repair]:
    """What is assigned, as wide as its place: every second of an odd number is one more from the first on than from the second on."""
    statement, site = facts.site.statement if facts.site is not None else None, facts.site
    if site is None or facts.op is None or not isinstance(statement, ast.Assign):
        return []
    code = f"{ast.unparse(statement.targets[0])} = {as_atom(statement.value)}[..., :{width}]"
    run = OpEdit(site, facts.op, lambda func, args, kwargs: func(*args[:2], args[2][..., :width], *args[3:], **kwargs))
    return [Repair(code, "as many as there are places", 3, ops=(run,))]


def _place(x: Operand, index: Any) -> tuple[int, ...] | None:
    """The shape of what a subscript names; None where that depends on values."""
    given = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, torch.Tensor) and item.dtype in {torch.bool, torch.uint8} for item in given):
        return None
    stands = tuple(torch.empty(item.shape, dtype=item.dtype, device="meta") if isinstance(item, torch.Tensor) else item for item in given)
    try:
        return tuple(torch.empty(x.sizes, device="meta")[stands].shape)
    except (IndexError, TypeError, RuntimeError):
        return None


def _bounds(facts: FailureFacts, text: str, x: Operand) -> Diagnosis:
    given = facts.args[1] if len(facts.args) > 1 else ()
    place = _beyond(given if isinstance(given, tuple) else (given,), x.sizes)
    if place is not None:
        dim, position = place
        size = x.sizes[dim]
        sentence = f"{text} selects position {position} of dimension {dim}, which has {size} (0 to {size - 1}): {told(x)}"
        both = other_way(facts, x) if dim == 0 and position in {1, -2} else []
        return Diagnosis(sentence, (*both, *_last(facts, position, size)), x)
    if beyond := _beyond_rows(facts, text, x):
        return beyond
    return Diagnosis(f"{text} selects a position that {told(x)} does not have", (), x)


def _last(facts: FailureFacts, position: int, size: int) -> list[Repair]:
    """The last position, where the one behind it was asked for."""
    site = facts.site if facts.direct else None
    node = site.expression if site is not None else None
    if site is None or facts.op is None or not isinstance(node, ast.Subscript) or not size or position != size:
        return []
    given = facts.args[1] if isinstance(facts.args[1], tuple) else facts.args[1:2]
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    at = [place for place, item in enumerate(given) if type(item) is int and item == position]
    if len(at) != 1 or len(parts) != len(given):
        return []
    index = tuple(-1 if place == at[0] else item for place, item in enumerate(given))
    part = parts[at[0]]
    code = site.changed(part, lambda text: "-1" if isinstance(part, ast.Constant) else f"{text} - 1")
    run = OpEdit(site, facts.op, lambda func, args, _: func(args[0], index))
    return [Repair(code, f"the last one: positions start at 0, and the last of {size} is {size - 1}", 8, ops=(run,))]


def _beyond_rows(facts: FailureFacts, text: str, x: Operand) -> Diagnosis | None:
    """Where the first thing in the brackets is a tensor of positions."""
    given = facts.args[1]
    first = given[0] if isinstance(given, tuple) and given else given
    index = facts.operand(first)
    values = facts.values(index.tensor) if index is not None and index.tensor.dtype in {torch.int64, torch.int32} else None
    size = x.sizes[0] if x.sizes else 0
    wrong = beyond(values, size, low=-size)
    if index is None or wrong is None or not size:
        return None
    sentence = f"{text} selects position {wrong} of dimension 0, which has {size} (0 to {size - 1}): {told(x)}"
    positions = positions_in(index.made)
    many = wrong + 1 if positions is None else max(wrong + 1, positions[1])
    edits = [*fitted(facts, x, size, many, rank=6), *parameter_edit(x, (many, *x.sizes[1:]), rank=12)] if wrong >= 0 else []
    return Diagnosis(sentence, (*edits, *(shortened(facts, many, size) if not of_inputs(x.made) else ())), index)


def _beyond(given: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[int, int] | None:
    items = [item for item in given if item is not None]
    rest = next((at for at, item in enumerate(items) if item is Ellipsis), len(items))
    placed_at = [*enumerate(items[:rest]), *enumerate(items[rest + 1 :], len(sizes) - len(items[rest + 1 :]))]
    wrong = ((at, item) for at, item in placed_at if type(item) is int and at < len(sizes) and not -sizes[at] <= item < sizes[at])
    return next(wrong, None)


def _spread(facts: FailureFacts, at: int, dim: int) -> list[Repair]:
    """An index of too few dimensions, the same in those that it lacks, and with one place in the one along which it is looked up."""
    x, ids = facts.operands[0], facts.operands[at]
    source = facts.operands[-1] if (facts.op or "").startswith("scatter") and len(facts.operands) > at + 1 else None
    wanted = source.sizes if source is not None else x.sizes
    many, dim = len(wanted), dim % max(len(x.sizes), 1)
    fits = [*wanted[:dim], *([wanted[dim]] if source is not None else [1]), *wanted[dim + 1 :]] if many else []
    if many != len(x.sizes) or len(ids.sizes) >= many:
        return []
    edits: list[Repair] = []
    for kept in itertools.combinations(range(many), len(ids.sizes)):
        had = dict(zip(kept, ids.sizes, strict=True))
        free = source is None and dim in kept  # as many places are looked up as it has
        if any(size != fits[place] and not (free and place == dim) for place, size in had.items()):
            continue
        index = tuple(slice(None) if place in kept else None for place in range(many))
        sizes = [fits[place] if place not in kept and fits[place] != 1 else -1 for place in range(many)]
        change = placed(index, index.count(None))
        if set(sizes) != {-1}:
            named_so = source is not None and source.name.isidentifier()
            grown = f"expand_as({source.name})" if source is not None and named_so else f"expand({', '.join(map(str, sizes))})"
            change = then(change, ValueChange(f"{{}}.{grown}".format, functools.partial(torch.Tensor.expand, size=sizes)))
        edits += on_operand(facts, at, change, rank=4 + (0 not in kept))
        if 0 in kept:  # a place for each row: it is not to be taken for one for all of them
            return edits[:1]
    return edits[:2]


def index(facts: FailureFacts) -> Diagnosis | None:
    """``x.gather(1, picked)`` and its like."""
    op = facts.op
    if op is None or op not in _OPS or not facts.operands:
        return None
    x = facts.operands[0]
    at = next((at for at, operand in enumerate(facts.operands) if at and operand.tensor.dtype in {torch.int64, torch.int32}), None)
    if at is None:
        return None
    ids = facts.operands[at]
    dim = facts.argument(1, "dim", 0)
    if isinstance(dim, int) and x.sizes and not -len(x.sizes) <= dim < len(x.sizes):
        lacks = f"`{op}` uses dimension {dim}, which does not exist: {told(x)} has dimensions {-len(x.sizes)} to {len(x.sizes) - 1}"
        lost = squeezed(facts, x)
        return Diagnosis(f"{lacks}{lost.words}" if lost else lacks, lost.edits if lost else (), x)
    size = x.sizes[dim] if isinstance(dim, int) and -len(x.sizes) <= dim < len(x.sizes) else 0
    values = facts.values(ids.tensor)
    if (wrong := beyond(values, size)) is not None:
        place = f"{named(ids, 'the index')} of {shape(ids.sizes)} into {told(x)}"
        sentence = f"`{op}` along dimension {dim}, which has {size} (0 to {size - 1}), gets index {wrong}: {place}"
        return Diagnosis(sentence, (), ids)
    if op.startswith("index_"):  # which take an index of one dimension
        edits = on_operand(facts, at, method("flatten"), rank=4) if len(ids.sizes) > 1 else []
    else:
        edits = _spread(facts, at, dim if isinstance(dim, int) else 0)
        if len(ids.sizes) == len(x.sizes) + 1 and 1 in ids.sizes:
            edits += on_operand(facts, at, method("squeeze", ids.sizes.index(1)), rank=4)
    if not edits:  # the op itself is asked what does not fit
        return None
    name = f"the index{f' `{ids.name}`' if ids.name else ''} of {shape(ids.sizes)}"
    return Diagnosis(f"`{op}` cannot use {name} along dimension {dim} of {told(x)}", tuple(edits), ids)


def embedding(facts: FailureFacts) -> Diagnosis | None:
    """``emb`` has 10 rows (0 to 9), gets index 10."""
    if facts.op not in {"embedding", "embedding_bag"}:
        return None
    ids, table = facts.operands[0], facts.operands[1]
    if facts.op == "embedding_bag" and not table.owned and ids.owned:
        ids, table = table, ids
    if ids.tensor.dtype not in {torch.int64, torch.int32}:
        at = facts.operands.index(ids)
        sentence = f"{facts.who} expects integer indices, and {named(ids)} is {short_dtype(ids)}"
        return Diagnosis(sentence, tuple(on_operand(facts, at, method("long"), rank=1, why="indices are int64")), ids)
    values, rows = facts.values(ids.tensor), table.sizes[0]
    wrong = beyond(values, rows)
    if values is None or wrong is None:
        return None
    low, high = int(values.min()), int(values.max())
    place = [int(index) for index in (values == wrong).nonzero()[0]]
    where = f" at {f'`{ids.name}`' if ids.name else ''}{place}" if place else ""
    sentence = f"{facts.who} has {rows} rows (0 to {rows - 1}), gets index {wrong}{where}"
    positions = positions_in(ids.made)
    if positions is not None and positions[1] > rows:
        sentence += f": `{positions[0].op}` returns one of {positions[1]} {came_from(positions[0].inputs[0][1])}".rstrip()
    edits = _embedding_edits(facts, ids, (low, high), rows)
    if maker(ids.made) is not None and not ids.is_input and low == 0:  # positions, counted along a sequence
        long = too_long(facts, high + 1, rows)
        sentence += f": {long}" if long else ""
        edits += shortened(facts, high + 1, rows, rank=25 if facts.site is not None else 10)
    return Diagnosis(sentence, tuple(edits), ids)


def _embedding_edits(facts: FailureFacts, ids: Operand, ends: tuple[int, int], rows: int) -> list[Repair]:
    low, high = ends
    if low < 0 or not isinstance(facts.module, (nn.Embedding, nn.EmbeddingBag)):
        return []
    positions = positions_in(ids.made)
    last = high if positions is None else max(high, positions[1] - 1)
    edits = rebuilt_module(facts.module, facts.path, num_embeddings=last + 1, why=f"rows for the indices 0 to {last}")
    if positions is not None:
        edits += producer_edits(facts, replace(ids, made=positions[0].inputs[0][1]), positions[1], rows, rank=22)
    elif high == rows and any(step.op in _ROUNDS for step in steps(ids.made)):  # such as bins of which the last one has one number
        edits += on_operand(facts, 0, as_written(f"{{0}}.clamp(max={rows - 1})"), rank=8, why="no index beyond the last row")
    if low and high == rows:
        edits += on_operand(facts, 0, as_written("{0} - 1"), rank=30, why="indices starting at 0")
    return edits
