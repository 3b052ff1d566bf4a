"""Causes that stand in the code as a number: a NaN, or an infinity that nothing took out again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.nanhunt.causes.operand_causes import Diagnosis
from torchdebug_magics.instruments.nanhunt.walk.intentional_inf import on_purpose
from torchdebug_magics.probing.tensors import INF, NAN, kind_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence

__all__ = ["infinite_constant", "nan_constant"]


def nan_constant(evidence: Evidence) -> Diagnosis | None:
    """A NaN that the code holds as a number."""
    op = evidence.op
    if op is None or not any(map(_is_nan_number, (*op.args, *op.kwargs.values()))):
        return None
    hidden = "; the loss hides it, its derivative does not" if evidence.in_gradient else ""
    return Diagnosis(
        "nan_constant",
        f"NaN is written here as a constant{hidden}",
        "write a finite number instead, or select the valid elements before computing with them",
    )


def infinite_constant(evidence: Evidence) -> Diagnosis | None:
    """An infinity that the code put in on purpose, and that nothing took out again."""
    op = evidence.op
    if op is None or evidence.kind == NAN:
        return None
    if not evidence.birth.on_purpose:
        if on_purpose(op, INF):
            return Diagnosis(
                "mask_sign",
                "+inf is written here, and softmax of +inf is NaN: a mask needs -inf",
                "write `float('-inf')`",
            )
        if evidence.plain_name not in {"mul", "div", "add", "sub"} or not any(map(_is_infinite_number, op.args)):
            return None
        return Diagnosis(
            "inf_constant",
            "a Python float used here is inf",
            "check where that float is computed: print it, or `assert math.isfinite(...)` before this line",
        )
    return Diagnosis(
        "inf_constant",
        "inf is written here as a constant, and reaches the loss (or the output)",
        "replace it before the loss (`torch.where`, `isfinite`), or start from a finite number",
    )


def _is_infinite_number(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _is_nan_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):  # made of a number by torch
        return value.dim() == 0 and value.grad_fn is None and not value.requires_grad and bool(kind_of(value) & NAN)
    return isinstance(value, float) and math.isnan(value)
