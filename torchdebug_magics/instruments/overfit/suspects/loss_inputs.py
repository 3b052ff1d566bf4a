"""Suspects in the inputs of the loss function and in its reduction: what the function expects, and what the first step gave it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import number
from torchdebug_magics.instruments.overfit.report import Cause
from torchdebug_magics.instruments.overfit.training.observed_step import (
    BINARY,
    DISTANCES,
    SUBTRACTIONS,
    Activation,
    LossCall,
    OnCall,
    TrainingChange,
    called_name,
    line_of_step,
    names_of,
)
from torchdebug_magics.instruments.overfit.training.training import TrainingEvidence
from torchdebug_magics.probing.tensors import RANGES, TAKES, sums_to_one
from torchdebug_magics.report import Location

_LESS, _MORE = 0.5, 2.0
_TINY, _NEAR = 1e-12, 1e-3
_FAR = 1e-2
"""How far the logarithm of a sum of probabilities is from 0 only where they are none."""
_TWICE = "`softmax` is applied twice: `cross_entropy` expects logits"


def suspects(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields changes of targets, of activations before the loss, and of the scale of the loss."""
    yield from _over_the_batch(seen)
    for call in seen.base.first.losses:
        yield from _target(call)
        yield from _input(call, seen.base.first.loss_from)
        yield from _shifted(seen, call)
    yield from _broadcast(seen)
    yield from _scale(seen)


def _given(
    call: LossCall, headline: str, fix: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], instead: Any = None, **fields: Any
) -> TrainingChange:
    """The loss function, or `instead` of it another one, on changed (input, target)."""
    of_call = {"suspect": "wrong_loss_input", "location": call.location, "on_call": of_changed((call.function,), change, instead)}
    return TrainingChange(headline=headline, fix=fix, **{**of_call, **fields})


