"""Losses: targets of the wrong shape, dtype or class."""

from __future__ import annotations

import ast
import math
from dataclasses import replace

import torch
from torch import nn

from torchdebug_magics.format import listed, number, shape
from torchdebug_magics.instruments.shapes.follow.suspects import PAIRED_LOSSES
from torchdebug_magics.instruments.shapes.repair.edit import Repair, ValueChange, as_typed, as_written, method, on_operand, then
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, is_loss
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.candidates import as_large, laid_out_as
from torchdebug_magics.instruments.shapes.repair.rules.dtypes_and_devices import cast
from torchdebug_magics.instruments.shapes.repair.rules.earlier import FLAT, at_step, otherwise, squeezed, words
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import beyond
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import (
    Diagnosis,
    named,
    producer_edits,
    reorder,
    rewritten,
    short_dtype,
    told,
)
from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, maker, makers, steps

_CLASSES = frozenset({"cross_entropy", "nll_loss", "nll_loss_nd"})
_TWO, _BYTE = 2, 255
_IN_STEPS = 3
"""Dimensions of samples in steps."""
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])


def loss(facts: FailureFacts) -> Diagnosis | None:
    """Diagnose losses: of classes, and of values that are compared elementwise."""
    if facts.op not in _CLASSES | PAIRED_LOSSES or len(facts.operands) < 2:
        return None
    scores, target = facts.operands[0], facts.operands[1]
    if scores.tensor.device != target.tensor.device:
        return None
    return classes_and_scores(facts, scores, target) if facts.op in _CLASSES else _pairs(facts, scores, target)


def _cast_too(facts: FailureFacts, at: int, change: ValueChange, *, rank: int) -> list[Repair]:
    """The target in floating point, too, where it is not; a change of the scores alone would not do then."""
    if facts.operands[1].tensor.is_floating_point():
        return on_operand(facts, at, change, rank=rank)
    return on_operand(facts, 1, then(change, method("float")), rank=rank) if at else []


def _pairs(facts: FailureFacts, scores: Operand, target: Operand) -> Diagnosis | None:
    if scores.sizes == target.sizes:
        if scores.tensor.dtype == target.tensor.dtype:
            return _no_probabilities(facts) if facts.op == "binary_cross_entropy" else None
        casts = tuple(cast(facts, 1, scores.tensor.dtype, rank=2))
        return Diagnosis(f"`{facts.op}` expects a target of {short_dtype(scores)}, gets {short_dtype(target)}", casts, target)
    step = maker(scores.made)
    made = step is not None and step.module in facts.modules
    who = f"`{facts.op}`"
    sentence = f"{who} expects a target of {shape(scores.sizes)}, as its input, gets {shape(target.sizes)}"
    if made:  # the target is data: what came to another size is the output
        sentence = f"{who} compares {told(scores)} with {told(target)}"
    if classes := _classes_meant(facts, scores, target):
        return Diagnosis(f"{sentence}: these are classes, for `cross_entropy`", tuple(classes), scores)
    if larger := _one_each(facts, scores, target):
        return replace(larger, sentence=f"{sentence}{larger.sentence}")
    if lost := squeezed(facts, scores):
        return Diagnosis(f"{sentence}{lost.words}", lost.edits, scores)
    if scores.sizes[1:] == target.sizes[1:] and scores.sizes and (cause := _other_rows(facts, scores, target)):
        return cause
    edits = [*last_step(facts, scores, target.sizes), *_same_numbers(facts, scores, target), *_same_rank(facts, scores, target)]
    return Diagnosis(sentence, tuple(edits), scores if made else target)


