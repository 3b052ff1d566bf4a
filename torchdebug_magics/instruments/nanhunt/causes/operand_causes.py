"""Causes that an op and its operands tell by themselves: a row a cause, with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import (
    DIVISIONS,
    LOGS,
    MEANS,
    NORMALISERS,
    POWERS,
    REDUCED_MAXIMA,
    ROOTS,
    SELECTORS,
    SOFTMAXES,
    SPREADS,
    Evidence,
)
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.probing.ops import argument_of
from torchdebug_magics.probing.tensors import INF, dense

_NEAR = 4
"""How many ops back an input is followed."""


@dataclass(frozen=True)
class Diagnosis:
    """Why, and what to change."""

    slug: str | None
    explanation: str
    fix: str


Rule: TypeAlias = "Callable[[Evidence], Diagnosis | None]"


def domain(names: AbstractSet[str], slug: str, test: Callable[[Evidence], bool], explanation: str, fix: str) -> Rule:
    """A rule for ops of some names, written in place or not."""

    def rule(evidence: Evidence) -> Diagnosis | None:
        return Diagnosis(slug, explanation, fix) if evidence.plain_name in names and test(evidence) else None

    return rule


def is_zero(value: Any) -> bool:
    """Whether an operand is a number and 0."""
    return isinstance(value, (int, float, complex)) and value == 0


def operand(place: int, test: Callable[[float], bool]) -> Callable[[Evidence], bool]:
    """Whether the operand at a place is a number that passes a test."""

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
    return operand(-1, lambda value: value == 0)(evidence)


def _is_zero_times_infinity(evidence: Evidence) -> bool:
    op = evidence.forward or evidence.op
    values = [*evidence.operands(), *(value for value in (op.args if op is not None else ()) if isinstance(value, (int, float)))]
    return any(is_zero(value) for value in values) and any(isinstance(value, float) and math.isinf(value) for value in values)


def _argument_of_log(test: Callable[[float], bool]) -> Callable[[Evidence], bool]:
    """Of ``log1p(x)`` it is 1 + x, of ``xlogy(x, y)`` y."""

    def ask(evidence: Evidence) -> bool:
        more = 1.0 if evidence.plain_name == "log1p" else 0.0
        return operand(-1, lambda value: test(value + more))(evidence)

    return ask


_LOG_ZERO = domain(
    LOGS,
    "log_zero",
    lambda one: one.plain_name != "log1p" and (any(is_zero(value) for value in one.operands()) or _argument_of_log(is_zero)(one)),
    "the logarithm of 0 is -inf",
    "clamp the argument to a small positive number, or use `log_softmax` or `BCEWithLogitsLoss`, which stay finite",
)
_LOG1P_ZERO = domain(
    {"log1p"},
    "log_zero",
    lambda one: _argument_of_log(is_zero)(one) or not one.operands(),
    "the logarithm of 1 + x is -inf where x is -1",
    "clamp the argument to slightly above -1",
)
_LOG_NEGATIVE = domain(
    LOGS - {"special_entr"},
    "log_negative",
    _argument_of_log(lambda value: value < 0),
    "the logarithm of a negative number is NaN",
    "make the argument positive (`clamp`, `softplus`), and check why it is negative",
)
_DIV_ZERO = domain(
    DIVISIONS,
    "div_zero",
    _div_by_zero,
    "division by 0",
    "clamp the denominator to a small positive number, or replace it where it is 0",
)
_ROOT_OF_SUM_ZERO = domain(
    {"hypot"},
    "sqrt_zero",
    lambda one: all(map(is_zero, one.operands())),
    "the derivative of a square root at 0 is infinite",
    "use `torch.linalg.vector_norm`, whose derivative at 0 is 0, or clamp the argument of the root to a small positive number",
)
_ROOT_ZERO = domain(
    {"sqrt"},
    "sqrt_zero",
    operand(0, is_zero),
    "the derivative of a square root at 0 is infinite",
    "clamp the argument of the root to a small positive number; for a distance use `torch.linalg.vector_norm`, whose derivative at 0 is 0",
)
_INVERSE_ROOT_ZERO = domain(
    {"rsqrt"},
    "sqrt_zero",
    operand(0, is_zero),
    "1 over the square root of 0 is infinite",
    "clamp the argument of the root to a small positive number",
)
_ROOT_NEGATIVE = domain(
    ROOTS,
    "sqrt_negative",
    operand(0, lambda value: value < 0),
    "the square root of a negative number is NaN",
    "clamp the argument of the root, and check why it is negative (a difference of squares loses digits)",
)
_POW_ZERO = domain(
    POWERS,
    "pow_zero",
    operand(0, lambda value: value == 0),
    "this power of 0 is infinite, or its derivative is",
    "clamp the base to a small positive number",
)
_CTC = domain(
    {"_ctc_loss", "ctc_loss", "_cudnn_ctc_loss"},
    "infeasible_ctc",
    lambda _: True,
    "a target is too long for its input (repeated labels need a blank between them), so no alignment exists",
    "use `zero_infinity=True`, or drop samples whose input is too short",
)
_EMPTY_MEAN = domain(
    MEANS,
    "empty_mean",
    lambda one: (tensor := one.inputs_at(0)) is not None and tensor.numel() == 0,
    "the mean of an empty tensor is 0 / 0",
    "skip the batch when the selection is empty, or divide a sum by `max(count, 1)`",
)


def _has_a_zero_row(evidence: Evidence) -> bool:
    weight, op = evidence.inputs_at(0), evidence.forward or evidence.op
    if weight is None or op is None:
        return False
    kept = op.args[2] if len(op.args) > 2 and isinstance(op.args[2], int) else 0  # noqa: PLR2004 - the third argument is the dimension
    return bool((weight.movedim(kept, 0).reshape(weight.shape[kept], -1) == 0).all(1).any())


_WEIGHT_NORM = domain(
    {"_weight_norm_interface", "_weight_norm"},
    "zero_norm",
    _has_a_zero_row,
    "a row of the weight is all zeros, and weight_norm divides it by its norm: 0 / 0",
    "initialize that row with small random numbers: under weight_norm, a zero weight needs a zero magnitude (`original0`, `weight_g`)",
)
_ZERO_TIMES_INFINITY = domain(
    {"mul"},
    "zero_times_inf",
    _is_zero_times_infinity,
    "0 times inf is NaN: multiplying by 0 does not remove inf",
    "select instead of multiplying (`torch.where`, `masked_fill`), or use a finite number such as -1e9",
)


def _no_slope_at_zero(evidence: Evidence) -> Diagnosis | None:
    """Any function of two or more numbers, such as the angle of a point, whose derivative has no limit where all of them are 0."""
    values = evidence.operands()
    if not evidence.is_derivative or len(values) < 2 or not all(map(is_zero, values)):  # noqa: PLR2004 - as said
        return None
    return Diagnosis(
        "no_slope_at_zero",
        f"`{evidence.name}` has no derivative where all its inputs are 0",
        f"pass `{evidence.name}` a small number instead of 0",
    )


OPERAND_CAUSES: tuple[Rule, ...] = (
    _CTC,
    _WEIGHT_NORM,
    _EMPTY_MEAN,
    _LOG_ZERO,
    _LOG1P_ZERO,
    _LOG_NEGATIVE,
    _ROOT_NEGATIVE,
    _ROOT_OF_SUM_ZERO,
    _ROOT_ZERO,
    _INVERSE_ROOT_ZERO,
    _POW_ZERO,
    _DIV_ZERO,
    _ZERO_TIMES_INFINITY,
    _no_slope_at_zero,
)
"""In the order they are tried."""


def where_trap(evidence: Evidence) -> Diagnosis | None:
    """The forward threw the bad value away, the derivative did not: 0 from the unselected branch times infinity."""
    forward = evidence.forward
    if forward is None or not evidence.was_thrown_away():
        return None
    selector = next((one for one in evidence.consumers(forward) if one.name in SELECTORS), None)
    if selector is None:
        return None
    argument = "the denominator" if forward.name.removesuffix("_") in DIVISIONS else "the argument"
    return Diagnosis(
        "where_trap",
        f"`{selector.name}` discards the value of `{forward.name}`, but not its derivative: 0 times inf or NaN is NaN",
        f"make {argument} safe before `{forward.name}`, not the result after it",
    )


def _all_ignored(evidence: Evidence) -> Diagnosis | None:
    op = evidence.op
    if op is None or not evidence.name.startswith(("nll_loss", "cross_entropy")):
        return None
    target, weight = evidence.inputs_at(1), argument_of(op.func, op.args, op.kwargs, "weight")
    ignored = argument_of(op.func, op.args, op.kwargs, "ignore_index")
    ignored = -100 if ignored is None else ignored
    if target is None or target.is_floating_point():
        return None
    labels = target[target != ignored]
    if not labels.numel():
        return Diagnosis(
            "all_ignored",
            "every label of this batch is ignored, so the mean over no labels is 0 / 0",
            "skip a batch without labels, or use `reduction='sum'` and divide by the number of labels, at least 1",
        )
    if isinstance(weight, torch.Tensor) and not bool(weight[labels].any()):
        return Diagnosis(
            "all_ignored",
            "every label of this batch belongs to a class with weight 0, so the weighted mean is 0 / 0",
            "skip such a batch, or use positive weights for all classes that occur",
        )
    return None


def masked_row(evidence: Evidence) -> Diagnosis | None:
    """A row without an open position; also where its output is dropped later."""
    scores = evidence.inputs_at(0)
    numbers = None if scores is None else dense(scores)
    blocked = numbers is not None and bool((numbers == -math.inf).any())
    is_softmax = "attention" in evidence.name or (blocked and (evidence.name in SOFTMAXES or _less_its_maximum(evidence)))
    if not is_softmax and not _by_the_sum_of_a_blocked_row(evidence):
        return None
    return Diagnosis(
        "masked_row",
        "a whole row is masked with -inf, so its softmax is 0 / 0",
        "leave at least one position of each row unmasked, or skip such rows (masking with -1e9 instead of -inf also stays finite)",
    )


def _less_its_maximum(evidence: Evidence) -> bool:
    """Scores less their own largest (or their logsumexp), both -inf: softmax as `torch.distributions` and people write it."""
    subtrahend = evidence.inputs_at(1)
    if evidence.plain_name != "sub" or subtrahend is None or evidence.operands()[:2] != (-math.inf, -math.inf):
        return False
    maker = evidence.maker(subtrahend)
    return maker is not None and maker.name in REDUCED_MAXIMA


def _by_the_sum_of_a_blocked_row(evidence: Evidence) -> bool:
    """``e / e.sum(-1)`` where all of a row of `e` is exp(-inf), or was set to 0: softmax as it is written by hand."""
    weights, total = evidence.inputs_at(0), evidence.inputs_at(1)
    if evidence.plain_name != "div" or weights is None or total is None or not all(map(is_zero, evidence.operands()[:2])):
        return False
    summed = evidence.maker(total)
    exponentials = [maker for maker in _makers(evidence, weights) if maker.name == "exp"]
    if summed is None or summed.name != "sum" or not exponentials:
        return False
    (score,) = evidence.values_of(exponentials[0])
    # A score that is only very small has underflowed: nothing is masked.
    return isinstance(score, float) and (score == -math.inf or bool(torch.tensor(score, dtype=weights.dtype).exp() > 0))


def _mask_sum(evidence: Evidence) -> Diagnosis | None:
    if evidence.plain_name not in {"add", "sub"} or evidence.birth.kind != INF:
        return None
    values = [value for value in evidence.operands() if isinstance(value, float)]
    lowest = torch.finfo(evidence.birth.tensor.dtype).min
    if len(values) == 1 or not all(math.isfinite(value) and value <= lowest / 4 for value in values[:2]) or not values:
        return None
    return Diagnosis(
        "mask_sum",
        "two additive masks, each near the smallest number of this dtype, sum to -inf; softmax of a row of -inf is NaN",
        "combine the masks as booleans (`&`), or clamp the sum to `torch.finfo(dtype).min`",
    )


def _eps_zero(evidence: Evidence) -> Diagnosis | None:
    op = evidence.forward or evidence.op
    if op is None or not (_has_no_eps(op) or _root_of_a_bare_mean(evidence)):
        return None
    return Diagnosis(
        "eps_zero",
        "the normalization has eps=0, and its input has zero variance: 0 / 0",
        "restore the eps of the normalization (1e-5 is the default)",
    )


def _has_no_eps(op: Op) -> bool:
    eps = [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, float)]
    return op.name in NORMALISERS and bool(eps) and eps[-1] == 0.0


def _root_of_a_bare_mean(evidence: Evidence) -> bool:
    """A normalisation in single ops: 1 / sqrt(mean(x ** 2) + 0)."""
    operands = evidence.operands()
    if evidence.plain_name != "rsqrt" or not operands or not is_zero(operands[0]):
        return False
    return any(maker.name in SPREADS | {"mean"} for maker in _makers(evidence, evidence.inputs_at(0)))


def _makers(evidence: Evidence, tensor: torch.Tensor | None) -> Iterator[Op]:
    """What made a tensor, and what made the first input of that, a few ops back."""
    maker = None if tensor is None else evidence.maker(tensor)
    for _ in range(_NEAR):
        if maker is None:
            return
        yield maker
        maker = evidence.trace.ops[maker.parents[0]] if maker.parents else None


def _zero_variance(evidence: Evidence) -> Diagnosis | None:
    if evidence.name in SPREADS:
        return Diagnosis(
            "zero_variance",
            "the standard deviation of a single value is 0 / 0 with the default correction",
            "use `correction=0` (`unbiased=False`), or skip groups of size 1",
        )
    values = evidence.operands()
    if evidence.plain_name not in {"div", "reciprocal", "rsqrt"} or not values or not is_zero(values[-1]):
        return None
    denominator = evidence.inputs_at(1 if evidence.plain_name == "div" else 0)
    if not any(maker.name in SPREADS for maker in _makers(evidence, denominator)):
        return None
    return Diagnosis(
        "zero_variance",
        "the values are constant, so this divides by a standard deviation of 0",
        "add a small number to the denominator",
    )


NEIGHBOUR_CAUSES: tuple[Rule, ...] = (_all_ignored, masked_row, _mask_sum, _eps_zero, _zero_variance)
"""In the order they are tried."""
