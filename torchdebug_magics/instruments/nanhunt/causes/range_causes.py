"""Causes of an infinity that only is too large a number: the type, the learning rate, a parameter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.causes.op_families import DIVISIONS, LOGS, POWERS, ROOTS
from torchdebug_magics.instruments.nanhunt.causes.operand_causes import Diagnosis, Rule
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import owner_of, variable_name
from torchdebug_magics.instruments.nanhunt.walk.op_rerun import place_of, run_again
from torchdebug_magics.probing.ops import is_movement
from torchdebug_magics.probing.tensors import INF, bad_mask, dense, is_bad, largest, tensors_in

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence

__all__ = ["RANGE_CAUSES", "out_of_range"]

_HUGE = 1e8
"""A row of data is out of line where it is so large, and so many times the usual row."""
_MUCH, _TIMES, _LEAST = 1e4, 1e3, 1e-30
"""A number that has grown is so large, and so many times the smallest of late."""
_OR_ELSE = {"fp16": ", or use bfloat16", "bf16": ", or use the limit of the dtype from `torch.finfo`"}
_GROWING = {"exp", "exp_", "expm1", "sinh", "cosh", "pow", "square", "mul", "mul_", "addmm", "mm"}


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


def _own_parameter(evidence: Evidence) -> Diagnosis | None:
    """An op applied to a parameter itself that has grown out of range."""
    op = evidence.forward
    if evidence.birth.kind != INF or op is None or evidence.context.step == 0 or op.name not in _GROWING:
        return None
    sizes = [largest([tensor]) for tensor in op.inputs()]
    for tensor, size in zip(op.inputs(), sizes, strict=True):
        owner = owner_of(tensor, evidence.context.roots)
        # What is multiplied with it may be what has grown.
        if owner is not None and owner[0] == "parameter" and size == max(sizes):
            return Diagnosis(
                "exploding_parameter",
                f"the parameter {owner[1]} has grown to {number(size)}, which is too large for `{op.name}`",
                "lower its learning rate, apply weight decay to it, or bound it (`clamp`, `softplus`, a parametrization)",
            )
    return None


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
    if size == torch.finfo(tensor.dtype).max and any(one.name.startswith("nan_to_num") for one in evidence.trace.ops[: op.index]):
        return Diagnosis(
            "overflow",
            f"`nan_to_num` replaces inf by the largest finite number, {number(size)}, and `{evidence.name}` of such numbers"
            " overflows again",
            "pass replacements, `.nan_to_num(posinf=0.0, neginf=0.0)`, or prevent the inf before it",
        )
    kind, derivative = str(tensor.dtype).removeprefix("torch."), "the derivative of " if op.backward else ""
    given = _out_of_line(evidence)
    cause = f": {given}" if given else f": its largest input is {number(size)}"
    return Diagnosis(
        "overflow",
        f"{derivative}`{evidence.name}` overflowed the range of {kind}, which ends at {number(torch.finfo(tensor.dtype).max)}{cause}",
        "drop or repair that row before the model sees it, or bound the data with `clamp`"
        if given
        else "keep magnitudes small where they grow: normalize them (a mean instead of a sum, LayerNorm between repeated layers), "
        + ("clip the gradients, " if op.backward else "")
        + "or compute with logarithms",
    )


def _out_of_line(evidence: Evidence) -> str:
    """Which row of what the model was given is larger than all others by far; empty where none is."""
    for entry in evidence.context.entries:
        for tensor in tensors_in((entry.args, entry.kwargs)):
            numbers = dense(tensor)
            if numbers is None or numbers.is_complex() or not numbers.dim() or numbers.shape != tensor.shape:
                continue
            rows = numbers.abs().float().reshape(numbers.shape[0], -1).amax(1)
            size, row = rows.max(0)
            if bool(size > _HUGE) and bool(size > _HUGE * rows.median()):
                name = variable_name(tensor, evidence.context.variables, evidence.context.entries)
                return f"row {int(row)} of {name} contains {number(float(size))}"
    return ""


RANGE_CAUSES: tuple[Rule, ...] = (_overflow, _exploded, _own_parameter)
"""In the order they are tried."""