def _no_probabilities(facts: FailureFacts) -> Diagnosis | None:
    """Probabilities, and targets, that do not lie between 0 and 1."""
    for at, operand in enumerate(facts.operands[:2]):
        values = facts.values(operand.tensor)
        if values is None or not values.numel() or bool(values.isnan().any()):
            continue
        low, high = float(values.min()), float(values.max())
        if low >= 0 and high <= 1:
            continue
        changes = [] if at else [(method("sigmoid"), "the outputs of the model are logits")]
        if at and low >= 0 and _TWO < high <= _BYTE and bool((values == values.round()).all()):
            changes = [(as_written("{0} / 255"), "pixels as they are stored")]
        elif at and low >= -1 and high <= 1:
            changes = [(as_written("({0} + 1) / 2"), "pixels from -1 to 1")]
        edits = [edit for change, why in changes for edit in on_operand(facts, at, change, rank=2, why=why)]
        what = "targets" if at else "probabilities"
        sentence = f"`{facts.op}` expects {what} from 0 to 1, gets {named(operand, 'what')} from {number(low)} to {number(high)}"
        return Diagnosis(sentence, tuple(edits), operand)
    return None


def _same_numbers(facts: FailureFacts, scores: Operand, target: Operand) -> list[Repair]:
    """As many numbers on both sides, but for the dimensions in which they stand."""
    changes = [(0, change, rank) for change, rank in laid_out_as(scores, target.sizes)]
    changes += [(1, change, rank) for change, rank in laid_out_as(target, scores.sizes)]
    return [edit for at, change, rank in changes for edit in _cast_too(facts, at, change, rank=rank)]


def _same_rank(facts: FailureFacts, scores: Operand, target: Operand) -> list[Repair]:
    """As many dimensions on both sides, of other sizes or in another order."""
    edits: list[Repair] = []
    if len(scores.sizes) == len(target.sizes):
        differ = [dim for dim, pair in enumerate(zip(scores.sizes, target.sizes, strict=True)) if pair[0] != pair[1]]
        edits += resized_output(facts, scores, target, f"{target.name}.shape[2:]" if target.name else str(target.sizes[2:]))
        if differ == [len(scores.sizes) - 1] or len(differ) == 1:
            edits += producer_edits(facts, scores, scores.sizes[differ[0]], target.sizes[differ[0]], rank=15)
    return edits


def _classes_meant(facts: FailureFacts, scores: Operand, target: Operand) -> list[Repair]:
    """Scores of several classes against the numbers of classes: the loss was meant to be another one."""
    values = facts.values(target.tensor) if not target.tensor.is_floating_point() else None
    if len(scores.sizes) != 2 or target.sizes != scores.sizes[:1] or scores.sizes[1] < 2 or values is None or not values.numel():
        return []
    if beyond(values, scores.sizes[1]) is not None:
        return []
    why = "scores of several classes against class numbers"
    if facts.path and is_loss(facts.module):
        code = f"{as_typed(facts.path)} = nn.CrossEntropyLoss()"
        return [Repair(code, why, 2, modules={facts.path: lambda _: nn.CrossEntropyLoss()})]

    def write(call: ast.Call) -> str:
        return f"F.cross_entropy({', '.join(map(ast.unparse, call.args[:2]))})"

    return rewritten(facts, write, lambda _, args, __: nn.functional.cross_entropy(*args[:2]), rank=2, why=why)


def _one_each(facts: FailureFacts, scores: Operand, target: Operand) -> Diagnosis | None:
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


