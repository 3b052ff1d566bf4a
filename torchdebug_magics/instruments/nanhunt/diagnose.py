"""Named causes: a rule a cause, each with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.evidence import Evidence
from torchdebug_magics.instruments.nanhunt.knowledge import argument_of
from torchdebug_magics.instruments.nanhunt.naming import owner_of
from torchdebug_magics.instruments.nanhunt.trace import Op
from torchdebug_magics.probing.tensors import dense

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """Why, and what to change."""

    slug: str | None
    explanation: str
    fix: str


def diagnose(evidence: Evidence) -> Diagnosis:
    """The first rule that fits; without one, what the op did."""
    rules = _LEAF if evidence.op is None else _BACKWARD if evidence.op.backward or evidence.in_gradient else _FORWARD
    for rule in rules:
        found = rule(evidence)
        if found is not None:
            return found
    return _plain(evidence)


_LOGS = {"log", "log_", "log2", "log2_", "log10", "log10_", "log1p", "log1p_", "xlogy", "special_xlogy", "special_entr"}
_DIVISIONS = {"div", "div_", "reciprocal", "reciprocal_", "true_divide", "divide", "addcdiv", "addcdiv_", "remainder", "fmod", "floor_divide"}
_ROOTS = {"sqrt", "sqrt_", "rsqrt", "rsqrt_", "hypot"}
_POWERS = {"pow", "pow_", "float_power"}
_SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "logaddexp", "_masked_softmax", "_native_multi_head_attention"}
_SELECTORS = {"where", "masked_fill", "masked_fill_", "nan_to_num", "nan_to_num_", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max",
              "clamp_max_", "threshold", "relu", "relu_", "index_put", "index_put_", "_index_put_impl_", "masked_scatter", "maximum", "minimum",
              "hardtanh", "index", "masked_select", "fmax", "fmin"}  # fmt: skip
_NORMALISERS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
                "_native_batch_norm_legit_functional", "_batch_norm_with_update", "batch_norm", "_fused_rms_norm", "rms_norm", "cudnn_batch_norm"}  # fmt: skip
_POLES = {"acos", "asin", "acosh", "atanh", "erfinv", "logit", "acos_", "asin_", "atanh_", "special_ndtri", "lgamma", "digamma", "tan"}
_DECOMPOSITIONS = {"_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_qr", "_linalg_slogdet", "_linalg_det", "linalg_inv_ex", "_linalg_solve_ex", "linalg_lu_factor_ex"}


# --- what was there before the step --------------------------------------------------------------------------------------------------


def _bad_row(evidence: Evidence) -> Diagnosis | None:
    rows = evidence.rows
    which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows" if rows else "the tensor"
    kind = "NaN" if evidence.birth.kind == 1 else "an infinity"
    return Diagnosis(
        "bad_data_row", f"the data hold {kind} in {which}; the model only passed it on",
        f"drop or repair {which} before the model sees it, for example with torch.isfinite(...).all(1)",
    )  # fmt: skip


def _bad_embedding(evidence: Evidence) -> Diagnosis | None:
    if evidence.birth.via and evidence.birth.via[0].name in {"embedding", "index_select", "index", "_embedding_bag"}:
        rows = evidence.rows
        return Diagnosis(
            "bad_embedding_row", f"the embedding holds a bad row ({', '.join(map(str, rows[:5]))}), and this batch looked it up",
            "reinitialise that row, and look at what wrote it: an update with a bad gradient, or a broken checkpoint",
        )  # fmt: skip
    return None


# --- forward -------------------------------------------------------------------------------------------------------------------------


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
        "all_ignored", "every label of this batch is ignored, so the mean is taken over nothing: 0 / 0",
        f"skip a batch without labels: `if (labels != {ignored}).any():` around the loss, or use reduction='sum' and divide by max(count, 1)",
    )  # fmt: skip


def _masked_row(evidence: Evidence) -> Diagnosis | None:
    scores = evidence.inputs_at(0)
    attention = "attention" in evidence.name
    if scores is None or not (evidence.name in _SOFTMAXES or attention):
        return None
    numbers = dense(scores)
    blocked = numbers is not None and bool((numbers == -math.inf).any())
    if not blocked and not attention:
        return None
    return Diagnosis(
        "masked_row", "a whole row is masked with -inf, and softmax over nothing is 0 / 0",
        "leave at least one position open in each row, or skip such rows (a large finite number such as -1e9 in place of -inf also stays finite)",
    )  # fmt: skip


def _mask_sum(evidence: Evidence) -> Diagnosis | None:
    if evidence.name not in {"add", "add_", "sub", "sub_"} or evidence.birth.kind != 2:
        return None
    values = [value for value in evidence.operands() if isinstance(value, float)]
    lowest = torch.finfo(evidence.birth.tensor.dtype).min
    if len(values) < 2 or not all(math.isfinite(value) and value <= lowest / 4 for value in values[:2]):
        return None
    return Diagnosis(
        "mask_sum", "two additive masks, each near the smallest number of this type, sum up to -inf; a row blocked by both becomes NaN in softmax",
        "combine the masks before they become numbers (boolean `&`), or clamp the sum with .clamp(min=torch.finfo(x.dtype).min)",
    )  # fmt: skip


def _overflow(evidence: Evidence) -> Diagnosis | None:
    tensor = evidence.birth.tensor
    if evidence.birth.kind != 2 or tensor.dtype not in {torch.float16, torch.bfloat16}:
        return None
    if evidence.name in _LOGS | _DIVISIONS | _ROOTS and any(value == 0 for value in evidence.operands()):
        return None
    half = "fp16" if tensor.dtype is torch.float16 else "bf16"
    limit = torch.finfo(tensor.dtype).max
    return Diagnosis(
        f"{half}_overflow", f"the result does not fit {half}, whose largest number is {number(limit)}",
        "compute this op in float32 (.float() before it, or autocast disabled around it), scale its inputs down"
        + (", or use bfloat16" if half == "fp16" else ""),
    )  # fmt: skip


def _eps_zero(evidence: Evidence) -> Diagnosis | None:
    op = evidence.forward or evidence.op
    if op is None or op.name not in _NORMALISERS:
        return None
    eps = [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, float)]
    if not eps or eps[-1] != 0.0:
        return None
    return Diagnosis(
        "eps_zero", "the normalisation has eps=0 and met values without any variance: 0 / 0",
        "give the normalisation its eps back (1e-5 is the default)",
    )  # fmt: skip


def _zero_variance(evidence: Evidence) -> Diagnosis | None:
    if evidence.name in {"std", "var", "std_mean", "var_mean"}:
        return Diagnosis(
            "zero_variance", "the spread of a single value is 0 / 0 with the default correction",
            "use correction=0 (unbiased=False), or skip groups of one",
        )  # fmt: skip
    denominator = evidence.inputs_at(1) if evidence.name in {"div", "div_"} else evidence.inputs_at(0) if evidence.name in {"reciprocal", "rsqrt"} else None
    values = evidence.operands()
    if denominator is None or not values or not _zero(values[-1]):
        return None
    maker = evidence.maker(denominator)
    for _ in range(4):
        if maker is None:
            return None
        if maker.name in {"std", "var", "std_mean", "var_mean"}:
            return Diagnosis(
                "zero_variance", "the values do not vary, so their spread is 0, and this divides by it",
                "add a small number to the denominator: (x - mean) / (std + 1e-6)",
            )  # fmt: skip
        maker = evidence.trace.ops[maker.parents[0]] if maker.parents else None
    return None


def _exploded(evidence: Evidence) -> Diagnosis | None:
    """Numbers that grew and grew until they left the range: the step was too long."""
    if evidence.birth.kind != 2 or not _grew(evidence.context.history):
        return None
    values = [value for value in evidence.operands() if isinstance(value, float)]
    if any(value == 0 for value in values) and evidence.name in _LOGS | _DIVISIONS | _ROOTS | _POWERS:
        return None
    first, last = [value for value in evidence.context.history if math.isfinite(value)][0::max(1, len(evidence.context.history) - 2)][:2] or (0.0, 0.0)
    return Diagnosis(
        "lr_too_high", f"the gradients grew step by step (from {number(first)} to {number(last)}) until numbers left the range: the run diverged",
        "lower the learning rate (try a tenth), warm it up, or clip with torch.nn.utils.clip_grad_norm_",
    )  # fmt: skip


def _own_parameter(evidence: Evidence) -> Diagnosis | None:
    """An op applied to a parameter itself that has grown out of range."""
    op = evidence.forward
    if evidence.birth.kind != 2 or op is None or evidence.context.step == 0 or op.name not in _GROWING:
        return None
    for tensor in op.inputs():
        owner = owner_of(tensor, evidence.context.roots)
        if owner is not None and owner[0] == "parameter" and (numbers := dense(tensor)) is not None:
            return Diagnosis(
                "exploding_parameter", f"the parameter {owner[1]} has grown to {number(float(numbers.abs().max()))}, too large for {op.name}",
                "lower the learning rate for it, give it weight decay, or bound it (clamp, softplus, a parametrization)",
            )  # fmt: skip
    return None


_GROWING = {"exp", "exp_", "expm1", "sinh", "cosh", "pow", "square", "mul", "mul_", "addmm", "mm"}


def _grew(history: tuple[float, ...]) -> bool:
    finite = [value for value in history if math.isfinite(value) and value > 0][-30:]
    return len(finite) >= 2 and finite[-1] > 1e3 * max(min(finite), 1e-30) and finite[-1] > 1e4 and finite[-1] == max(finite)  # noqa: PLR2004


def _domain(names: set[str], slug: str, test: Callable[[Evidence], bool], explanation: str, fix: str) -> Callable[[Evidence], Diagnosis | None]:
    def rule(evidence: Evidence) -> Diagnosis | None:
        return Diagnosis(slug, explanation, fix) if evidence.name in names and test(evidence) else None

    return rule


def _zero(value: Any) -> bool:
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
    if op is not None and len(_tensors(op)) < 2 and any(_zero(value) for value in op.args if not isinstance(value, torch.Tensor)):
        return True
    return _operand(-1, lambda value: value == 0)(evidence)


def _tensors(op: Op) -> list[torch.Tensor]:
    return op.inputs()


_LOG_ZERO = _domain(_LOGS, "log_zero", lambda one: any(_zero(value) for value in one.operands()) or one.name == "log1p", "the logarithm of 0 is -inf", "add a small number, log(x + 1e-9), or use log1p, log_softmax or BCEWithLogits, which stay finite")
_LOG_NEGATIVE = _domain(_LOGS, "log_negative", _operand(0, lambda value: value < 0), "the logarithm of a negative number is NaN", "make sure that the argument is positive: clamp(min=1e-9), softplus, or a fix of what made it negative")
_DIV_ZERO = _domain(_DIVISIONS, "div_zero", _div_by_zero, "a division by 0", "add a small number to the denominator, or clamp it: x / y.clamp(min=1e-8)")
_ROOT_ZERO = _domain({"sqrt", "sqrt_", "rsqrt", "rsqrt_", "hypot"}, "sqrt_zero", _operand(0, lambda value: value == 0), "the slope of a square root at 0 is infinite", "add a small number under the root: (x + 1e-12).sqrt(); for a distance use torch.linalg.vector_norm, which is safe at 0")
_ROOT_NEGATIVE = _domain(_ROOTS, "sqrt_negative", _operand(0, lambda value: value < 0), "the square root of a negative number is NaN", "clamp(min=0) before the root, and look at what made it negative (a difference of squares loses digits)")
_POW_ZERO = _domain(_POWERS, "pow_zero", _operand(0, lambda value: value == 0), "a power of 0 whose value or slope is infinite", "add a small number to the base: (x + 1e-12) ** p")
_POW_NEGATIVE = _domain(_POWERS, "pow_negative", _operand(0, lambda value: value < 0), "a fractional power of a negative number is NaN", "take abs() or clamp(min=0) first")
_CTC = _domain({"_ctc_loss", "ctc_loss", "_cudnn_ctc_loss"}, "infeasible_ctc", lambda _: True, "a target is longer than its input allows (repeated labels need a blank between them), so no alignment exists", "use zero_infinity=True, or drop samples whose input is too short")
_POLE = _domain(_POLES, "pole", lambda _: True, "the argument lies at or beyond the edge of where this function is finite", "clamp the argument a little inside, for example clamp(-1 + 1e-6, 1 - 1e-6)")
_EMPTY_MEAN = _domain({"mean"}, "empty_mean", lambda one: (tensor := one.inputs_at(0)) is not None and tensor.numel() == 0, "the mean of nothing is 0 / 0", "skip the batch when the selection is empty, or divide a sum by max(count, 1)")
_EXP = _domain({"exp", "exp_", "expm1", "sinh", "cosh"}, "exp_overflow", lambda one: one.birth.kind == 2, "the exponential left the range of its type", "subtract the maximum first, or use logsumexp, softmax or softplus, which do so")
_DECOMPOSITION = _domain(_DECOMPOSITIONS, "degenerate_matrix", lambda _: True, "the matrix is singular, or has equal eigenvalues, where the derivative is infinite", "add a little to the diagonal: A + 1e-6 * torch.eye(n)")


# --- backward ------------------------------------------------------------------------------------------------------------------------


def _where_trap(evidence: Evidence) -> Diagnosis | None:
    """The forward threw the bad value away, the derivative did not: 0 from the unselected branch times infinity."""
    forward = evidence.forward
    if forward is None:
        return None
    gradient = [value for value in evidence.own_operands() if isinstance(value, (int, float))]
    if evidence.op is not None and evidence.op.backward and not any(value == 0 for value in gradient):
        return None
    selector = next((one for one in evidence.consumers(forward) if one.name in _SELECTORS), None)
    if selector is None:
        return None
    return Diagnosis(
        "where_trap",
        f"the value of {forward.name} at this place is thrown away by {selector.name} later, but its derivative is infinite, and 0 x inf is NaN",
        f"make the argument safe before {forward.name}, not its result after: x_safe = torch.where(ok, x, 1.0), then torch.where(ok, {forward.name}(x_safe), 0.0)",
    )  # fmt: skip


def _plain(evidence: Evidence) -> Diagnosis:
    values = ", ".join(value if isinstance(value, str) else number(value) for value in evidence.operands()[:3])
    kind = "NaN" if evidence.birth.kind == 1 else "an infinity"
    what = f"the derivative of {evidence.name}" if evidence.op is not None and evidence.op.backward else evidence.name or "it"
    if evidence.op is None:
        return Diagnosis(None, f"it held {kind} before the step began", "find out what wrote it")
    return Diagnosis(None, f"{what} made {kind} of finite numbers" + (f" ({values})" if values else ""), f"look at what enters {evidence.name} here")


Rule = Callable[[Evidence], "Diagnosis | None"]
_LEAF: tuple[Rule, ...] = (_bad_embedding, _bad_row)
_ARITHMETIC: tuple[Rule, ...] = (
    _all_ignored, _CTC, _masked_row, _mask_sum, _eps_zero, _zero_variance, _EMPTY_MEAN, _overflow, _exploded, _own_parameter, _LOG_ZERO, _LOG_NEGATIVE,
    _ROOT_NEGATIVE, _ROOT_ZERO, _POW_NEGATIVE, _POW_ZERO, _DIV_ZERO, _EXP, _POLE, _DECOMPOSITION,
)  # fmt: skip
_FORWARD: tuple[Rule, ...] = _ARITHMETIC
_BACKWARD: tuple[Rule, ...] = (_where_trap, *_ARITHMETIC)
