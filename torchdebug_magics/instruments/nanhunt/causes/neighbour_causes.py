"""Causes that the neighbours of an op tell: what made its inputs, what became of its output, how it was called."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.nanhunt.causes.op_families import (
    DIVISIONS,
    NORMALISERS,
    REDUCED_MAXIMA,
    SELECTORS,
    SOFTMAXES,
    SPREADS,
)
from torchdebug_magics.instruments.nanhunt.causes.operand_causes import Diagnosis, Rule, is_zero
from torchdebug_magics.probing.ops import argument_of
from torchdebug_magics.probing.tensors import INF, dense

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op

__all__ = ["NEIGHBOUR_CAUSES", "masked_row", "where_trap"]

_NEAR = 4
"""How many ops back an input is followed."""


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