def classes_and_scores(facts: FailureFacts, scores: Operand, target: Operand) -> Diagnosis | None:
    """Cross entropy and its like: the classes stand in dimension 1, and the target has one number for each."""
    op = f"`{facts.op}`"
    many = len(scores.sizes)
    if len(target.sizes) == 1 and (call := otherwise(scores, (*target.sizes, *scores.sizes[1:]).__eq__)) is not None:
        return Diagnosis(f"{op} compares {told(scores)} with a target of {shape(target.sizes)}{words(*call)}", call[1], scores)
    if many == 2 and len(target.sizes) == 1 and scores.sizes[0] != target.sizes[0] and (cause := _one_hot(facts, scores, target)):
        return cause
    if target.sizes and target.sizes[0] != scores.sizes[0] and (cause := _other_rows(facts, scores, target)):
        return cause
    classes = scores.sizes[1] if many > 1 else scores.sizes[0] if many else 0
    wanted = (*scores.sizes[:1], *scores.sizes[2:]) if many > 1 else ()
    if target.sizes == scores.sizes and not target.tensor.is_floating_point():
        edits = on_operand(facts, 1, method("float"), rank=8, why="probabilities of the classes")
        sentence = f"{op} reads {named(target)} of {shape(target.sizes)} as probabilities, and it is {short_dtype(target)}"
        return Diagnosis(sentence, tuple(edits), target)
    if target.sizes == wanted and target.tensor.dtype is not torch.int64 and target.tensor.dtype is not torch.uint8:
        edits = on_operand(facts, 1, method("long"), rank=2, why="classes are int64")
        return Diagnosis(f"{op} expects int64 classes, and {named(target, 'the target')} is {short_dtype(target)}", tuple(edits), target)
    if target.sizes == wanted:
        return _out_of_range(facts, scores, target, classes)
    if target.tensor.is_floating_point() and many == len(target.sizes) == 2 and target.sizes[0] == scores.sizes[0] and target.sizes[1] > 1:
        sentence = f"{op} of scores {shape(scores.sizes)} expects as many columns in a target of probabilities, gets {shape(target.sizes)}"
        return Diagnosis(sentence, tuple(producer_edits(facts, scores, classes, target.sizes[1], rank=10)), target)
    if many == 1:
        sentence = f"{op} reads scores of {classes} as one sample, and its target has {shape(target.sizes) or 'one'} classes"
        return Diagnosis(sentence, (), scores)
    expects = f"{op} of scores {shape(scores.sizes)} expects a target of {shape(wanted)}"
    sentence = f"{expects} (classes are dimension 1), gets {shape(target.sizes)}"
    is_output = len(wanted) == len(target.sizes) > 1 and wanted[0] == target.sizes[0]  # as high and wide as the data is what it is to be
    return Diagnosis(sentence, tuple(_class_edits(facts, scores, target, wanted)), scores if is_output else target)


def resized_output(facts: FailureFacts, scores: Operand, like: Operand, size: str) -> list[Repair]:
    """The output as high and wide as the target: by what made it, or else by interpolation."""
    edits = as_large(facts, scores, like)
    step = maker(scores.made)
    is_output = step is not None and step.module in facts.modules and not (like.made is not None and like.made.of_model)
    if edits or not is_output or len(scores.sizes) != 4 or scores.sizes[:2] != like.sizes[:2] or scores.sizes == like.sizes:
        return edits
    whole = like.sizes[2:]
    form = "F.interpolate({{0}}, size={}, mode='bilinear')"
    change = ValueChange(form.format(size).format, as_written(form.format(whole)).apply)
    return on_operand(facts, 0, change, rank=20, why=f"{shape(scores.sizes[2:])} becomes {shape(whole)}")


def last_step(facts: FailureFacts, scores: Operand, wanted: tuple[int, ...]) -> list[Repair]:
    """The last step of what a recurrent module gave for all of them."""
    module = next((facts.modules.get(step.module) for step in makers(scores.made) if step.op in _RECURRENT), None)
    first = 1 if getattr(module, "batch_first", False) else 0
    if module is None or (*scores.sizes[:first], *scores.sizes[first + 1 :]) != wanted:
        return []
    change = as_written("{0}[:, -1]" if first else "{0}[-1]")
    return on_operand(facts, 0, change, rank=2, why="the last step alone")


def _one_hot(facts: FailureFacts, scores: Operand, target: Operand) -> Diagnosis | None:
    """One-hot rows of which a reshape made one row."""
    step = target.made
    values = facts.values(target.tensor)
    if step is None or step.op not in RESHAPES or not step.inputs or step.inputs[0][0] != scores.sizes or values is None:
        return None
    rows = values.reshape(scores.sizes)
    if not bool(((rows == 0) | (rows == 1)).all() and (rows.sum(1) == 1).all()):
        return None
    edits = at_step(step, method("argmax", 1))
    sentence = f"`{facts.op}` of scores {shape(scores.sizes)} expects class indices, and the target is one-hot, {shape(scores.sizes)}"
    return Diagnosis(f"{sentence}: `{step.op}` made {target.sizes[0]} of it", edits, target)


