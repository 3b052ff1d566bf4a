"""The op table: families of ops, and a row a cause that an op and its operands tell by themselves.

A row says of which ops it is, when it fits, why the result is not finite and what to change; `bounds` are what may be appended to the
argument, in code, so that it lies where the function and its derivative are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.probing.ops import argument_of
from torchdebug_magics.probing.tensors import INF, NAN, dense

LOGS: Final = frozenset({"log", "log2", "log10", "log1p", "xlogy", "special_xlogy", "special_entr"})
DIVISIONS: Final = frozenset({"div", "reciprocal", "true_divide", "divide", "addcdiv", "remainder", "fmod", "floor_divide"})
ROOTS: Final = frozenset({"sqrt", "rsqrt", "hypot"})
POWERS: Final = frozenset({"pow", "float_power"})
SOFTMAXES: Final = frozenset([
    "_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "logaddexp", "_masked_softmax", "_native_multi_head_attention",
])  # fmt: skip
SELECTORS: Final = frozenset([
    "where", "masked_fill", "nan_to_num", "clamp", "clamp_min", "clamp_max", "threshold", "relu", "index_put", "_index_put_impl",
    "masked_scatter", "maximum", "minimum", "hardtanh", "index", "masked_select", "fmax", "fmin",
])  # fmt: skip
SPREADS: Final = frozenset({"std", "var", "std_mean", "var_mean"})
EXPONENTIALS: Final = frozenset({"exp", "exp2", "special_exp2", "expm1", "special_expm1", "sinh", "cosh", "linalg_matrix_exp"})
MEANS: Final = frozenset([
    "mean", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "multi_margin_loss",
])  # fmt: skip
NORMALISERS: Final = frozenset([
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update", "batch_norm", "_fused_rms_norm", "rms_norm", "cudnn_batch_norm",
])  # fmt: skip
BETWEEN_ONES: Final = frozenset({"acos", "asin", "atanh", "erfinv", "special_erfinv"})
BETWEEN_ZERO_AND_ONE: Final = frozenset({"logit", "special_logit", "special_ndtri"})
POLES: Final = frozenset({"lgamma", "digamma", "polygamma", "mvlgamma", "special_zeta"})
EIGENVECTORS: Final = frozenset({"_linalg_eigh", "_linalg_svd", "linalg_eig"})
FACTORISATIONS: Final = frozenset([
    "linalg_qr", "_linalg_slogdet", "_linalg_det", "linalg_inv_ex", "_linalg_solve_ex", "linalg_lu_factor_ex", "linalg_ldl_factor_ex",
    "linalg_lu_solve", "linalg_solve_triangular", "triangular_solve", "cholesky_inverse", "linalg_cholesky_ex",
])  # fmt: skip
ANY: Final = frozenset[str]()
_SMALL: Final = tuple(f".clamp(min={small})" for small in ("1e-12", "1e-8", "1e-6", "1e-4", "1e-30"))
_NEAR = 4
"""How many ops back an input is followed."""


@dataclass(frozen=True)
class Diagnosis:
    """Why, and what to change."""

    slug: str | None
    explanation: str
    fix: str


Rule: TypeAlias = "Callable[[Evidence], Diagnosis | None]"


@dataclass(frozen=True)
class Row:
    """A cause, for ops of some names, written in place or not; of any name where it has none."""

    ops: frozenset[str]
    slug: str
    when: Callable[[Evidence], bool]
    why: str
    fix: str
    bounds: tuple[str, ...] = ()

    def __call__(self, evidence: Evidence) -> Diagnosis | None:
        """The diagnosis, where the row fits."""
        if (self.ops and evidence.plain_name not in self.ops) or not self.when(evidence):
            return None
        return Diagnosis(self.slug, self.why.format(op=evidence.name), self.fix.format(op=evidence.name))


def is_zero(value: Any) -> bool:
    """Whether an operand is a number and 0."""
    return isinstance(value, (int, float, complex)) and value == 0


def is_negative(value: Any) -> bool:
    """Whether an operand is a number below 0."""
    return isinstance(value, (int, float)) and value < 0


def operand(place: int, test: Callable[[Any], bool]) -> Callable[[Evidence], bool]:
    """Whether the operand at a place is a number that passes a test."""

    def ask(evidence: Evidence) -> bool:
        values = evidence.operands()
        value = values[place] if -len(values) <= place < len(values) else None
        return isinstance(value, (int, float)) and test(value)

    return ask


def always(_evidence: Evidence) -> bool:
    """The name of the op tells enough."""
    return True


def _divides_by_zero(evidence: Evidence) -> bool:
    op = evidence.known
    if op is not None and len(op.inputs()) == 1 and any(is_zero(value) for value in op.args if not isinstance(value, torch.Tensor)):
        return True
    return operand(-1, is_zero)(evidence)


def _is_zero_times_infinity(evidence: Evidence) -> bool:
    op = evidence.known
    values = [*evidence.operands(), *(value for value in (op.args if op is not None else ()) if isinstance(value, (int, float)))]
    return any(map(is_zero, values)) and any(isinstance(value, float) and math.isinf(value) for value in values)


def _is_empty(evidence: Evidence) -> bool:
    values = evidence.inputs_at(0)
    return values is not None and values.numel() == 0


def _has_no_slope_at_zero(evidence: Evidence) -> bool:
    """Any function of two or more numbers, such as the angle of a point, whose derivative has no limit where all of them are 0."""
    values = evidence.operands()
    return bool(evidence.derivative) and len(values) > 1 and all(map(is_zero, values))


def _labels(evidence: Evidence) -> torch.Tensor | None:
    """The labels of a batch that its loss does not ignore."""
    op, target = evidence.op, evidence.inputs_at(1)
    if op is None or target is None or target.is_floating_point() or not evidence.name.startswith(("nll_loss", "cross_entropy")):
        return None
    ignored = argument_of(op.func, op.args, op.kwargs, "ignore_index")
    return target[target != (-100 if ignored is None else ignored)]


def _have_no_weight(evidence: Evidence) -> bool:
    op, labels = evidence.op, _labels(evidence)
    weight = None if op is None or labels is None else argument_of(op.func, op.args, op.kwargs, "weight")
    return isinstance(weight, torch.Tensor) and not bool(weight[labels].any())


def _is_masked(evidence: Evidence) -> bool:
    """A row without an open position; also where its output is dropped later."""
    scores = evidence.inputs_at(0)
    numbers = None if scores is None else dense(scores)
    blocked = numbers is not None and bool((numbers == -math.inf).any())
    # Scores less their own largest, or their logsumexp, as `torch.distributions` and people write it.
    is_less_its_maximum = evidence.plain_name == "sub" and evidence.operands()[:2] == (-math.inf, -math.inf)
    return "attention" in evidence.name or (blocked and (evidence.name in SOFTMAXES or is_less_its_maximum))


def _adds_two_masks(evidence: Evidence) -> bool:
    values = [value for value in evidence.operands() if isinstance(value, float)]
    if evidence.birth.kind != INF or not values or len(values) == 1:
        return False
    return all(math.isfinite(value) and value <= torch.finfo(evidence.birth.tensor.dtype).min / 4 for value in values[:2])


def _has_no_eps(evidence: Evidence) -> bool:
    op = evidence.known
    eps = [] if op is None else [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, float)]
    if op is not None and op.name in NORMALISERS and eps and eps[-1] == 0.0:
        return True
    # A normalization in single ops: 1 / sqrt(mean(x ** 2) + 0).
    return (
        evidence.plain_name == "rsqrt"
        and operand(0, is_zero)(evidence)
        and any(maker.name in SPREADS | {"mean"} for maker in _makers(evidence, evidence.inputs_at(0)))
    )


def _makers(evidence: Evidence, tensor: torch.Tensor | None) -> Iterator[Op]:
    """What made a tensor, and what made the first input of that, a few ops back."""
    maker = None if tensor is None else evidence.trace.maker(tensor)
    for _ in range(_NEAR):
        if maker is None:
            return
        yield maker
        maker = evidence.trace.ops[maker.parents[0]] if maker.parents else None


def _divides_by_a_spread(evidence: Evidence) -> bool:
    denominator = evidence.inputs_at(1 if evidence.plain_name == "div" else 0)
    return operand(-1, is_zero)(evidence) and any(maker.name in SPREADS for maker in _makers(evidence, denominator))


_EDGE = "`{{op}}` is defined from {0} to {1} only, and its value or its derivative is infinite at both ends"
_ROOT_AT_ZERO = "the derivative of a square root at 0 is infinite"
_DISTANCE = "`torch.linalg.vector_norm`, whose derivative at 0 is 0"
MASKED_ROW = Row(
    ANY, "masked_row", _is_masked,
    "a whole row is masked with -inf, so its softmax is 0 / 0",
    "leave at least one position of each row unmasked, or skip such rows (masking with -1e9 instead of -inf also stays finite)",
)  # fmt: skip
NEIGHBOUR_CAUSES: tuple[Rule, ...] = (
    Row(ANY, "all_ignored", lambda one: (labels := _labels(one)) is not None and not labels.numel(),
        "every label of this batch is ignored, so the mean over no labels is 0 / 0",
        "skip a batch without labels, or use `reduction='sum'` and divide by the number of labels, at least 1"),
    Row(ANY, "all_ignored", _have_no_weight,
        "every label of this batch belongs to a class with weight 0, so the weighted mean is 0 / 0",
        "skip such a batch, or use positive weights for all classes that occur"),
    MASKED_ROW,
    Row(frozenset({"add", "sub"}), "mask_sum", _adds_two_masks,
        "two additive masks, each near the smallest number of this dtype, sum to -inf; softmax of a row of -inf is NaN",
        "combine the masks as booleans (`&`), or clamp the sum to `torch.finfo(dtype).min`"),
    Row(ANY, "eps_zero", _has_no_eps,
        "the normalization has eps=0, and its input has zero variance: 0 / 0",
        "restore the eps of the normalization (1e-5 is the default)"),
    Row(SPREADS, "zero_variance", always,
        "the standard deviation of a single value is 0 / 0 with the default correction",
        "skip groups of size 1, or use `correction=0` (`unbiased=False`) where nothing is divided by the result: it is 0 for them"),
    Row(frozenset({"div", "reciprocal", "rsqrt"}), "zero_variance", _divides_by_a_spread,
        "the values are constant, so this divides by a standard deviation of 0",
        "add a small number to the denominator"),
)  # fmt: skip
"""What an op and those before it tell; in the order they are tried."""
OP_CAUSES: tuple[Row, ...] = (
    Row(frozenset({"_ctc_loss", "ctc_loss", "_cudnn_ctc_loss"}), "infeasible_ctc", always,
        "a target is too long for its input (repeated labels need a blank between them), so no alignment exists",
        "use `zero_infinity=True`, or drop samples whose input is too short"),
    Row(MEANS, "empty_mean", _is_empty,
        "the mean of an empty tensor is 0 / 0",
        "skip the batch when the selection is empty, or divide a sum by the number of elements, at least 1"),
    Row(frozenset({"log1p"}), "log_zero", lambda one: operand(-1, lambda value: value == -1)(one) or not one.operands(),
        "the logarithm of 1 + x is -inf where x is -1",
        "clamp the argument to slightly above -1", (".clamp(min=-1 + 1e-6)",)),
    Row(frozenset({"log1p"}), "log_negative", operand(-1, lambda value: value < -1),
        "the logarithm of a negative number is NaN",
        "make the argument positive (`clamp`, `softplus`), and check why it is negative"),
    Row(LOGS - {"log1p"}, "log_zero", lambda one: any(map(is_zero, one.operands())),
        "the logarithm of 0 is -inf",
        "clamp the argument to a small positive number, or use `log_softmax` or `BCEWithLogitsLoss`, which stay finite",
        (".clamp(min=1e-6)", ".clamp(min=1e-4)", ".clamp(min=1e-30)")),
    Row(LOGS - {"log1p", "special_entr"}, "log_negative", operand(-1, is_negative),
        "the logarithm of a negative number is NaN",
        "make the argument positive (`clamp`, `softplus`), and check why it is negative"),
    Row(ROOTS, "sqrt_negative", operand(0, is_negative),
        "the square root of a negative number is NaN",
        "clamp the argument of the root, and check why it is negative (a difference of squares loses digits)", _SMALL),
    Row(frozenset({"hypot"}), "sqrt_zero", lambda one: all(map(is_zero, one.operands())),
        _ROOT_AT_ZERO, f"use {_DISTANCE}, or clamp the argument of the root to a small positive number"),
    Row(frozenset({"sqrt"}), "sqrt_zero", operand(0, is_zero),
        _ROOT_AT_ZERO, f"clamp the argument of the root to a small positive number; for a distance use {_DISTANCE}"),
    Row(frozenset({"rsqrt"}), "sqrt_zero", operand(0, is_zero),
        "1 over the square root of 0 is infinite", "clamp the argument of the root to a small positive number"),
    Row(POWERS, "pow_zero", operand(0, is_zero),
        "this power of 0 is infinite, or its derivative is",
        "clamp the base to a small positive number", _SMALL),
    Row(DIVISIONS, "div_zero", _divides_by_zero,
        "division by 0", "clamp the denominator to a small positive number, or replace it where it is 0"),
    Row(frozenset({"mul"}), "zero_times_inf", _is_zero_times_infinity,
        "0 times inf is NaN: multiplying by 0 does not remove inf",
        "select instead of multiplying (`torch.where`, `masked_fill`), or use a finite number such as -1e9"),
    Row(ANY, "no_slope_at_zero", _has_no_slope_at_zero,
        "`{op}` has no derivative where all its inputs are 0", "pass `{op}` a small number instead of 0"),
    # A negative number to a whole power is fine; how it changes with the exponent is not.
    Row(POWERS, "pow_negative", lambda one: one.op is not None and one.op.backward and operand(0, is_negative)(one),
        "the derivative of a power with respect to its exponent contains the logarithm of the base, which is negative here",
        "keep the base positive, or pass the exponent as a Python number that is not trained"),
    Row(POWERS, "pow_negative", lambda one: bool(one.birth.kind & NAN) and operand(0, is_negative)(one),
        "a fractional power of a negative number is NaN",
        "keep the sign apart from the power (`x.sign() * x.abs() ** p`), or clamp the base where it should not be negative"),
    Row(EXPONENTIALS, "exp_overflow", lambda one: one.birth.kind == INF or one.name == "linalg_matrix_exp",
        "the exponential overflowed the range of its dtype",
        "bound the argument from above; for a softmax, logsumexp or softplus, call the PyTorch function of that name",
        (".clamp(max=30)", ".clamp(max=10)", ".clamp(max=80)")),
    Row(BETWEEN_ONES, "pole", always, _EDGE.format(-1, 1), "clamp the argument to the inside of this range: `.clamp(-1 + 1e-6, 1 - 1e-6)`",
        (".clamp(-1 + 1e-6, 1 - 1e-6)", ".clamp(-1 + 1e-3, 1 - 1e-3)")),
    Row(BETWEEN_ZERO_AND_ONE, "pole", always, _EDGE.format(0, 1),
        "clamp the argument to the inside of this range, `.clamp(1e-6, 1 - 1e-6)`, or keep the logits that it was computed from",
        (".clamp(1e-6, 1 - 1e-6)", ".clamp(1e-3, 1 - 1e-3)")),
    Row(frozenset({"acosh"}), "pole", always,
        "`{op}` is defined from 1 on, and its derivative is infinite at 1", "clamp the argument: `.clamp(min=1 + 1e-6)`",
        (".clamp(min=1 + 1e-6)",)),
    Row(POLES, "pole", always, "the argument is at a pole of this function",
        "keep the argument above 0, where this function has no poles", (".clamp(min=1e-6)",)),
    Row(EIGENVECTORS, "degenerate_matrix", lambda one: bool(one.derivative),
        "two eigenvalues (or singular values) are equal, and the derivative of their vectors divides by their difference",
        "use the values alone (`eigvalsh`, `svdvals`), or add small distinct numbers to the diagonal",
        (" + torch.diag(1e-4 * torch.arange({0}.shape[-1]))",)),
    Row(FACTORISATIONS, "degenerate_matrix", always,
        "the matrix is singular: its determinant is 0, so it has no inverse",
        "add a small number to the diagonal", (" + 1e-4 * torch.eye({0}.shape[-1])",)),
)  # fmt: skip
"""What an op and its operands tell; in the order they are tried."""


def bounds_of(op: str) -> tuple[str, ...]:
    """What may be appended to the argument of an op."""
    return next((row.bounds for row in OP_CAUSES if op in row.ops and row.bounds), ())
