"""Linear and Bilinear: the last dimension is to have as many features as the weights have columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, method, on_operand, parameter_edit, then, together
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import (
    Diagnosis,
    gets,
    named,
    producer_edits,
    reordered,
    there_and_back,
    told,
)
from torchdebug_magics.instruments.shapes.repair.rules.steps.earlier import earlier, with_size
from torchdebug_magics.instruments.shapes.repair.rules.steps.gathered import unjoined, unpooled
from torchdebug_magics.instruments.shapes.repair.size_history import TURNS, channels_first, is_flattened, maker, product, same_input, steps

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["bilinear", "distances", "linear"]

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