def _other_rows(facts: FailureFacts, scores: Operand, target: Operand) -> Diagnosis | None:
    """A reshape on the way to the scores, in which features went into the batch, or the states of several layers."""
    many = target.sizes[0]
    for step in steps(scores.made):
        before = step.inputs[0][0] if step.inputs else ()
        if step.op not in RESHAPES or len(before) < _IN_STEPS or step.shape[:1] != scores.sizes[:1]:
            continue
        is_of_layers = before[1:2] == (many,) and step.shape == (before[0] * many, *before[2:])
        if before[0] == many or is_of_layers:
            edits = at_step(step, as_written("{0}[-1]"), why="the state of the last layer") if is_of_layers else at_step(step, FLAT)
            went = f"`{step.op}`{f' in `{step.module}`' if step.module else ''} made {shape(step.shape)} of {shape(before)}"
            return Diagnosis(f"`{facts.op}` gets {scores.sizes[0]} rows of scores for {many} targets: {went}", edits, scores)
    return None


def _class_edits(facts: FailureFacts, scores: Operand, target: Operand, wanted: tuple[int, ...]) -> list[Repair]:
    edits = last_step(facts, scores, (*target.sizes, scores.sizes[-1]))
    edits += other[1] if (other := otherwise(target, wanted.__eq__)) is not None else ()
    for change, rank in laid_out_as(target, wanted):
        edits += on_operand(facts, 1, change, rank=rank)
    many = len(scores.sizes)
    if many > 2 and target.sizes == scores.sizes[:-1]:
        order = (0, many - 1, *range(1, many - 1))
        edits += on_operand(facts, 0, reorder(order), rank=2, why="the classes in dimension 1")
    if many > 3 and len(target.sizes) == many - 1 and target.sizes[0] == scores.sizes[0]:
        like = replace(target, tensor=torch.empty(*scores.sizes[:2], *target.sizes[1:], device="meta"))
        edits += resized_output(facts, scores, like, f"{target.name}.shape[1:]" if target.name else str(target.sizes[1:]))
    if many == 2 and len(target.sizes) == 2 and target.sizes[0] * target.sizes[1] == scores.sizes[0]:
        edits += on_operand(facts, 1, method("flatten"), rank=2, why="a class a row")
    if many == 2 and target.sizes == scores.sizes:
        edits += on_operand(facts, 1, method("argmax", 1), rank=12, why="the class of a one-hot row")
    if target.tensor.is_floating_point():
        edits += on_operand(facts, 1, method("long"), rank=20, why="classes are int64")
    return edits


def _out_of_range(facts: FailureFacts, scores: Operand, target: Operand, classes: int) -> Diagnosis | None:
    values = facts.values(target.tensor)
    ignored = facts.kwargs.get("ignore_index", getattr(facts.module, "ignore_index", -100))
    kept = values[values != ignored] if values is not None else None
    if kept is None or (wrong := beyond(kept, classes)) is None:
        return None
    sentence = f"`{facts.op}` has scores of {classes} classes (0 to {classes - 1}), and {named(target, 'the target')} holds class {wrong}"
    edits = producer_edits(facts, scores, classes, wrong + 1, rank=10) if wrong >= classes else []
    levels = kept.unique()
    is_whole = values is not None and kept.numel() == values.numel()  # else what is ignored would become a class
    if is_whole and len(levels) == classes and wrong > classes:  # which stand for the classes, and do not number them
        sentence += f": its {classes} values are {listed([f'{int(level)}' for level in levels])}"
        known = f"torch.tensor({levels.tolist()}, device={{0}}.device)"
        text = "({0} > 0).long()" if classes == _TWO and not int(levels[0]) else f"torch.searchsorted({known}, {{0}})"
        edits += on_operand(facts, 1, as_written(text), rank=2, why="a number from 0 on for each value")
    lowest = int(kept.min())
    if (wrong == classes and lowest >= 1) or (lowest < 0 and int(kept.max()) - lowest < classes):
        from_zero = as_written("{0} - 1" if lowest > 0 else f"{{0}} + {max(-lowest, 1)}")
        rank = 2 if lowest == 1 and wrong == classes else 12  # as many classes as scores, numbered from 1 on
        edits += on_operand(facts, 1, from_zero, rank=rank, why="classes starting at 0")
    return Diagnosis(sentence, tuple(edits), scores)
