"""Named causes: a rule a cause, each with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.causes import (
    DIVISIONS,
    LOGS,
    NORMALISERS,
    OPERAND_CAUSES,
    POWERS,
    ROOTS,
    SELECTORS,
    SOFTMAXES,
    Diagnosis,
    Rule,
    is_zero,
)
from torchdebug_magics.instruments.nanhunt.knowledge import argument_of
from torchdebug_magics.instruments.nanhunt.naming import owner_of
from torchdebug_magics.probing.tensors import INF, NAN, dense, kind_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.evidence import Evidence

__all__ = ["Diagnosis", "diagnose"]


def diagnose(evidence: Evidence) -> Diagnosis:
    """The first rule that fits; without one, what the op did."""
    rules = _LEAF if evidence.op is None else _BACKWARD if evidence.op.backward or evidence.in_gradient else _FORWARD
    for rule in rules:
        found = rule(evidence)
        if found is not None:
            return found
    return _plain(evidence)


# --- what was there before the step --------------------------------------------------------------------------------------------------


def _bad_row(evidence: Evidence) -> Diagnosis | None:
    rows = evidence.rows
    which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows" if rows else "the tensor"
    kind = "NaN" if evidence.birth.kind == NAN else "an infinity"
    return Diagnosis(
        "bad_data_row",
        f"the data hold {kind} in {which}; the model only passed it on",
        f"drop or repair {which} before the model sees it, for example with `torch.isfinite(...).all(1)`",
    )


def _bad_embedding(evidence: Evidence) -> Diagnosis | None:
    if evidence.birth.via and evidence.birth.via[0].name in {"embedding", "index_select", "index", "_embedding_bag"}:
        rows = evidence.rows
        return Diagnosis(
            "bad_embedding_row",
            f"the embedding holds a bad row ({', '.join(map(str, rows[:5]))}), and this batch looked it up",
            "reinitialise that row, and look at what wrote it: an update with a bad gradient, or a broken checkpoint",
        )
    return None


# --- forward -------------------------------------------------------------------------------------------------------------------------


def _nan_constant(evidence: Evidence) -> Diagnosis | None:
    op = evidence.op
    if op is None or not any(map(_is_nan_number, (*op.args, *op.kwargs.values()))):
        return None
    hidden = "; the loss does not show it, its derivative does" if evidence.in_gradient else ""
    return Diagnosis(
        "nan_constant",
        f"NaN was written here, as a number{hidden}",
        "write a finite number in its place, or select the good elements (`x[ok]`) before anything is computed with them",
    )


def _is_nan_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):  # made of a number by torch
        return value.dim() == 0 and value.grad_fn is None and not value.requires_grad and bool(kind_of(value) & NAN)
    return isinstance(value, float) and math.isnan(value)


def _all_ignored(evidence: Evidence) -> Diagnosis | None:
    if not evidence.name.startswith(("nll_loss", "cross_entropy")):
        return None
    target = evidence.inputs_at(1)
    op = evidence.op
    ignored = argument_of(op.func, op.args, op.kwargs, "ignore_index") if op is not None else None
    ignored = -100 if ignored is None else ignored
    if target is None or not (target.numel() == 0 or bool((target == ignored).all())):
        return None
    return Diagnosis(
        "all_ignored",
        "every label of this batch is ignored, so the mean is taken over nothing: 0 / 0",
        f"skip a batch without labels, `if (labels != {ignored}).any():`, or use `reduction='sum'` and divide by `max(count, 1)`",
    )


def _masked_row(evidence: Evidence) -> Diagnosis | None:
    scores = evidence.inputs_at(0)
    attention = "attention" in evidence.name
    if scores is None or not (evidence.name in SOFTMAXES or attention):
        return None
    numbers = dense(scores)
    blocked = numbers is not None and bool((numbers == -math.inf).any())
    if not blocked and not attention:
        return None
    return Diagnosis(
        "masked_row",
        "a whole row is masked with -inf, and softmax over nothing is 0 / 0",
        "leave at least one position open in each row, or skip such rows (-1e9 in place of -inf stays finite, too)",
    )


def _mask_sum(evidence: Evidence) -> Diagnosis | None:
    if evidence.name not in {"add", "add_", "sub", "sub_"} or evidence.birth.kind != INF:
        return None
    values = [value for value in evidence.operands() if isinstance(value, float)]
    lowest = torch.finfo(evidence.birth.tensor.dtype).min
    if len(values) == 1 or not all(math.isfinite(value) and value <= lowest / 4 for value in values[:2]) or not values:
        return None
    return Diagnosis(
        "mask_sum",
        "two additive masks, each near the smallest number of this type, sum up to -inf; a row full of it is NaN in softmax",
        "combine the masks before they become numbers (boolean `&`), or clamp the sum with `.clamp(min=torch.finfo(x.dtype).min)`",
    )


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


def _eps_zero(evidence: Evidence) -> Diagnosis | None:
    op = evidence.forward or evidence.op
    if op is None or op.name not in NORMALISERS:
        return None
    eps = [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, float)]
    if not eps or eps[-1] != 0.0:
        return None
    return Diagnosis(
        "eps_zero",
        "the normalisation has eps=0 and met values without any variance: 0 / 0",
        "give the normalisation its eps back (1e-5 is the default)",
    )


def _zero_variance(evidence: Evidence) -> Diagnosis | None:
    if evidence.name in {"std", "var", "std_mean", "var_mean"}:
        return Diagnosis(
            "zero_variance",
            "the spread of a single value is 0 / 0 with the default correction",
            "use `correction=0` (`unbiased=False`), or skip groups of one",
        )
    denominator = (
        evidence.inputs_at(1)
        if evidence.name in {"div", "div_"}
        else evidence.inputs_at(0)
        if evidence.name in {"reciprocal", "rsqrt"}
        else None
    )
    values = evidence.operands()
    if denominator is None or not values or not is_zero(values[-1]):
        return None
    maker = evidence.maker(denominator)
    for _ in range(4):
        if maker is None:
            return None
        if maker.name in {"std", "var", "std_mean", "var_mean"}:
            return Diagnosis(
                "zero_variance",
                "the values do not vary, so their spread is 0, and this divides by it",
                "add a small number to the denominator: `(x - mean) / (std + 1e-6)`",
            )
        maker = evidence.trace.ops[maker.parents[0]] if maker.parents else None
    return None


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


_GROWING = {"exp", "exp_", "expm1", "sinh", "cosh", "pow", "square", "mul", "mul_", "addmm", "mm"}


def _grew(history: tuple[float, ...]) -> bool:
    finite = [value for value in history if math.isfinite(value) and value > 0][-30:]
    return len(finite) >= 2 and finite[-1] > 1e3 * max(min(finite), 1e-30) and finite[-1] > 1e4 and finite[-1] == max(finite)  # noqa: PLR2004


# --- backward ------------------------------------------------------------------------------------------------------------------------


def _where_trap(evidence: Evidence) -> Diagnosis | None:
    """The forward threw the bad value away, the derivative did not: 0 from the unselected branch times infinity."""
    forward = evidence.forward
    if forward is None:
        return None
    gradient = [value for value in evidence.own_operands() if isinstance(value, (int, float))]
    if evidence.op is not None and evidence.op.backward and not any(value == 0 for value in gradient):
        return None
    selector = next((one for one in evidence.consumers(forward) if one.name in SELECTORS), None)
    if selector is None:
        return None
    return Diagnosis(
        "where_trap",
        f"the value of `{forward.name}` here is thrown away by `{selector.name}` later, its derivative is not: 0 times a bad number is NaN",
        f"make the argument safe before `{forward.name}`, not its result after it: `x = torch.where(ok, x, 1.0)`, then `{forward.name}(x)`",
    )


def _plain(evidence: Evidence) -> Diagnosis:
    values = ", ".join(value if isinstance(value, str) else number(value) for value in evidence.operands()[:3])
    kind = "NaN" if evidence.birth.kind == NAN else "an infinity"
    what = (
        f"the derivative of `{evidence.name}`"
        if evidence.op is not None and evidence.op.backward
        else f"`{evidence.name}`"
        if evidence.name
        else "it"
    )
    if evidence.op is None:
        return Diagnosis(None, f"it held {kind} before the step began", "find out what wrote it")
    return Diagnosis(
        None, f"{what} made {kind} of finite numbers" + (f" ({values})" if values else ""), f"look at what enters `{evidence.name}` here"
    )


_LEAF: tuple[Rule, ...] = (_bad_embedding, _bad_row)
_FORWARD: tuple[Rule, ...] = (
    _nan_constant,
    _all_ignored,
    _masked_row,
    _mask_sum,
    _eps_zero,
    _zero_variance,
    _overflow,
    _exploded,
    _own_parameter,
    *OPERAND_CAUSES,
)
_BACKWARD: tuple[Rule, ...] = (_nan_constant, _where_trap, *_FORWARD[1:])
