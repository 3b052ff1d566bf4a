"""Losses: targets of the wrong shape, dtype or class."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.broadcasts import PAIRED_LOSSES
from torchdebug_magics.instruments.shapes.repair.around import rewritten
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, as_typed, method, on_operand, then
from torchdebug_magics.instruments.shapes.repair.failure_facts import is_loss
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.layers.class_losses import classes_and_scores, last_step, resized_output
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, orders, producer_edits, short_dtype, told, turned
from torchdebug_magics.instruments.shapes.repair.rules.steps.earlier import squeezed
from torchdebug_magics.instruments.shapes.repair.size_history import maker, makers

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["loss"]

_CLASSES = frozenset({"cross_entropy", "nll_loss", "nll_loss_nd"})


def loss(facts: Facts) -> Diagnosis | None:
    """Diagnose losses: of classes, and of values that are compared elementwise."""
    if facts.op not in _CLASSES | PAIRED_LOSSES or len(facts.operands) < 2:
        return None
    scores, target = facts.operands[0], facts.operands[1]
    if scores.tensor.device != target.tensor.device:
        return None
    return classes_and_scores(facts, scores, target) if facts.op in _CLASSES else _pairs(facts, scores, target)


def _cast_too(facts: Facts, at: int, change: Change, *, rank: int) -> list[Edit]:
    """The target in floating point, too, where it is not; a change of the scores alone would not do then."""
    if facts.operands[1].tensor.is_floating_point():
        return on_operand(facts, at, change, rank=rank)
    return on_operand(facts, 1, then(change, method("float")), rank=rank) if at else []


def _pairs(facts: Facts, scores: Operand, target: Operand) -> Diagnosis | None:
    if scores.sizes == target.sizes:
        if scores.tensor.dtype == target.tensor.dtype:
            return None
        casts = on_operand(facts, 1, method("float"), rank=2) if scores.tensor.dtype is torch.float32 else []
        return Diagnosis(f"`{facts.op}` expects a target of {short_dtype(scores)}, gets {short_dtype(target)}", tuple(casts), target)
    step = maker(scores.made)
    made = step is not None and step.module in facts.modules
    who = facts.who if facts.is_compared else f"`{facts.op}`"
    sentence = f"{who} expects a target of {shape(scores.sizes)}, as its input, gets {shape(target.sizes)}"
    if made:  # the target is data: what came to another size is the output
        sentence = f"{who} compares {told(scores)} with {told(target)}"
    if classes := _classes_meant(facts, scores, target):
        return Diagnosis(f"{sentence}: these are classes, for `cross_entropy`", tuple(classes), scores)
    if larger := _one_each(facts, scores, target):
        return replace(larger, sentence=f"{sentence}{larger.sentence}")
    if lost := squeezed(facts, scores):
        return Diagnosis(f"{sentence}{lost.words}", lost.edits, scores)
    edits = [*last_step(facts, scores, target.sizes), *_same_numbers(facts, scores, target), *_same_rank(facts, scores, target)]
    return Diagnosis(sentence, tuple(edits), scores if made else target)


def _same_numbers(facts: Facts, scores: Operand, target: Operand) -> list[Edit]:
    """As many numbers on both sides, but for the dimensions in which they stand."""
    edits: list[Edit] = []
    for at, (one, other) in enumerate(((scores, target), (target, scores))):
        for dim in reversed(range(len(one.sizes))):
            if one.sizes[dim] == 1 and (*one.sizes[:dim], *one.sizes[dim + 1 :]) == other.sizes:
                shown = -1 if dim == len(one.sizes) - 1 else dim
                edits += _cast_too(facts, at, method("squeeze", shown), rank=3)
                edits += _cast_too(facts, 1 - at, method("unsqueeze", shown), rank=4)
    if math.prod(scores.sizes[1:]) == math.prod(target.sizes[1:]) and scores.sizes[:1] == target.sizes[:1]:
        edits += _cast_too(facts, 1, method("flatten", 1), rank=3) if len(scores.sizes) == 2 < len(target.sizes) else []
        edits += on_operand(facts, 0, method("flatten", 1), rank=4) if len(target.sizes) == 2 < len(scores.sizes) else []
    return edits


def _same_rank(facts: Facts, scores: Operand, target: Operand) -> list[Edit]:
    """As many dimensions on both sides, of other sizes or in another order."""
    edits: list[Edit] = []
    if len(scores.sizes) == len(target.sizes):
        differ = [dim for dim, pair in enumerate(zip(scores.sizes, target.sizes, strict=True)) if pair[0] != pair[1]]
        edits += resized_output(facts, scores, target, f"{target.name}.shape[2:]" if target.name else str(target.sizes[2:]))
        if differ == [len(scores.sizes) - 1] or len(differ) == 1:
            edits += producer_edits(facts, scores, scores.sizes[differ[0]], target.sizes[differ[0]], rank=15)
        if sorted(scores.sizes) == sorted(target.sizes):
            order = next((one for one in orders(len(target.sizes)) if tuple(target.sizes[dim] for dim in one) == scores.sizes), None)
            edits += turned(facts, 1, order, rank=6) if order is not None else []
    return edits


def _classes_meant(facts: Facts, scores: Operand, target: Operand) -> list[Edit]:
    """Scores of several classes against the numbers of classes: the loss was meant to be another one."""
    values = facts.values(target.tensor) if not target.tensor.is_floating_point() else None
    if len(scores.sizes) != 2 or target.sizes != scores.sizes[:1] or scores.sizes[1] < 2 or values is None or not values.numel():
        return []
    if int(values.min()) < 0 or int(values.max()) >= scores.sizes[1]:
        return []
    why = "scores of several classes against class numbers"
    if facts.path and is_loss(facts.module):
        code = f"{as_typed(facts.path)} = nn.CrossEntropyLoss()"
        return [Edit(code, why, 2, modules={facts.path: lambda _: nn.CrossEntropyLoss()})]
    return rewritten(
        facts,
        lambda call: f"F.cross_entropy({', '.join(map(ast.unparse, call.args[:2]))})",
        lambda _, args, __: nn.functional.cross_entropy(*args[:2]),
        rank=2,
        why=why,
    )


def _one_each(facts: Facts, scores: Operand, target: Operand) -> Diagnosis | None:
    """A convolution that was to leave one number of each picture, and leaves several as the pictures are larger than it was made for."""
    many, rest = divmod(math.prod(scores.sizes), math.prod(target.sizes) or 1)
    for step in makers(scores.made) if not rest and many > 1 else ():
        module = facts.modules.get(step.module)
        if not isinstance(module, nn.modules.conv._ConvNd) or module.transposed or math.prod(step.shape[2:]) != many:
            continue
        if math.prod(step.shape[:2]) != math.prod(target.sizes) or {*module.dilation} != {1} or len({*step.inputs[0][0][2:]}) != 1:
            return None
        whole = step.inputs[0][0][-1]
        why = f"all {shape((whole,) * len(step.shape[2:]))} in one value"
        is_last = {*module.stride} == {1} and not any(module.padding if isinstance(module.padding, tuple) else (1,))
        edits = rebuilt_module(module, step.module, kernel_size=whole, rank=10, why=why) if is_last else []
        words = f": `{step.module}` leaves {shape(step.shape[2:])} values per image, not one"
        return Diagnosis(words, tuple(edits), scores, fit=(many, 1))
    return None
