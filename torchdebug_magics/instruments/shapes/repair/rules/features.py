"""Linear and Bilinear: the last dimension is to have as many features as the weights have columns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand, parameter_edit, then, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.earlier import Earlier, at_step, earlier, with_size
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import counted, is_rounded, shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import (
    Diagnosis,
    gets,
    named,
    producer_edits,
    reordered,
    short_dtype,
    there_and_back,
    told,
)
from torchdebug_magics.instruments.shapes.repair.size_history import (
    RESHAPES,
    TURNS,
    channels_first,
    is_flattened,
    maker,
    product,
    same_input,
    steps,
)

_IMAGES = 4


def linear(facts: Facts) -> Diagnosis | None:
    """``fc1`` expects 256 features, gets 576."""
    if facts.op not in {"linear", "addmm"} or len(facts.operands) < 2:
        return None
    at = 1 if facts.op == "addmm" else 0
    x, weight = facts.operands[at], facts.operands[at + 1]
    if not x.sizes:
        return None
    if len(weight.sizes) > 2:
        words = f"`{facts.op}` takes weights of 2 dimensions (out, in) for all samples, and {named(weight, 'its weight')}"
        return Diagnosis(f"{words} is {shape(weight.sizes)}", (), weight)
    if len(weight.sizes) != 2:
        return None
    expected = weight.sizes[1] if facts.op == "linear" else weight.sizes[0]
    got = x.sizes[-1]
    if got == expected:
        return None
    whole = "" if product(x.made, got) or len(x.sizes) <= 2 else f", the last dimension of {shape(x.sizes)}"
    sentence = f"{_who(facts, weight.name)} expects {expected} features, gets {gets(x, got)}{whole}"
    if found := earlier(facts, x, expected):
        edits = with_size(facts, found, expected, "in_features")
        return Diagnosis(sentence + found.words, edits if edits or not found.size else tuple(_edits(facts, at, expected)), x)
    if found := unjoined(facts, x, expected):
        return Diagnosis(sentence + found.words, (*found.edits, *_edits(facts, at, expected)), x)
    if found := unpooled(x, expected):
        return Diagnosis(sentence + found.words, (*found.edits, *_edits(facts, at, expected)), x, (got, expected))
    return Diagnosis(
        sentence, tuple(_edits(facts, at, expected)), x, (got, expected) if product(x.made, got) or is_flattened(x.made) else None
    )


def _who(facts: Facts, weight: str) -> str:
    return facts.who if isinstance(facts.module, nn.Linear) else f"`{facts.op}`{f' with `{weight}`' if weight else ''}"


def _edits(facts: Facts, at: int, expected: int) -> list[Edit]:
    x = facts.operands[at]
    got = x.sizes[-1]
    edits: list[Edit] = []
    if len(x.sizes) == _IMAGES and x.sizes[1] * x.sizes[3] == expected and not channels_first(x.made):
        change = then(method("transpose", 1, 2), method("flatten", 2))
        edits += on_operand(facts, at, change, rank=2, why=f"the {x.sizes[1]} heads of {x.sizes[3]} side by side")
    if len(x.sizes) > 2:
        right = math.prod(x.sizes[1:]) == expected
        flat = on_operand(facts, at, method("flatten", 1), rank=1 if right else 12, why=f"{shape(x.sizes[1:])} in one dimension")
        edits += flat if right else []
        if not right and _is_picture(x) and flat and isinstance(facts.module, nn.Linear):
            edits += [together(flat[0], one) for one in rebuilt_module(facts.module, facts.path, in_features=math.prod(x.sizes[1:]))]
    if math.prod(x.sizes) == expected and len(x.sizes) > 1:
        edits += on_operand(facts, at, method("reshape", 1, -1), rank=6, why="a batch of 1") if same_input(x.made) else []
    edits += reordered(facts, at, -1, expected)
    edits += there_and_back(facts, at, -1, expected) if isinstance(facts.module, nn.Linear) else []
    if expected == 1:
        edits += on_operand(facts, at, method("unsqueeze", -1), rank=4, why="a feature dimension of one")
    if isinstance(facts.module, nn.Linear):
        # Behind a convolution, the last dimension alone is seldom what is meant.
        rank = 45 if _is_picture(x) else 44 if _is_tied(facts) else 20
        edits += rebuilt_module(facts.module, facts.path, in_features=got, rank=rank)
    else:
        weight = facts.operands[at + 1]
        sizes = (weight.sizes[0], got) if facts.op == "linear" else (got, weight.sizes[1])
        edits += parameter_edit(weight, sizes, rank=20)
    return edits + producer_edits(facts, x, got, expected)


def _is_picture(x: Operand) -> bool:
    """Whether its last dimension may be a width: not where the features were put there, or joined there."""
    if len(x.sizes) < _IMAGES:
        return False
    step = maker(x.made)
    of_input = step is not None and step.number == 0 and not any(one.op in TURNS for one in steps(x.made))
    return channels_first(x.made) or of_input


def _is_tied(facts: Facts) -> bool:
    """Whether another module has the same weights, which a new one would not have."""
    weight = getattr(facts.module, "weight", None)
    return sum(any(one is weight for one in part._parameters.values()) for part in facts.modules.values()) > 1


def distances(facts: Facts) -> Diagnosis | None:
    """``torch.cdist``: rows of one width on both sides."""
    if facts.op != "cdist" or len(facts.operands) < 2 or not all(len(one.sizes) > 1 for one in facts.operands[:2]):
        return None
    a, b = facts.operands[:2]
    width, other = a.sizes[-1], b.sizes[-1]
    if width == other:
        return None
    sentence = f"`cdist` expects rows of one width, gets {told(a)} and {told(b)}: {width} and {other}"
    edits = [*producer_edits(facts, a, width, other, rank=15), *producer_edits(facts, b, other, width, rank=16)]
    for one, to in ((b, width), (a, other)):
        edits += parameter_edit(one, (*one.sizes[:-1], to))
    return Diagnosis(sentence, tuple(edits), a)


def bilinear(facts: Facts) -> Diagnosis | None:
    """Either input."""
    module = facts.module
    if not isinstance(module, nn.Bilinear) or len(facts.operands) < 2:
        return None
    for at, name in enumerate(("in1_features", "in2_features")):
        x, expected = facts.operands[at], getattr(module, name)
        if x.sizes and x.sizes[-1] != expected:
            sentence = f"{facts.who} expects {expected} features ({name}) in {named(x)}, gets {gets(x, x.sizes[-1])}"
            edits = [*reordered(facts, at, -1, expected), *rebuilt_module(module, facts.path, **dict[str, Any]({name: x.sizes[-1]}))]
            edits += producer_edits(facts, x, x.sizes[-1], expected)
            return Diagnosis(sentence, tuple(edits), x)
    first, second = facts.operands[0], facts.operands[1]
    if first.sizes[:-1] != second.sizes[:-1]:
        return Diagnosis(
            f"{facts.who} expects two inputs of the same rows, gets {shape(first.sizes)} and {shape(second.sizes)}", (), second
        )
    return None


def embedding(facts: Facts) -> Diagnosis | None:
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
    values = facts.values(ids.tensor)
    rows = table.sizes[0]
    if values is None or not values.numel() or (int(values.min()) >= 0 and int(values.max()) < rows):
        return None
    return _beyond(facts, ids, values, rows)


def _beyond(facts: Facts, ids: Operand, values: torch.Tensor, rows: int) -> Diagnosis:
    low, high = int(values.min()), int(values.max())
    wrong = high if high >= rows else low
    place = [int(one) for one in (values == wrong).nonzero()[0]]
    where = f" at {f'`{ids.name}`' if ids.name else ''}{place}" if place else ""
    sentence = f"{facts.who} has {rows} rows (0 to {rows - 1}), gets index {wrong}{where}"
    found = counted(ids.made)
    if found is not None and found.many > rows:
        sentence += f": `{found.op}` returns one of {found.many}{f' {found.source}' if found.source else ''}"
    edits = _embedding_edits(facts, ids, (low, high), rows) if low >= 0 else []
    if maker(ids.made) is not None and not ids.is_input and low == 0:  # positions, counted along a sequence
        long = too_long(facts, high + 1, rows)
        sentence += f": {long}" if long else ""
        edits += shortened(facts, high + 1, rows, rank=25 if facts.site is not None else 10)
    return Diagnosis(sentence, tuple(edits), ids)


def _embedding_edits(facts: Facts, ids: Operand, ends: tuple[int, int], rows: int) -> list[Edit]:
    if not isinstance(facts.module, (nn.Embedding, nn.EmbeddingBag)):
        return []
    low, high = ends
    found = counted(ids.made)
    last = max(high, found.many - 1) if found is not None else high
    edits = rebuilt_module(facts.module, facts.path, num_embeddings=last + 1, why=f"rows for the indices 0 to {last}")
    if found is not None and found.before is not None:
        looked_through = Operand(ids.tensor, "", owned=False, made=found.before)
        edits += producer_edits(facts, looked_through, found.many, rows, rank=22)
    if high != rows:
        return edits
    if found is None and is_rounded(ids.made):
        change = Change(f"{{}}.clamp(max={rows - 1})".format, lambda one: one.clamp(max=rows - 1))
        edits += on_operand(facts, 0, change, rank=8, why="no index beyond the last row")
    if low >= 1:
        edits += on_operand(facts, 0, Change(lambda x: f"{x} - 1", lambda one: one - 1), rank=30, why="indices starting at 0")
    return edits


def unpooled(x: Operand, wanted: int) -> Earlier | None:
    """``x.view(n, -1)`` of a picture whose channels alone are what is wanted: each was to be one number."""
    for step in steps(x.made):
        before = step.inputs[0] if step.inputs else ((), None)
        if step.shape != x.sizes or step.op not in RESHAPES:
            return None
        if len(before[0]) > 2 and before[0][:2] == (x.sizes[0], wanted) and len(x.sizes) == 2 and channels_first(before[1]):
            return Earlier(f": its {wanted} channels were not pooled", _pooled(step, tuple(range(2, len(before[0])))), wanted)
    return None


def unjoined(facts: Facts, x: Operand, wanted: int) -> Earlier | None:
    """The states of several layers, or of both directions, of which all were wanted side by side."""
    for step in steps(x.made):
        module = facts.modules.get(step.module)
        if not isinstance(module, nn.RNNBase) or len(step.shape) != 3 or step.shape[0] * step.shape[2] != wanted:
            if step.op != "squeeze" and step.shape != x.sizes:
                return None
            continue
        if step.shape[0] != module.num_layers * (2 if module.bidirectional else 1) or step.shape[0] == 1:
            return None
        return Earlier(
            f": the {step.shape[0]} states of {step.shape[2]} are stacked along the first dimension of {shape(step.shape)}",
            _side_by_side(facts, x, step),
            wanted,
        )
    return None


def _side_by_side(facts: Facts, x: Operand, step: Made) -> tuple[Edit, ...]:
    change = then(method("transpose", 0, 1), method("flatten", 1))
    squeezes = next((one for one in steps(x.made) if one.op == "squeeze"), None)
    if squeezes is not None:
        return at_step(squeezes, lambda _, y: change.text(y), lambda _, args, __: change.apply(args[0]))
    at = next(at for at, one in enumerate(facts.operands) if one is x)
    return tuple(on_operand(facts, at, change, rank=1)) if x.sizes == step.shape else ()


def _pooled(step: Made, places: Sizes) -> tuple[Edit, ...]:
    why = f"each channel as one value, instead of `{step.op}`"
    edits = at_step(step, lambda _, x: f"{x}.mean({places})", lambda _, args, __: args[0].mean(places))
    return tuple(replace(edit, why=why) for edit in edits)
