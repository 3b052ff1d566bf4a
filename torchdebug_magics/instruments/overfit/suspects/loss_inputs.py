"""Suspects in the inputs of the loss function and in its reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import number
from torchdebug_magics.instruments.overfit.report import Cause
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence, at_line, without
from torchdebug_magics.instruments.overfit.training.change import Change, OnCall
from torchdebug_magics.instruments.overfit.training.loss_calls import DISTANCES, LossCall, is_probabilities, names_of
from torchdebug_magics.instruments.overfit.training.observed_step import Activation, called_name

_LESS, _MORE = 0.5, 2.0
_TINY = 1e-12
_FAR = 1e-2
"""How far the logarithm of a sum of probabilities is from 0 only where they are none."""
_LIMITS = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}


def suspects(seen: Evidence) -> Iterator[Change]:
    """Yields changes of shapes, of activations before the loss, of labels out of range, and of the scale of the loss."""
    calls = seen.base.first.losses
    yield from over_the_batch(seen)
    for call in calls:
        yield from _shape(call)
        yield from wrong_input(call, seen.base.first.loss_from)
        yield from _labels(call)
        yield from _shifted(seen, call)
    yield from _broadcast(seen)
    yield from _scale(seen, calls)


def _shape(call: LossCall) -> Iterator[Change]:
    values, target = call.input, call.target
    if call.is_classes or values.shape == target.shape or values.numel() != target.numel():
        return
    sizes = f"{_sizes(values)} against {_sizes(target)}"
    yield Change(
        suspect="target_shape",
        text="target in the shape of the output",
        headline=f"`{call.name}` compares shapes {sizes}: each output is compared with every target",
        fix="give the loss function a target in the output's shape: `target.view_as(output)`",
        location=call.location,
        on_call=of_changed(call, lambda one, other: (one, other.reshape(one.shape).to(one.dtype))),
    )


def _broadcast(seen: Evidence) -> Iterator[Change]:
    if seen.base.first.broadcast is None:
        return
    place, one, other = seen.base.first.broadcast

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if called_name(function) not in {"sub", "__sub__", "__rsub__", "rsub"} or len(args) != 2:  # noqa: PLR2004 - both sides
            return None
        left, right = args
        is_it = isinstance(left, Tensor) and isinstance(right, Tensor) and tuple(left.shape) == one and tuple(right.shape) == other
        return (
            (
                function,
                (
                    left.reshape(right.shape) if left.dim() < right.dim() else left,
                    right.reshape(left.shape) if right.dim() < left.dim() else right,
                ),
                kwargs,
            )
            if is_it
            else None
        )

    yield Change(
        suspect="target_shape",
        text="target in the shape of the output",
        headline=f"A difference of shapes {_tuple(one)} and {_tuple(other)} broadcasts: each output is compared with every target",
        fix="give both the same shape: `output.squeeze(-1) - target`",
        location=place,
        on_call=instead,
    )


def _labels(call: LossCall) -> Iterator[Change]:
    if call.is_classes and len(call.labels):
        low, high = int(call.labels.min()), int(call.labels.max())
        if low < 1 or high != call.classes:
            return
        limits = f"Labels range from {low} to {high}, the {call.classes} classes from 0 to {call.classes - 1}"
    elif call.name.startswith("binary_cross_entropy") and call.target.numel() and float(call.target.max()) > 1:
        if set(call.target.unique().tolist()) != {1.0, 2.0}:
            return
        limits = "Labels are 1 and 2, and the loss expects 0 and 1"
    elif call.name == "ctc_loss" and int(call.target.min()) == (blank := call.options.get("blank", 0)) == 0:
        yield Change(
            suspect="off_by_one_labels",
            text="labels + 1",
            headline=f"Labels contain {blank}, the blank of ctc_loss: they are off by one",
            fix="keep 0 for the blank: `labels + 1`",
            location=call.location,
            on_call=of_changed(call, lambda one, other: (one, (other + 1).clamp_max(one.shape[-1] - 1))),
        )
        return
    else:
        return
    ignored = call.ignored
    yield Change(
        suspect="off_by_one_labels",
        text="labels - 1",
        headline=f"{limits}: they are off by one",
        fix="subtract one from the labels: `labels - 1`",
        location=call.location,
        on_call=of_changed(call, lambda one, other: (one, torch.where(other == ignored, other, other - 1))),
    )


def _shifted(seen: Evidence, call: LossCall) -> Iterator[Change]:
    """Yields labels shifted once, for a language model whose labels are shifted twice."""
    known = call.words_ahead(seen.base.first.inputs)
    if known is None or known[2] < 2:  # noqa: PLR2004 - the next word is one further
        return
    ids, target, lag = known
    ignored = call.ignored

    def next_words(values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        many = min(target.shape[1], ids.shape[1] - 1)
        right = torch.full_like(target, ignored)
        right[:, :many] = torch.where(target[:, :many] == ignored, ignored, ids[:, 1 : 1 + many])
        return values, right.reshape(other.shape)

    yield Change(
        suspect="off_by_one_labels",
        text="the next token as label",
        headline=f"The labels are {lag} tokens ahead of the input, not 1: they are shifted twice",
        fix="shift the labels once: pass `labels=input_ids` to a model that shifts them itself",
        location=call.location,
        on_call=of_changed(call, next_words),
    )


def _scale(seen: Evidence, calls: list[LossCall]) -> Iterator[Change]:
    if len(calls) != 1:
        yield from _plain_sum(seen, calls)
        return
    call, scale = calls[0], abs(seen.base.loss_scale)
    if any(abs(scale - one) < 1e-3 * one for one in seen.scales):
        scale = 1.0
    factor = float(f"{scale * call.size:.6g}")
    if not factor or _LESS <= factor <= _MORE:
        return
    is_sum = call.size > 1 and _LESS <= scale <= _MORE
    what = f"summed over {number(call.size)} terms" if is_sum else f"{factor:.3g} times the mean"
    yield Change(
        suspect="reduction",
        text="mean loss",
        headline=f"The loss is {what}: with the mean, the model learns {seen.subject}",
        fix='use `reduction="mean"`' if is_sum else f"use the mean loss: multiply the loss by {1 / factor:.4g}, or remove its factor",
        factor=factor,
        location=call.location,
        backward_scale=1 / factor,
    )


def _plain_sum(seen: Evidence, calls: list[LossCall]) -> Iterator[Change]:
    """Yields the mean, for a loss that the user's own code sums."""
    if calls or seen.base.summed < _MORE:
        return
    yield Change(
        suspect="reduction",
        text="mean loss",
        headline=f"The loss is summed over {seen.base.summed:,} terms: with the mean, the model learns {seen.subject}",
        fix="use `.mean()` in place of `.sum()` for the loss",
        factor=float(seen.base.summed),
        backward_scale=1 / seen.base.summed,
    )


