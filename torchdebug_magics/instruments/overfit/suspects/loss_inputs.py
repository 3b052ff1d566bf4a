"""Suspects in the inputs of the loss function and in its reduction; those that one call shows are rows of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import number
from torchdebug_magics.instruments.overfit.report import Cause
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence, itself, of_changed, replaced
from torchdebug_magics.instruments.overfit.training.change import Change, OnCall
from torchdebug_magics.instruments.overfit.training.loss_calls import BINARY, DISTANCES, LOSSES, LossCall, is_probabilities
from torchdebug_magics.instruments.overfit.training.observed_step import Activation, called_name

_LESS, _MORE = 0.5, 2.0
_TINY = 1e-12
_FAR = 1e-2
"""How far the logarithm of a sum of probabilities is from 0 only where they are none."""
_LIMITS = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
"""Between what these keep an output."""
_SUBTRACTIONS = {"sub", "__sub__", "__rsub__", "rsub"}


class Rule(NamedTuple):
    """What is wrong with a call of one of these functions, if it holds of the call and of the name of what made its input."""

    functions: tuple[Any, ...]
    holds: Callable[[LossCall, str], bool]
    headline: str
    fix: str
    change: Callable[[LossCall, Tensor, Tensor], tuple[Tensor, Tensor]] | Callable[[Tensor], Tensor] | None = None
    """What makes (input, target); `itself` or `torch.sigmoid` come in place of what made the input."""
    instead: Any = None
    cause: Cause = "wrong_loss_input"
    text: str = ""


def _is_single(call: LossCall, _made: str = "") -> bool:
    return call.input.numel() == call.input.shape[0]


def _logarithm(_call: LossCall, values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return values.clamp_min(_TINY).log(), target


def _label_less_one(call: LossCall, values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return values, torch.where(target == call.ignored, target, target - 1)


def _is_one_or_two(call: LossCall) -> bool:
    return set(call.target.unique().tolist()) == {1.0, 2.0}


def _lies_outside(call: LossCall, made: str) -> bool:
    low, high = _LIMITS.get(made, (-math.inf, math.inf))
    return bool(((call.target < low) | (call.target > high)).any())


_LOGITS = "`{loss}` expects logits: its input is the result of `{made}`{line}"
_REMOVED = "remove the `{made}` before `{loss}`"
_SHAPES = (
    Rule(
        LOSSES,
        lambda call, _: not call.is_classes and call.input.shape != call.target.shape and call.input.numel() == call.target.numel(),
        "`{loss}` compares shapes {sizes}: each output is compared with every target",
        "give the loss function a target in the output's shape: `target.view_as(output)`",
        lambda _, values, target: (values, target.reshape(values.shape).to(values.dtype)),
        cause="target_shape",
        text="target in the shape of the output",
    ),
)
_TARGETS = (
    Rule(
        BINARY,
        lambda call, _: bool(call.target.numel()) and float(call.target.max()) > 1 and not _is_one_or_two(call),
        "`{loss}` expects targets between 0 and 1: they go up to {most}",
        "divide the targets by {high:g}",
        lambda call, values, target: (values, target / float(call.target.max())),
    ),
)
_INPUTS = (
    Rule(
        (F.cross_entropy,),
        lambda _, made: made == "softmax",
        "`softmax`{line} is applied twice: `{loss}` expects logits",
        _REMOVED,
        itself,
        cause="double_softmax",
    ),
    Rule((F.cross_entropy,), lambda _, made: made in {"sigmoid", "tanh", "relu", "relu6"}, _LOGITS, _REMOVED, itself),
    Rule(
        (F.cross_entropy,),
        lambda call, made: made != "log_softmax" and is_probabilities(call.input),
        "`softmax` is applied twice: `cross_entropy` expects logits",
        "remove the `softmax` before `cross_entropy`",
        _logarithm,
        cause="double_softmax",
    ),
    Rule(
        (F.cross_entropy,),
        lambda call, _: call.is_classes and call.classes == 1 and call.input.dim() > 1,
        "`cross_entropy` of a single class is always 0",
        "use `F.binary_cross_entropy_with_logits` for one output",
        lambda _, values, target: (values.reshape(-1), target.reshape(-1).to(values.dtype)),
        F.binary_cross_entropy_with_logits,
    ),
    Rule(
        (F.nll_loss,),
        lambda call, _: is_probabilities(call.input),
        "`nll_loss` expects log-probabilities, not probabilities",
        "use `log_softmax` in place of `softmax` before `nll_loss`",
        _logarithm,
    ),
    Rule(
        (F.nll_loss,),
        lambda call, _: call.input.dim() > 1 and bool((call.input.float().logsumexp(1).abs() > _FAR).any()),
        "`nll_loss` expects log-probabilities, not logits",
        "use `F.cross_entropy` in place of `nll_loss`, or `log_softmax` before it",
        lambda _, values, target: (values.log_softmax(1), target),
    ),
    Rule((F.binary_cross_entropy_with_logits,), lambda _, made: made in {"sigmoid", "softmax", "relu", "tanh"}, _LOGITS, _REMOVED, itself),
    Rule(
        (F.binary_cross_entropy,),
        lambda call, made: made == "softmax" and _is_single(call),
        "`softmax` of a single output is always 1",
        "use `sigmoid` in place of `softmax`",
        torch.sigmoid,
    ),
    Rule(
        (F.binary_cross_entropy,),
        lambda call, made: made != "sigmoid" and bool(((call.input < 0) | (call.input > 1)).any()),
        "`binary_cross_entropy` expects probabilities, not logits",
        "use `F.binary_cross_entropy_with_logits`",
        lambda _, values, target: (values.sigmoid(), target),
    ),
    Rule(
        (F.kl_div,),
        lambda call, _: call.input.dim() > 0 and (is_probabilities(call.input, -1) or bool((call.input > _FAR).any())),
        "`kl_div` expects log-probabilities as its input",
        "use `log_softmax` before `kl_div`",
        lambda call, values, target: (
            _logarithm(call, values, target) if is_probabilities(call.input, -1) else (values.log_softmax(-1), target)
        ),
    ),
    Rule(
        DISTANCES,
        lambda call, made: made == "softmax" and _is_single(call),
        "`softmax`{line} of a single output is always 1",
        "use `sigmoid` in place of `softmax`",
        torch.sigmoid,
    ),
    Rule(
        DISTANCES,
        _lies_outside,
        "`{made}`{line} keeps the output {limits}: some targets lie outside",
        "remove the `{made}` after the last layer",
        itself,
    ),
)
_LABELS = (
    Rule(
        LOSSES,
        lambda call, _: call.is_classes and bool((call.labels > 0).all()) and call.classes in call.labels,
        "Labels range from {low:g} to {high:g}, the {classes} classes from 0 to {top}: they are off by one",
        "subtract one from the labels: `labels - 1`",
        _label_less_one,
        cause="off_by_one_labels",
        text="labels - 1",
    ),
    Rule(
        BINARY,
        lambda call, _: _is_one_or_two(call),
        "Labels are 1 and 2, and the loss expects 0 and 1: they are off by one",
        "subtract one from the labels: `labels - 1`",
        _label_less_one,
        cause="off_by_one_labels",
        text="labels - 1",
    ),
    Rule(
        (F.ctc_loss,),
        lambda call, _: int(call.target.min()) == call.options.get("blank", 0) == 0,
        "Labels contain 0, the blank of ctc_loss: they are off by one",
        "keep 0 for the blank: `labels + 1`",
        lambda _, values, target: (values, (target + 1).clamp_max(values.shape[-1] - 1)),
        cause="off_by_one_labels",
        text="labels + 1",
    ),
)


def suspects(seen: Evidence) -> Iterator[Change]:
    """Yields changes of shapes, of activations before the loss, of labels out of range, and of the scale of the loss."""
    source = seen.base.first.loss_from
    yield from _over_the_batch(seen)
    for call in seen.base.first.losses:
        for rules in (_SHAPES, _TARGETS, _INPUTS, _LABELS):
            made = "" if source is None else source.name
            rule = next((rule for rule in rules if call.function in rule.functions and rule.holds(call, made)), None)
            if rule is not None:
                yield _by(rule, call, source)
        yield from _shifted(seen, call)
    yield from _broadcast(seen)
    yield from _scale(seen)


def _by(rule: Rule, call: LossCall, source: Activation | None) -> Change:
    change: Any = rule.change
    labels = call.labels if call.is_classes and len(call.labels) else call.target
    low, high = (float(labels.min()), float(labels.max())) if labels.numel() else (0.0, 0.0)
    made = "" if source is None else source.name
    ends = _LIMITS.get(made, (0.0, math.inf))
    words = {
        "loss": call.name,
        "made": made,
        "line": f" at {source.location}" if source is not None and source.location is not None else "",
        "limits": f"at least {number(ends[0])}" if ends[1] == math.inf else f"between {number(ends[0])} and {number(ends[1])}",
        "sizes": f"{tuple(call.input.shape)} against {tuple(call.target.shape)}",
        "low": low,
        "high": high,
        "most": number(high),
        "classes": call.classes,
        "top": call.classes - 1,
    }
    fix = rule.fix.format(**words)
    at = source if change in (itself, torch.sigmoid) else None
    return Change(
        suspect=rule.cause,
        text=rule.text or fix.replace("`", ""),
        headline=rule.headline.format(**words),
        fix=fix,
        location=at.location if at is not None and at.location is not None else call.location,
        module=at.module if at is not None else "",
        on_call=replaced(at.name, at.location, change)
        if at is not None
        else of_changed((call.function,), lambda values, target: change(call, values, target), rule.instead),
    )


def _over_the_batch(seen: Evidence) -> Iterator[Change]:
    """Yields a softmax over the classes, for one over the samples."""
    for one in seen.base.first.activations:
        is_table = one.given.dim() == 2 and len(one.given) == seen.base.first.samples and one.given.shape[1] > 1  # noqa: PLR2004
        if one.name in {"softmax", "log_softmax"} and is_table and one.dim in {0, -2}:
            function = getattr(torch, one.name)
            yield Change(
                suspect="wrong_loss_input",
                text=f"{one.name} over dim=-1",
                headline=f"`{one.name}` at {one.location or 'the output'} is over the batch (dim={one.dim}): it must be over the classes",
                fix=f"use `dim=-1` in `{one.name}`",
                location=one.location,
                module=one.module,
                on_call=replaced(one.name, one.location, lambda values, function=function: function(values, dim=-1)),
            )


def _broadcast(seen: Evidence) -> Iterator[Change]:
    """Yields a difference of one shape, for one that is written with operators."""
    if seen.base.first.broadcast is None:
        return
    place, *shapes = seen.base.first.broadcast

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pair = called_name(function) in _SUBTRACTIONS and len(args) == len(shapes) and all(isinstance(one, Tensor) for one in args)
        if not is_pair or [tuple(one.shape) for one in args] != shapes:
            return None
        wide = max(args, key=lambda one: one.dim()).shape
        return function, tuple(one.reshape(wide) for one in args), kwargs

    yield Change(
        suspect="target_shape",
        text="target in the shape of the output",
        headline=f"A difference of shapes {shapes[0]} and {shapes[1]} broadcasts: each output is compared with every target",
        fix="give both the same shape: `output.squeeze(-1) - target`",
        location=place,
        on_call=instead,
    )


def _shifted(seen: Evidence, call: LossCall) -> Iterator[Change]:
    """Yields labels shifted once, for a language model whose labels are shifted twice."""
    known = call.words_ahead(seen.base.first.inputs)
    if known is None or known[2] < 2:  # noqa: PLR2004 - the next word is one further
        return
    ids, target, lag = known

    def next_words(values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        many = min(target.shape[1], ids.shape[1] - 1)
        right = torch.full_like(target, call.ignored)
        right[:, :many] = torch.where(target[:, :many] == call.ignored, call.ignored, ids[:, 1 : 1 + many])
        return values, right.reshape(other.shape)

    yield Change(
        suspect="off_by_one_labels",
        text="the next token as label",
        headline=f"The labels are {lag} tokens ahead of the input, not 1: they are shifted twice",
        fix="shift the labels once: pass `labels=input_ids` to a model that shifts them itself",
        location=call.location,
        on_call=of_changed((call.function,), next_words),
    )


def _scale(seen: Evidence) -> Iterator[Change]:
    """Yields the mean, for a loss that is summed or multiplied, by the loss function or by the user's own code."""
    calls, summed = seen.base.first.losses, seen.base.summed
    if calls and len(calls) != 1:
        return
    if calls:
        call, scale = calls[0], abs(seen.base.loss_scale)
        scale = 1.0 if any(abs(scale - one) < 1e-3 * one for one in seen.scales) else scale
        factor, place = float(f"{scale * call.size:.6g}"), call.location
        is_sum = call.size > 1 and _LESS <= scale <= _MORE
        what = f"summed over {number(call.size)} terms" if is_sum else f"{factor:.3g} times the mean"
        by_factor = f"use the mean loss: multiply the loss by {1 / factor:.4g}, or remove its factor" if factor else ""
        fix = 'use `reduction="mean"`' if is_sum else by_factor
    else:
        factor, place, what = float(summed), None, f"summed over {summed:,} terms"
        fix = "use `.mean()` in place of `.sum()` for the loss"
    if factor and not _LESS <= factor <= (_MORE if calls else _MORE - 1):
        yield Change(
            suspect="reduction",
            text="mean loss",
            headline=f"The loss is {what}: with the mean, the model learns {seen.subject}",
            fix=fix,
            factor=factor,
            location=place,
            backward_scale=1 / factor,
        )


def rows_of(seen: Evidence, keep: Tensor) -> OnCall | None:
    """The loss functions of some samples only; None where rows of the loss's input are not those of the batch."""
    samples, calls = seen.base.first.samples, seen.base.first.losses
    if not calls or not samples or any(len(call.input) % samples for call in calls if call.input.dim()):
        return None

    def chosen(values: Tensor) -> Tensor:
        return values.reshape(samples, len(values) // samples, *values.shape[1:])[keep].flatten(0, 1) if len(values) else values

    return of_changed({call.function for call in calls}, lambda values, target: (chosen(values), chosen(target)))
