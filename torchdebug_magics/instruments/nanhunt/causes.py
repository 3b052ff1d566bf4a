"""Causes that an op and its operands tell by themselves: a row a cause, with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchdebug_magics.probing.tensors import INF

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.nanhunt.evidence import Evidence

__all__ = [
    "DIVISIONS",
    "LOGS",
    "NORMALISERS",
    "OPERAND_CAUSES",
    "POWERS",
    "ROOTS",
    "SELECTORS",
    "SOFTMAXES",
    "Diagnosis",
    "Rule",
    "is_zero",
]


@dataclass(frozen=True)
class Diagnosis:
    """Why, and what to change."""

    slug: str | None
    explanation: str
    fix: str


Rule: TypeAlias = "Callable[[Evidence], Diagnosis | None]"

LOGS = {"log", "log_", "log2", "log2_", "log10", "log10_", "log1p", "log1p_", "xlogy", "special_xlogy", "special_entr"}
DIVISIONS = {
    "div",
    "div_",
    "reciprocal",
    "reciprocal_",
    "true_divide",
    "divide",
    "addcdiv",
    "addcdiv_",
    "remainder",
    "fmod",
    "floor_divide",
}
ROOTS = {"sqrt", "sqrt_", "rsqrt", "rsqrt_", "hypot"}
POWERS = {"pow", "pow_", "float_power"}
SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "logaddexp", "_masked_softmax", "_native_multi_head_attention"}
SELECTORS = {
    "where",
    "masked_fill",
    "masked_fill_",
    "nan_to_num",
    "nan_to_num_",
    "clamp",
    "clamp_",
    "clamp_min",
    "clamp_min_",
    "clamp_max",
    "clamp_max_",
    "threshold",
    "relu",
    "relu_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "masked_scatter",
    "maximum",
    "minimum",
    "hardtanh",
    "index",
    "masked_select",
    "fmax",
    "fmin",
}
NORMALISERS = {
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "batch_norm",
    "_fused_rms_norm",
    "rms_norm",
    "cudnn_batch_norm",
}
POLES = {"acos", "asin", "acosh", "atanh", "erfinv", "logit", "acos_", "asin_", "atanh_", "special_ndtri", "lgamma", "digamma", "tan"}
DECOMPOSITIONS = {
    "_linalg_eigh",
    "_linalg_svd",
    "linalg_eig",
    "linalg_qr",
    "_linalg_slogdet",
    "_linalg_det",
    "linalg_inv_ex",
    "_linalg_solve_ex",
    "linalg_lu_factor_ex",
}


def _domain(names: set[str], slug: str, test: Callable[[Evidence], bool], explanation: str, fix: str) -> Rule:
    def rule(evidence: Evidence) -> Diagnosis | None:
        return Diagnosis(slug, explanation, fix) if evidence.name in names and test(evidence) else None

    return rule


def is_zero(value: Any) -> bool:
    """Whether an operand is a number and 0."""
    return isinstance(value, (int, float, complex)) and value == 0


def _operand(place: int, test: Callable[[float], bool]) -> Callable[[Evidence], bool]:
    def ask(evidence: Evidence) -> bool:
        values = evidence.operands()
        if not values:
            return False
        value = values[place] if -len(values) <= place < len(values) else None
        return isinstance(value, (int, float)) and test(value)

    return ask


def _div_by_zero(evidence: Evidence) -> bool:
    op = evidence.forward or evidence.op
    if op is not None and len(op.inputs()) == 1 and any(is_zero(value) for value in op.args if not isinstance(value, torch.Tensor)):
        return True
    return _operand(-1, lambda value: value == 0)(evidence)


_LOG_ZERO = _domain(
    LOGS,
    "log_zero",
    lambda one: any(is_zero(value) for value in one.operands()) or one.name == "log1p",
    "the logarithm of 0 is -inf",
    "bound the argument from below, `log(x.clamp(min=1e-6))`, or use `log_softmax` or `BCEWithLogitsLoss`, which stay finite",
)
_LOG_NEGATIVE = _domain(
    LOGS,
    "log_negative",
    _operand(0, lambda value: value < 0),
    "the logarithm of a negative number is NaN",
    "make sure that the argument is positive: `clamp(min=1e-9)`, `softplus`, or a fix of what made it negative",
)
_DIV_ZERO = _domain(
    DIVISIONS, "div_zero", _div_by_zero, "a division by 0", "add a small number to the denominator, or clamp it: `x / y.clamp(min=1e-8)`"
)
_ROOT_ZERO = _domain(
    {"sqrt", "sqrt_", "rsqrt", "rsqrt_", "hypot"},
    "sqrt_zero",
    _operand(0, lambda value: value == 0),
    "the slope of a square root at 0 is infinite",
    "bound it from below, `x.clamp(min=1e-12).sqrt()`; for a distance use `torch.linalg.vector_norm`, which is safe at 0",
)
_ROOT_NEGATIVE = _domain(
    ROOTS,
    "sqrt_negative",
    _operand(0, lambda value: value < 0),
    "the square root of a negative number is NaN",
    "`clamp(min=0)` before the root, and look at what made it negative (a difference of squares loses digits)",
)
_POW_ZERO = _domain(
    POWERS,
    "pow_zero",
    _operand(0, lambda value: value == 0),
    "a power of 0 whose value or slope is infinite",
    "add a small number to the base: `(x + 1e-12) ** p`",
)
_POW_NEGATIVE = _domain(
    POWERS,
    "pow_negative",
    _operand(0, lambda value: value < 0),
    "a fractional power of a negative number is NaN",
    "take `abs()` or `clamp(min=0)` first",
)
_CTC = _domain(
    {"_ctc_loss", "ctc_loss", "_cudnn_ctc_loss"},
    "infeasible_ctc",
    lambda _: True,
    "a target is longer than its input allows (repeated labels need a blank between them), so no alignment exists",
    "use `zero_infinity=True`, or drop samples whose input is too short",
)
_POLE = _domain(
    POLES,
    "pole",
    lambda _: True,
    "the argument lies at or beyond the edge of where this function is finite",
    "clamp the argument a little inside, for example `clamp(-1 + 1e-6, 1 - 1e-6)`",
)
_EMPTY_MEAN = _domain(
    {"mean"},
    "empty_mean",
    lambda one: (tensor := one.inputs_at(0)) is not None and tensor.numel() == 0,
    "the mean of nothing is 0 / 0",
    "skip the batch when the selection is empty, or divide a sum by `max(count, 1)`",
)
_EXP = _domain(
    {"exp", "exp_", "expm1", "sinh", "cosh"},
    "exp_overflow",
    lambda one: one.birth.kind == INF,
    "the exponential left the range of its type",
    "subtract the maximum first, or use `logsumexp`, `softmax` or `softplus`, which do so",
)
_DECOMPOSITION = _domain(
    DECOMPOSITIONS,
    "degenerate_matrix",
    lambda _: True,
    "the matrix is singular, or has equal eigenvalues, where the derivative is infinite",
    "add a little to the diagonal: `A + 1e-6 * torch.eye(n)`",
)


OPERAND_CAUSES = (
    _CTC,
    _EMPTY_MEAN,
    _LOG_ZERO,
    _LOG_NEGATIVE,
    _ROOT_NEGATIVE,
    _ROOT_ZERO,
    _POW_NEGATIVE,
    _POW_ZERO,
    _DIV_ZERO,
    _EXP,
    _POLE,
    _DECOMPOSITION,
)
"""In the order they are tried."""
