"""Suspects in the inputs of the loss function and in its reduction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchdebug_magics.format import number
from torchdebug_magics.instruments.overfit.suspects.wrong_inputs import of_changed, over_the_batch, wrong_input
from torchdebug_magics.instruments.overfit.training.change import Change, OnCall
from torchdebug_magics.instruments.overfit.training.function_calls import called_name

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence
    from torchdebug_magics.instruments.overfit.training.loss_calls import LossCall

__all__ = ["suspects"]

_LESS, _MORE = 0.5, 2.0


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
