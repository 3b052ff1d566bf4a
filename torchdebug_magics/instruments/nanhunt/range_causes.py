"""Causes of an infinity that only is too large a number: the type, the learning rate, a parameter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.causes import Diagnosis, Rule
from torchdebug_magics.instruments.nanhunt.families import DIVISIONS, LOGS, POWERS, ROOTS
from torchdebug_magics.instruments.nanhunt.naming import owner_of
from torchdebug_magics.probing.tensors import INF, dense

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.evidence import Evidence

__all__ = ["RANGE_CAUSES"]

_MUCH, _TIMES, _LEAST = 1e4, 1e3, 1e-30
"""A number that has grown is so large, and so many times the smallest of late."""
_GROWING = {"exp", "exp_", "expm1", "sinh", "cosh", "pow", "square", "mul", "mul_", "addmm", "mm"}


def _overflow(evidence: Evidence) -> Diagnosis | None:
    tensor = evidence.birth.tensor
    if evidence.birth.kind != INF or tensor.dtype not in {torch.float16, torch.bfloat16}:
        return None
    if evidence.name in LOGS | DIVISIONS | ROOTS and any(value == 0 for value in evidence.operands()):
        return None
    half = "fp16" if tensor.dtype is torch.float16 else "bf16"
    limit = torch.finfo(tensor.dtype).max
    return Diagnosis(
        f"{half}_overflow",
        f"the result does not fit {half}, whose largest number is {number(limit)}",
        "compute this op in float32 (`.float()` before it, or autocast disabled around it), scale its inputs down"
        + (", or use bfloat16" if half == "fp16" else ""),
    )


def _exploded(evidence: Evidence) -> Diagnosis | None:
    """Numbers that grew and grew until they left the range: the step was too long."""
    if evidence.birth.kind != INF or not _grew(evidence.context.history):
        return None
    values = [value for value in evidence.operands() if isinstance(value, float)]
    if any(value == 0 for value in values) and evidence.name in LOGS | DIVISIONS | ROOTS | POWERS:
        return None
    finite = [value for value in evidence.context.history if math.isfinite(value)]
    return Diagnosis(
        "lr_too_high",
        f"the run diverged: the largest gradient or loss grew from {number(min(finite))} to {number(finite[-1])}, then left the range",
        "lower the learning rate (try a tenth), warm it up, or clip with `torch.nn.utils.clip_grad_norm_`",
    )


def _own_parameter(evidence: Evidence) -> Diagnosis | None:
    """An op applied to a parameter itself that has grown out of range."""
    op = evidence.forward
    if evidence.birth.kind != INF or op is None or evidence.context.step == 0 or op.name not in _GROWING:
        return None
    for tensor in op.inputs():
        owner = owner_of(tensor, evidence.context.roots)
        if owner is not None and owner[0] == "parameter" and (numbers := dense(tensor)) is not None:
            return Diagnosis(
                "exploding_parameter",
                f"the parameter {owner[1]} has grown to {number(float(numbers.abs().max()))}, which is too large for `{op.name}`",
                "lower the learning rate for it, give it weight decay, or bound it (clamp, softplus, a parametrization)",
            )
    return None


def _grew(history: tuple[float, ...]) -> bool:
    finite = [value for value in history if math.isfinite(value) and value > 0][-30:]
    if not finite or finite[-1] < max(finite):
        return False
    return finite[-1] > _MUCH and finite[-1] > _TIMES * max(min(finite), _LEAST)


RANGE_CAUSES: tuple[Rule, ...] = (_overflow, _exploded, _own_parameter)
"""In the order they are tried."""
