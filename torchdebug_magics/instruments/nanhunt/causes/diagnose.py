"""Why a birth came about: the first rule that fits, each with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

import math

import torch

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
from torchdebug_magics.instruments.nanhunt.causes.op_table import (
    ANY,
    DIVISIONS,
    LOGS,
    MASKED_ROW,
    NEIGHBOUR_CAUSES,
    OP_CAUSES,
    POWERS,
    ROOTS,
    SELECTORS,
    Diagnosis,
    Row,
    Rule,
)
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import UNNAMED, owner_of, shares_memory, variable_name
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import on_purpose
from torchdebug_magics.instruments.nanhunt.walk.blamed_inputs import place_of, run_again
from torchdebug_magics.probing.ops import is_movement
from torchdebug_magics.probing.tensors import INF, NAN, bad_mask, is_bad, kind_of, largest, tensors_in

_MUCH, _TIMES, _LEAST = 1e4, 1e3, 1e-30
"""A number that has grown is so large, and so many times the smallest of late."""
_OR_ELSE = {"fp16": ", or use bfloat16", "bf16": ", or use the limit of the dtype from `torch.finfo`"}


def _overflow(evidence: Evidence) -> Diagnosis | None:
    tensor = evidence.birth.tensor
    if evidence.birth.kind != INF or tensor.dtype not in {torch.float16, torch.bfloat16}:
        return None
    if evidence.plain_name in LOGS | DIVISIONS | ROOTS and any(value == 0 for value in evidence.operands()):
        return None
    half, fits = "fp16" if tensor.dtype is torch.float16 else "bf16", _fits_float32(evidence)
    if half == "fp16" and not fits:
        return None
    limit = torch.finfo(tensor.dtype).max
    return Diagnosis(
        f"{half}_overflow",
        f"the result overflows {half}, whose largest number is {number(limit)}",
        ("compute this op in float32 (call `.float()` before it, or disable autocast around it), scale its inputs down" + _OR_ELSE[half])
        if fits
        else "scale its inputs down, or bound them with `clamp`: float32 has the same range as bf16",
    )


def _fits_float32(evidence: Evidence) -> bool:
    """Whether the op gives finite numbers in float32: it is asked."""
    op, mask = evidence.op, evidence.birth.mask
    if op is None or is_movement(op.func):
        return True  # a cast: what it was given is finite
    place = place_of(op, evidence.birth.tensor)
    outputs = run_again(op, lambda one: one.float() if one.dtype in {torch.float16, torch.bfloat16} else one)
    if outputs is None or place is None or place >= len(outputs):
        return True
    bad = bad_mask(outputs[place])
    return bad is None or not bool((bad if mask is None or mask.shape != bad.shape else bad & mask).any())


def _exploded(evidence: Evidence) -> Diagnosis | None:
    """Numbers that grew and grew until they left the range: the step was too long."""
    if evidence.birth.kind != INF or not _grew(evidence.context.history):
        return None
    values = [value for value in evidence.operands() if isinstance(value, float)]
    if any(value == 0 for value in values) and evidence.plain_name in LOGS | DIVISIONS | ROOTS | POWERS:
        return None
    finite = [value for value in evidence.context.history if math.isfinite(value)]
    return Diagnosis(
        "lr_too_high",
        f"the largest gradient or loss grew from {number(min(finite))} to {number(max(finite))}, then left the range",
        "lower the learning rate (try a tenth of it), warm it up, or scale the inputs down"
        + (", or clip the gradients before `step()`" if evidence.context.step else ""),
    )


def _grew(history: tuple[float, ...]) -> bool:
    finite = [value for value in history if math.isfinite(value) and value > 0][-30:]
    if not finite or finite[-1] * _TIMES < max(finite):  # a run that diverges may take a smaller step in between
        return False
    return finite[-1] > _MUCH and finite[-1] > _TIMES * max(min(finite), _LEAST)


def out_of_range(evidence: Evidence) -> Diagnosis | None:
    """Arithmetic on finite numbers that are too large for it; to be asked last."""
    op, tensor = evidence.op, evidence.birth.tensor
    if op is None or evidence.birth.kind != INF or not tensor.is_floating_point() or any(map(is_bad, op.inputs())):
        return None
    size = largest(op.inputs())
    if size < _MUCH:
        return None
    kind, derivative = str(tensor.dtype).removeprefix("torch."), "the derivative of " if op.backward else ""
    rows = evidence.rows if not op.backward else ()
    alone = f"row {rows[0]}" if len(rows) == 1 < len(tensor) else ""
    return Diagnosis(
        "overflow",
        f"{derivative}`{evidence.name}` overflowed the range of {kind}, which ends at {number(torch.finfo(tensor.dtype).max)}: "
        f"its largest input is {number(size)}" + (f", and no other row than {alone} overflows" if alone else ""),
        f"drop or repair {alone} before the model sees it, or bound the data with `clamp`"
        if alone
        else "keep magnitudes small where they grow: normalize them (a mean instead of a sum, LayerNorm between repeated layers), "
        + ("clip the gradients, " if op.backward else "")
        + "or compute with logarithms",
    )


RANGE_CAUSES: tuple[Rule, ...] = (_overflow, _exploded)
"""In the order they are tried."""


def _writes_nan(evidence: Evidence) -> bool:
    op = evidence.op
    return op is not None and any(map(_is_nan_number, (*op.args, *op.kwargs.values())))


def _is_nan_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):  # made of a number by torch
        return value.dim() == 0 and value.grad_fn is None and not value.requires_grad and bool(kind_of(value) & NAN)
    return isinstance(value, float) and math.isnan(value)


_FINITE_INSTEAD = "write a finite number instead, or select the valid elements before computing with them"
NAN_CONSTANTS: tuple[Rule, ...] = (
    Row(ANY, "nan_constant", lambda one: one.in_gradient and _writes_nan(one),
        "NaN is written here as a constant; the loss hides it, its derivative does not", _FINITE_INSTEAD),
    Row(ANY, "nan_constant", _writes_nan, "NaN is written here as a constant", _FINITE_INSTEAD),
)  # fmt: skip
INFINITE_CONSTANTS: tuple[Rule, ...] = (
    Row(ANY, "inf_constant", lambda one: one.kind != NAN and one.birth.on_purpose,
        "inf is written here as a constant, and reaches the loss (or the output)",
        "replace it before the loss (`torch.where`, `isfinite`), or start from a finite number"),
    Row(ANY, "mask_sign", lambda one: one.kind != NAN and one.op is not None and on_purpose(one.op, INF),
        "+inf is written here, and softmax of +inf is NaN: a mask needs -inf", "write `float('-inf')`"),
    Row(frozenset({"mul", "div", "add", "sub"}), "inf_constant",
        lambda one: one.kind != NAN and one.op is not None and any(isinstance(value, float) and math.isinf(value) for value in one.op.args),
        "a Python float used here is inf",
        "check where that float is computed: print it, or `assert math.isfinite(...)` before this line"),
)  # fmt: skip
"""An infinity that the code put in on purpose, and that nothing took out again."""


def where_trap(evidence: Evidence) -> Diagnosis | None:
    """The forward threw the bad value away, the derivative did not: 0 from the unselected branch times infinity."""
    op = evidence.known
    if op is None or not evidence.was_thrown_away():
        return None
    selector = next((consumer for consumer in evidence.consumers(op) if consumer.name.removesuffix("_") in SELECTORS), None)
    if selector is None:
        return None
    argument = "the denominator" if evidence.plain_name in DIVISIONS else "the argument"
    return Diagnosis(
        "where_trap",
        f"`{selector.name}` discards the value of `{op.name}`, but not its derivative: 0 times inf or NaN is NaN",
        f"make {argument} safe before `{op.name}`, not the result after it",
    )


def diagnose(evidence: Evidence) -> Diagnosis:
    """The first rule that fits; without one, what the op did."""
    rules = _LEAF if evidence.op is None else _BACKWARD if evidence.op.backward or evidence.in_gradient else _FORWARD
    for rule in rules:
        found = rule(evidence)
        if found is not None:
            return found
    return _plain(evidence)


def _bad_row(evidence: Evidence) -> Diagnosis | None:
    rows, columns = evidence.rows, evidence.columns
    given = (tensor for entry in evidence.context.entries for tensor in tensors_in((entry.args, entry.kwargs)))
    taker = "model" if columns or any(shares_memory(tensor, evidence.birth.tensor) for tensor in given) else "loss"
    if columns:
        which = f"column{'s' if len(columns) > 1 else ''} {', '.join(map(str, columns))}"
        where, fix = f"{which} of every row", ": dividing a constant column by its standard deviation, for example, gives NaN"
    else:
        where = which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows" if rows else "the tensor"
        fix = f" before the {taker} sees it{_good_rows(evidence, rows)}"
    return Diagnosis(
        "bad_data_row",
        f"the data contain {'NaN' if evidence.kind == NAN else 'inf'} in {where}; the {taker} only propagates it",
        f"drop or repair {which}{fix}",
    )


def _good_rows(evidence: Evidence, rows: tuple[int, ...]) -> str:
    """Code for the good rows, where there are any."""
    tensor, context = evidence.birth.tensor, evidence.context
    name = variable_name(tensor, context.variables, ())
    if not tensor.dim() or not 0 < len(rows) < len(tensor) or name == UNNAMED:
        return ""
    flat = ".flatten(1).all(1)" if tensor.dim() > 1 else ""
    return f": `{name}[torch.isfinite({name}){flat}]` keeps the good rows"


def _bad_embedding(evidence: Evidence) -> Diagnosis | None:
    name, owner = evidence.birth.via[0].name if evidence.birth.via else "", owner_of(evidence.birth.tensor, evidence.context.roots)
    # An index takes rows of data, too: there only a parameter is a table.
    is_table = owner is not None and owner[0] == "parameter" and name in {"index_select", "index"}
    if not is_table and name not in {"embedding", "_embedding_bag"}:
        return None
    rows = evidence.rows
    return Diagnosis(
        "bad_embedding_row",
        f"the embedding has a non-finite row ({', '.join(map(str, rows[:5]))}), and this batch looks it up",
        "reinitialize that row, and find what wrote to it: an update with a non-finite gradient, or a corrupted checkpoint",
    )


def _plain(evidence: Evidence) -> Diagnosis:
    values = ", ".join(value if isinstance(value, str) else number(value) for value in evidence.operands()[:3])
    kind = "NaN" if evidence.kind == NAN else "inf"
    name = f"`{evidence.name}`" if evidence.name else "it"
    what = f"the derivative of {name}" if evidence.op is not None and evidence.op.backward else name
    if evidence.op is None:
        return Diagnosis(None, f"it contained {kind} before the step began", "find the code that wrote to it")
    return Diagnosis(
        None,
        f"{what} returned {kind} for finite inputs" + (f" ({values})" if values else ""),
        f"check the inputs of `{evidence.name}` on this line",
    )


_LEAF: tuple[Rule, ...] = (_bad_embedding, _bad_row)
_FORWARD: tuple[Rule, ...] = (
    *NAN_CONSTANTS, *INFINITE_CONSTANTS, *NEIGHBOUR_CAUSES, *RANGE_CAUSES, *OP_CAUSES, out_of_range,
)  # fmt: skip
_BACKWARD: tuple[Rule, ...] = (*NAN_CONSTANTS, MASKED_ROW, where_trap, *_FORWARD[len(NAN_CONSTANTS) :])
