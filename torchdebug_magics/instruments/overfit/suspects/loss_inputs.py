"""Suspects that concern what the loss function is given, and what is made of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import number
from torchdebug_magics.instruments.overfit.change import Change, OnCall
from torchdebug_magics.instruments.overfit.loss_calls import DISTANCES, LossCall, is_probabilities
from torchdebug_magics.instruments.overfit.observed_step import Activation, called_name
from torchdebug_magics.instruments.overfit.report import Cause
from torchdebug_magics.instruments.overfit.suspects.evidence import Evidence, without

__all__ = ["suspects"]

_LESS, _MORE = 0.5, 2.0
_TINY = 1e-12
_BOUNDED = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, float("inf")), "relu6": (0.0, 6.0)}


def suspects(seen: Evidence) -> Iterator[Change]:
    """Shapes, activations before the loss, labels out of range, the loss's scale."""
    calls = seen.base.first.losses
    for call in calls:
        yield from _shape(call)
        yield from _activation(call, seen.base.first.loss_from)
        yield from _labels(call)
    yield from _broadcast(seen)
    yield from _scale(seen, calls)


def _target_as(call: LossCall, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> OnCall:
    """The same loss function of changed (input, target)."""

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is not call.function:
            return None
        given = dict(zip(("input", "target"), args, strict=False)) | {name: kwargs[name] for name in ("input", "target") if name in kwargs}
        values, target = change(given["input"], given["target"])
        rest = {name: value for name, value in kwargs.items() if name not in given}
        return function, (values, target, *args[2:]), rest

    return instead


def _shape(call: LossCall) -> Iterator[Change]:
    values, target = call.input, call.target
    if call.is_classes or values.shape == target.shape or values.numel() != target.numel():
        return
    sizes = f"{_sizes(values)} against {_sizes(target)}"
    yield Change(
        suspect="target_shape",
        text="target in the shape of the output",
        headline=f"{call.name} compares shapes {sizes}: each output is compared with every target",
        fix="give the loss function a target in the output's shape: `target.view_as(output)`",
        location=call.location,
        on_call=_target_as(call, lambda one, other: (one, other.reshape(one.shape).to(one.dtype))),
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
        headline=f"A difference of shapes {_tuple(one)} and {_tuple(other)} broadcasts: each output meets every target",
        fix="give both the same shape: `output.squeeze(-1) - target`",
        location=place,
        on_call=instead,
    )


def _activation(call: LossCall, source: Activation | None) -> Iterator[Change]:
    wrong = _wrong_input(call, source)
    if wrong is None:
        return
    cause, why, fix, change = wrong
    is_source = source is not None and source.name in {"softmax", "sigmoid", "log_softmax", "relu", "relu6", "tanh"} and change is None
    yield Change(
        suspect=cause,
        text=fix.replace("`", ""),
        headline=why,
        fix=fix,
        location=source.location if source is not None and cause == "double_softmax" else call.location,
        module=source.module if source is not None else "",
        on_call=without(source) if is_source and source is not None else change,
    )


def _wrong_input(call: LossCall, source: Activation | None) -> tuple[Cause, str, str, OnCall | None] | None:
    """(cause, headline, fix, the change where the activation cannot simply be left out)"""
    name, values = call.name, call.input
    made = source.name if source is not None else ""
    line = f" at {source.location}" if source is not None and source.location is not None else ""
    if call.function is F.cross_entropy:
        if made == "softmax" or (made != "log_softmax" and is_probabilities(values)):
            change = None if made == "softmax" else _target_as(call, lambda one, other: (one.clamp_min(_TINY).log(), other))
            return (
                "double_softmax",
                f"softmax{line} is applied twice: cross_entropy expects logits",
                "remove the softmax before `cross_entropy`",
                change,
            )
        if made in {"sigmoid", "tanh", "relu", "relu6"}:
            return (
                "wrong_loss_input",
                f"cross_entropy expects logits, not the result of {made}{line}",
                f"remove the {made} before `cross_entropy`",
                None,
            )
        if call.is_classes and call.classes == 1 and call.input.dim() > 1:
            return (
                "wrong_loss_input",
                "cross_entropy of a single class is always 0",
                "use `F.binary_cross_entropy_with_logits` for one output",
                lambda function, args, kwargs: (
                    (F.binary_cross_entropy_with_logits, (args[0].reshape(-1), args[1].reshape(-1).to(args[0].dtype)), {})
                    if function is call.function
                    else None
                ),
            )
    if call.function is F.nll_loss and values.dim() > 1:
        if is_probabilities(values):
            return (
                "wrong_loss_input",
                "nll_loss expects log-probabilities, not probabilities",
                "use `log_softmax` before `nll_loss`",
                _target_as(call, lambda one, other: (one.clamp_min(_TINY).log(), other)),
            )
        if bool((values.float().logsumexp(1).abs() > 1e-2).any()):  # noqa: PLR2004 - of log-probabilities it is 0
            return (
                "wrong_loss_input",
                "nll_loss expects log-probabilities, not logits",
                "use `F.cross_entropy`, or `log_softmax` before `nll_loss`",
                _target_as(call, lambda one, other: (one.log_softmax(1), other)),
            )
    if name == "binary_cross_entropy_with_logits" and made in {"sigmoid", "softmax", "relu", "tanh"}:
        return (
            "wrong_loss_input",
            f"{made}{line} is applied before binary_cross_entropy_with_logits, which expects logits",
            f"remove the {made} before the loss",
            None,
        )
    if name == "binary_cross_entropy":
        if made == "softmax" and source is not None and values.numel() == values.shape[0]:
            return (
                "wrong_loss_input",
                f"softmax{line} of a single output is always 1",
                "use `sigmoid` in place of `softmax`",
                _sigmoid_for(source),
            )
        if made != "sigmoid" and bool(((values < 0) | (values > 1)).any()):
            return (
                "wrong_loss_input",
                "binary_cross_entropy expects probabilities, not logits",
                "use `F.binary_cross_entropy_with_logits`",
                _target_as(call, lambda one, other: (one.sigmoid(), other)),
            )
    if call.function is F.kl_div and bool((values > 1e-3).any() if values.dim() else False):  # noqa: PLR2004 - no log-probability is positive
        change = (
            (lambda one, other: (one.clamp_min(_TINY).log(), other))
            if is_probabilities(values, -1)
            else (lambda one, other: (one.log_softmax(-1), other))
        )
        return (
            "wrong_loss_input",
            "kl_div expects log-probabilities as its input",
            "use `log_softmax` before `kl_div`",
            _target_as(call, change),
        )
    if call.function is F.kl_div and is_probabilities(values, -1):
        return (
            "wrong_loss_input",
            "kl_div expects log-probabilities as its input",
            "use `log_softmax` before `kl_div`",
            _target_as(call, lambda one, other: (one.clamp_min(_TINY).log(), other)),
        )
    if call.function in DISTANCES and source is not None and made in _BOUNDED:
        low, high = _BOUNDED[made]
        if bool(((call.target < low) | (call.target > high)).any()):
            return (
                "wrong_loss_input",
                f"{made}{line} limits the output to {number(low)}..{number(high)}, and targets lie outside",
                f"remove the {made} from the last layer",
                None,
            )
    return None


def _sigmoid_for(source: Activation) -> OnCall:
    left_out = without(source)

    def instead(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = left_out(function, args, kwargs)
        return None if found is None else (torch.sigmoid, found[1], {})

    return instead


def _labels(call: LossCall) -> Iterator[Change]:
    if call.is_classes and len(call.labels):
        low, high = int(call.labels.min()), int(call.labels.max())
        if low < 1 or high != call.classes:
            return
        limits = f"Labels go from {low} to {high}, and the {call.classes} classes from 0 to {call.classes - 1}"
    elif call.name.startswith("binary_cross_entropy") and call.target.numel() and float(call.target.max()) > 1:
        if set(call.target.unique().tolist()) != {1.0, 2.0}:
            return
        limits = "Labels are 1 and 2, and the loss expects 0 and 1"
    else:
        return
    ignored = call.options.get("ignore_index", -100)
    yield Change(
        suspect="off_by_one_labels",
        text="labels - 1",
        headline=f"{limits}: off by one",
        fix="subtract one from the labels: `labels - 1`",
        location=call.location,
        on_call=_target_as(call, lambda one, other: (one, torch.where(other == ignored, other, other - 1))),
    )


def _scale(seen: Evidence, calls: list[LossCall]) -> Iterator[Change]:
    if len(calls) != 1:
        return
    call, scale = calls[0], abs(seen.base.loss_scale)
    if any(abs(scale - one) < 1e-3 * one for one in seen.scales):
        scale = 1.0
    factor = scale * call.size
    if not factor or _LESS <= factor <= _MORE:
        return
    is_sum = call.size > 1 and _LESS <= scale <= _MORE
    what = f"summed over {number(call.size)} terms" if is_sum else f"{factor:.3g} times the mean"
    yield Change(
        suspect="reduction",
        text="the mean loss is differentiated",
        headline=f"The loss is {what}: with the mean, the model learns {seen.subject}",
        fix='use `reduction="mean"`'
        if is_sum
        else f"differentiate the mean loss: multiply the loss by {1 / factor:.4g} or leave its factor out",
        factor=factor,
        location=call.location,
        backward_scale=1 / factor,
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
