"""Suspects in the kind of loss input: logits, log-probabilities or probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import number
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import at_line, without
from torchdebug_magics.instruments.overfit.training.change import Change, OnCall
from torchdebug_magics.instruments.overfit.training.loss_calls import DISTANCES, LossCall, is_probabilities, names_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.report import Cause
    from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence
    from torchdebug_magics.instruments.overfit.training.observed_step import Activation

__all__ = ["of_changed", "over_the_batch", "wrong_input"]

_TINY = 1e-12
_FAR = 1e-2
"""How far the logarithm of a sum of probabilities is from 0 only where they are none."""
_LIMITS = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}


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