def rows_of(seen: Evidence, keep: Tensor) -> OnCall | None:
    """The loss functions of some samples only; None where rows of the loss's input are not those of the batch."""
    samples = seen.base.first.samples
    calls = seen.base.first.losses
    if not calls or not samples or any(len(call.input) % samples for call in calls if call.input.dim()):
        return None
    functions = {call.function for call in calls}

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function not in functions:
            return None
        names = ("input", "target")
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        chosen = [_rows(given[name], samples, keep) for name in names]
        return function, (*chosen, *args[2:]), {name: value for name, value in kwargs.items() if name not in given}

    return instead


def _rows(values: Tensor, samples: int, keep: Tensor) -> Tensor:
    each = len(values) // samples
    return values.reshape(samples, each, *values.shape[1:])[keep].flatten(0, 1) if len(values) else values


def _sizes(tensor: Tensor) -> str:
    return _tuple(tuple(tensor.shape))


def _tuple(sizes: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def of_changed(call: LossCall, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> OnCall:
    """The same loss function of changed (input, target)."""

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is not call.function:
            return None
        names = names_of(function)
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        values, target = change(*(given[name] for name in names))
        rest = {name: value for name, value in kwargs.items() if name not in given}
        return function, (values, target, *args[2:]), rest

    return instead


def wrong_input(call: LossCall, source: Activation | None) -> Iterator[Change]:
    """Softmax, sigmoid and the like where the loss function expects something else; `source` made what it was given."""
    judge = _JUDGES.get(call.function, _distance if call.function in DISTANCES else None)
    if judge is not None:
        yield from judge(call, source)


def over_the_batch(seen: Evidence) -> Iterator[Change]:
    """Yields a softmax over the classes, for one over the samples."""
    samples = seen.base.first.samples
    for one in seen.base.first.activations:
        is_table = one.given.dim() == 2 and len(one.given) == samples and one.given.shape[1] > 1  # noqa: PLR2004 - samples and classes
        if one.name not in {"softmax", "log_softmax"} or not is_table or one.dim not in {0, -2}:
            continue
        yield Change(
            suspect="wrong_loss_input",
            text=f"{one.name} over dim=-1",
            headline=f"`{one.name}` at {one.location or 'the output'} is over the batch (dim={one.dim}): it must be over the classes",
            fix=f"use `dim=-1` in `{one.name}`",
            location=one.location,
            module=one.module,
            on_call=_over_the_last(one),
        )


def _over_the_last(activation: Activation) -> OnCall:
    is_it = at_line(activation.name, activation.location)

    def instead(function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return (getattr(F, activation.name), args[:1], {"dim": -1}) if args and is_it(function) else None

    return instead


def _change(
    call: LossCall, why: str, fix: str, on_call: OnCall | None, *, cause: Cause = "wrong_loss_input", at: Activation | None = None
) -> Change:
    return Change(
        suspect=cause,
        text=fix.replace("`", ""),
        headline=why,
        fix=fix,
        location=at.location if at is not None and at.location is not None else call.location,
        module=at.module if at is not None else "",
        on_call=on_call,
    )


def _left_out(call: LossCall, source: Activation, expected: str, *, cause: Cause = "wrong_loss_input") -> Change:
    line = f" at {source.location}" if source.location is not None else ""
    why = (
        f"`softmax`{line} is applied twice: `{call.name}` expects logits"
        if cause == "double_softmax"
        else f"`{call.name}` expects {expected}: its input is the result of `{source.name}`{line}"
    )
    return _change(call, why, f"remove the `{source.name}` before `{call.name}`", without(source), cause=cause, at=source)


def _cross_entropy(call: LossCall, source: Activation | None) -> Iterator[Change]:
    if source is not None and source.name == "softmax":
        yield _left_out(call, source, "logits", cause="double_softmax")
    elif source is not None and source.name in {"sigmoid", "tanh", "relu", "relu6"}:
        yield _left_out(call, source, "logits")
    elif (source is None or source.name != "log_softmax") and is_probabilities(call.input):
        why = "`softmax` is applied twice: `cross_entropy` expects logits"
        yield _change(call, why, "remove the `softmax` before `cross_entropy`", of_changed(call, _logarithm), cause="double_softmax")
    elif call.is_classes and call.classes == 1 and call.input.dim() > 1:
        fix = "use `F.binary_cross_entropy_with_logits` for one output"
        yield _change(call, "`cross_entropy` of a single class is always 0", fix, _binary(call))


def _binary(call: LossCall) -> OnCall:
    def instead(function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        if function is not call.function:
            return None
        values, target = args[0].reshape(-1), args[1].reshape(-1)
        return F.binary_cross_entropy_with_logits, (values, target.to(values.dtype)), {}

    return instead


def _nll(call: LossCall, _source: Activation | None) -> Iterator[Change]:
    if call.input.dim() < 2:  # noqa: PLR2004 - no dimension of classes
        return
    if is_probabilities(call.input):
        why = "`nll_loss` expects log-probabilities, not probabilities"
        yield _change(call, why, "use `log_softmax` in place of `softmax` before `nll_loss`", of_changed(call, _logarithm))
    elif bool((call.input.float().logsumexp(1).abs() > _FAR).any()):
        why = "`nll_loss` expects log-probabilities, not logits"
        fix = "use `F.cross_entropy` in place of `nll_loss`, or `log_softmax` before it"
        yield _change(call, why, fix, of_changed(call, lambda one, other: (one.log_softmax(1), other)))


def _targets(call: LossCall) -> Iterator[Change]:
    """Yields scaled targets for labels outside 0 to 1, such as masks of 0 and 255."""
    high = float(call.target.max()) if call.target.numel() else 0.0
    if high > 1 and set(call.target.unique().tolist()) != {1.0, 2.0}:
        why = f"`{call.name}` expects targets between 0 and 1: they go up to {number(high)}"
        yield _change(call, why, f"divide the targets by {high:g}", of_changed(call, lambda one, other: (one, other / high)))


def _with_logits(call: LossCall, source: Activation | None) -> Iterator[Change]:
    yield from _targets(call)
    if source is not None and source.name in {"sigmoid", "softmax", "relu", "tanh"}:
        yield _left_out(call, source, "logits")


def _bce(call: LossCall, source: Activation | None) -> Iterator[Change]:
    yield from _targets(call)
    if source is not None and source.name == "softmax" and call.input.numel() == call.input.shape[0]:
        yield _change(
            call, "`softmax` of a single output is always 1", "use `sigmoid` in place of `softmax`", _sigmoid_for(source), at=source
        )
    elif (source is None or source.name != "sigmoid") and bool(((call.input < 0) | (call.input > 1)).any()):
        why = "`binary_cross_entropy` expects probabilities, not logits"
        yield _change(call, why, "use `F.binary_cross_entropy_with_logits`", of_changed(call, lambda one, other: (one.sigmoid(), other)))


def _kl(call: LossCall, _source: Activation | None) -> Iterator[Change]:
    if not call.input.dim():
        return
    is_share = is_probabilities(call.input, -1)
    if is_share or bool((call.input > _FAR).any()):
        change = _logarithm if is_share else lambda one, other: (one.log_softmax(-1), other)
        yield _change(
            call, "`kl_div` expects log-probabilities as its input", "use `log_softmax` before `kl_div`", of_changed(call, change)
        )


def _distance(call: LossCall, source: Activation | None) -> Iterator[Change]:
    if source is None or source.name not in _LIMITS:
        return
    low, high = _LIMITS[source.name]
    line = f" at {source.location}" if source.location is not None else ""
    if source.name == "softmax" and call.input.numel() == call.input.shape[0]:
        yield _change(
            call, f"`softmax`{line} of a single output is always 1", "use `sigmoid` in place of `softmax`", _sigmoid_for(source), at=source
        )
    elif bool(((call.target < low) | (call.target > high)).any()):
        limits = f"at least {number(low)}" if high == math.inf else f"between {number(low)} and {number(high)}"
        why = f"`{source.name}`{line} keeps the output {limits}: some targets lie outside"
        yield _change(call, why, f"remove the `{source.name}` after the last layer", without(source), at=source)


def _logarithm(values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return values.clamp_min(_TINY).log(), target


def _sigmoid_for(source: Activation) -> OnCall:
    left_out = without(source)

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = left_out(function, args, kwargs)
        return None if found is None else (torch.sigmoid, found[1], {})

    return instead


_JUDGES: dict[Any, Callable[[LossCall, Activation | None], Iterator[Change]]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll,
    F.binary_cross_entropy_with_logits: _with_logits,
    F.binary_cross_entropy: _bce,
    F.kl_div: _kl,
}