def _target(call: LossCall) -> Iterator[TrainingChange]:
    """Yields a target in the output's shape, one between 0 and 1, and labels that begin at the right number."""
    values, target, loss, labels = call.input, call.target, call.name, call.labels
    if not call.is_classes and values.shape != target.shape and values.numel() == target.numel():
        shapes = f"{tuple(values.shape)} against {tuple(target.shape)}"
        headline = f"`{loss}` compares shapes {shapes}: each output is compared with every target"
        fix = "give the loss function a target in the output's shape: `target.view_as(output)`"
        yield _given(
            call, headline, fix, lambda values, target: (values, target.reshape(values.shape).to(values.dtype)), suspect="target_shape"
        )
    if not labels.numel():
        return
    low, high, step = float(labels.min()), float(labels.max()), -1
    is_moved, allowed = call.function in BINARY and set(target.unique().tolist()) == {1.0, 2.0}, f"`{loss}` expects 0 and 1"
    if call.is_classes:
        is_moved, allowed = low > 0 and high == call.classes, f"the {call.classes} classes from 0 to {call.classes - 1}"
    elif call.function is F.ctc_loss:
        is_moved, allowed, step = low == call.options.get("blank", 0) == 0, "0 is the blank", 1

    def moved(values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        other = (target + 1).clamp_max(values.shape[-1] - 1) if step > 0 else target - 1
        return values, torch.where(target == call.ignored, target, other)

    if is_moved:
        headline = f"Labels range from {low:g} to {high:g}, {allowed}: they are off by one"
        fix = "keep 0 for the blank: `labels + 1`" if step > 0 else "subtract one from the labels: `labels - 1`"
        yield _given(call, headline, fix, moved, suspect="off_by_one_labels")
    elif call.function in BINARY and high > 1:
        headline = f"`{loss}` expects targets between 0 and 1: they go up to {number(high)}"
        yield _given(call, headline, f"divide the targets by {high:g}", lambda values, target: (values, target / high))


def _input(call: LossCall, source: Activation | None) -> Iterator[TrainingChange]:
    """Yields logits, probabilities or their logarithms, where the loss function expects these and is given others."""
    values, loss, expected = call.input, call.name, TAKES.get(call.name)
    dim = -1 if call.function is F.kl_div else 1
    has_dim = values.dim() > max(dim, 0)
    are_shares = has_dim and sums_to_one(values.float(), dim, _NEAR)
    if source is not None and (misplaced := _misplaced(call, source)):
        headline, cause, instead = misplaced
        fix = f"remove the `{source.name}` before `{loss}`" if instead is itself else "use `sigmoid` in place of `softmax`"
        where, call_instead = source.location or call.location, replaced(source.name, source.location, instead)
        yield TrainingChange(cause, headline, fix, location=where, module=source.module, on_call=call_instead)
    elif call.function is F.cross_entropy and call.is_classes and call.classes == 1 and values.dim() > 1:
        headline, fix = "`cross_entropy` of a single class is always 0", "use `F.binary_cross_entropy_with_logits` for one output"
        of_one = F.binary_cross_entropy_with_logits
        yield _given(call, headline, fix, lambda values, target: (values.reshape(-1), target.reshape(-1).to(values.dtype)), of_one)
    elif are_shares and (call.function is F.cross_entropy or expected == "log-probabilities"):
        headline, fix = f"`{loss}` expects log-probabilities, not probabilities", f"use `log_softmax` in place of `softmax` before `{loss}`"
        kind: Cause = "wrong_loss_input"
        if call.function is F.cross_entropy:
            headline, fix, kind = _TWICE, "remove the `softmax` before `cross_entropy`", "double_softmax"
        yield _given(call, headline, fix, lambda values, target: (values.clamp_min(_TINY).log(), target), suspect=kind)
    elif expected == "log-probabilities" and has_dim and bool((values.float().logsumexp(dim).abs() > _FAR).any()):
        headline, fix = f"`{loss}` expects log-probabilities, not logits", f"use `log_softmax` before `{loss}`"
        yield _given(call, headline, fix, lambda values, target: (values.log_softmax(dim), target))
    elif expected == "probabilities" and bool(((values < 0) | (values > 1)).any()):
        headline, fix = f"`{loss}` expects probabilities, not logits", "use `F.binary_cross_entropy_with_logits`"
        yield _given(call, headline, fix, lambda values, target: (values.sigmoid(), target))


def _misplaced(call: LossCall, source: Activation) -> tuple[str, Cause, Callable[[Any], Any]] | None:
    """(why the nonlinearity that made the input of the loss function does not belong there, the cause, what is called instead)."""
    made, expected = source.name, TAKES.get(call.name)
    line = f" at {source.location}" if source.location is not None else ""
    low, high = RANGES.get(made, (-math.inf, math.inf))
    if made == "softmax" and expected in {None, "probabilities"} and call.input.numel() == call.input.shape[:1].numel():
        return f"`softmax`{line} of a single output is always 1", "wrong_loss_input", torch.sigmoid
    if made == "softmax" and call.function is F.cross_entropy:
        return _TWICE.replace("`softmax`", f"`softmax`{line}"), "double_softmax", itself
    if made in RANGES and expected == "logits":
        return f"`{call.name}` expects logits: its input is the result of `{made}`{line}", "wrong_loss_input", itself
    if call.function in DISTANCES and bool(((call.target < low) | (call.target > high)).any()):
        limits = f"at least {number(low)}" if high == math.inf else f"between {number(low)} and {number(high)}"
        return f"`{made}`{line} keeps the output {limits}: some targets lie outside", "wrong_loss_input", itself
    return None


def _over_the_batch(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields a softmax over the classes, for one over the samples."""
    for activation in seen.base.first.activations:
        name, place, given = activation.name, activation.location, activation.given
        is_table = given.dim() == 2 and len(given) == seen.base.first.samples and given.shape[1] > 1  # noqa: PLR2004
        if name in {"softmax", "log_softmax"} and is_table and activation.dim in {0, -2}:
            headline = f"`{name}` at {place or 'the output'} is over the batch (dim={activation.dim}): it must be over the classes"
            over_classes = replaced(name, place, partial(getattr(torch, name), dim=-1))
            fix = f"use `dim=-1` in `{name}`"
            yield TrainingChange("wrong_loss_input", headline, fix, location=place, module=activation.module, on_call=over_classes)


def _broadcast(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields a difference of one shape, for one that is written with operators."""
    if seen.base.first.broadcast is None:
        return
    place, *shapes = seen.base.first.broadcast

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pair = called_name(function) in SUBTRACTIONS and all(isinstance(argument, Tensor) for argument in args)
        if not is_pair or [tuple(argument.shape) for argument in args] != shapes:
            return None
        wide = max(args, key=lambda argument: argument.dim()).shape
        return function, tuple(argument.reshape(wide) for argument in args), kwargs

    headline = f"A difference of shapes {shapes[0]} and {shapes[1]} broadcasts: each output is compared with every target"
    fix = "give both the same shape: `output.squeeze(-1) - target`"
    yield TrainingChange("target_shape", headline, fix, location=place, on_call=instead)


def _shifted(seen: TrainingEvidence, call: LossCall) -> Iterator[TrainingChange]:
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

    headline = f"The labels are {lag} tokens ahead of the input, not 1: they are shifted twice"
    fix = "shift the labels once: pass `labels=input_ids` to a model that shifts them itself"
    yield _given(call, headline, fix, next_words, suspect="off_by_one_labels")


def _scale(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields the mean, for a loss that is summed or multiplied, by the loss function or by the user's own code."""
    calls, summed, call = seen.base.first.losses, seen.base.first.summed, next(iter(seen.base.first.losses), None)
    if len(calls) > 1:
        return
    factor, place, what = float(summed), None if call is None else call.location, f"summed over {summed:,} terms"
    is_usual, fix = factor <= 1, "use `.mean()` in place of `.sum()` for the loss"
    if call is not None:
        scale = abs(seen.base.first.scale)
        scale = 1.0 if any(abs(scale - known) < 1e-3 * known for known in seen.scales) else scale
        factor = float(f"{scale * call.size:.6g}")
        is_usual, is_sum = not factor or _LESS <= factor <= _MORE, call.size > 1 and _LESS <= scale <= _MORE
        what = f"summed over {number(call.size)} terms" if is_sum else f"{factor:.3g} times the mean"
        fix = (
            'use `reduction="mean"`'
            if is_sum or is_usual
            else f"use the mean loss: multiply the loss by {1 / factor:.4g}, or remove its factor"
        )
    if not is_usual:
        headline, of_mean = f"The loss is {what}: with the mean, the model learns {seen.subject}", 1 / factor
        yield TrainingChange("reduction", headline, fix, text="mean loss", factor=factor, location=place, backward_scale=of_mean)


def rows_of(seen: TrainingEvidence, keep: Tensor) -> OnCall | None:
    """The loss functions of some samples only; None where rows of the loss's input are not those of the batch."""
    samples, calls = seen.base.first.samples, seen.base.first.losses
    if not calls or not samples or any(len(call.input) % samples for call in calls if call.input.dim()):
        return None

    def chosen(values: Tensor) -> Tensor:
        return values.reshape(samples, len(values) // samples, *values.shape[1:])[keep].flatten(0, 1) if len(values) else values

    return of_changed({call.function for call in calls}, lambda values, target: (chosen(values), chosen(target)))


def each(names: Iterable[str], act: Callable[[Any], object]) -> Callable[[Mapping[str, Any]], None]:
    """`act` on each module or parameter of these names."""
    wanted = tuple(names)

    def change(parts: Mapping[str, Any]) -> None:
        for name in wanted:
            if name in parts:
                act(parts[name])

    return change


def replaced(name: str, place: Location | None, function: Callable[..., Any]) -> OnCall:
    """``function(input)`` in place of the call of that name at that line."""

    def call(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if called_name(called) != name or line_of_step() != place or not (args or "input" in kwargs):
            return None
        return function, (args[0] if args else kwargs["input"],), {}

    return call


def itself(value: Any) -> Any:
    """What a call that is left out gives: its input."""
    return value


def of_changed(functions: Any, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], instead: Any = None) -> OnCall:
    """The same loss functions of changed (input, target), or `instead` of them without their options."""

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function not in functions:
            return None
        names = names_of(function)
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        values, target = change(*(given[name] for name in names))
        if instead is not None:
            return instead, (values, target), {}
        return function, (values, target, *args[2:]), {name: value for name, value in kwargs.items() if name not in given}

    return call
