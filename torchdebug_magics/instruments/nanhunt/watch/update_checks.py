"""The optimizer's side: gradients that changed before an update, updates that make a parameter non-finite, and those that are skipped.

An overflow that a GradScaler skips by design is told from one that would happen at scale 1 too.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.nanhunt.causes.evidence import Context
from torchdebug_magics.instruments.nanhunt.causes.op_table import Diagnosis
from torchdebug_magics.instruments.nanhunt.finding import here, kind_word, marked, surfaced
from torchdebug_magics.instruments.nanhunt.replay.conclusion import Outcome
from torchdebug_magics.instruments.nanhunt.report import NanFinding, Sink
from torchdebug_magics.instruments.nanhunt.rerun.written_places import Held
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.source.user_code import frames_above
from torchdebug_magics.probing.state.contents import Kept, version_of
from torchdebug_magics.probing.tensors import NAN, kind_of, largest

_LARGE, _HUGE = 1e4, 1e15
"""Of an update, and of a gradient whose square some optimizers keep."""
_SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
"""What is no larger is 0 in that type."""
_MOST_BYTES = 1 << 28
"""Of one copy: what holds more than that is not worth the danger of running out of memory."""


def gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, gradient) of all that the next update will change."""
    return [(one, gradient) for group in optimizer.param_groups for one in group["params"] if (gradient := one.grad) is not None]


def is_risky(optimizer: torch.optim.Optimizer, peak: float) -> bool:
    """Whether an update may leave the range of its type: large numbers, a large rate, or a division by what may be 0."""
    if not peak < _HUGE or not _is_torchs(optimizer):
        return True
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        on_device = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"
        size = 1.0 if on_device else abs(float(rate))
        # A centred second moment is a difference, which rounding may leave below 0. Scaled gradients are large, their updates are not.
        if not size < 1.0 or not size * peak < _LARGE or group.get("centered") or _has_no_eps(group):
            return True
    return False


def calls_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it may call a closure after it has changed the parameters; torch's own, but for one, call it first of all."""
    return isinstance(optimizer, torch.optim.LBFGS) or not _is_torchs(optimizer)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _has_no_eps(group: dict[str, Any]) -> bool:
    """Whether its eps is 0, or is in the type of its parameters, as 1e-8 in float16."""
    eps, parameters = group.get("eps"), group["params"]
    if not isinstance(eps, (int, float)) or not parameters:
        return False
    return abs(eps) <= _SMALLEST.get(parameters[0].dtype, 0.0)


_GRADIENTS = {
    "hook": (
        None,
        "the gradient of {name} is non-finite as backward() has computed it; the hook that applies it runs inside backward()",
        "run the cell without the hook and call `step()` after backward(): then the op that makes the gradient non-finite is named",
    ),
    "scaled": (
        "clip_inf",
        "the gradients were non-finite after backward(), and this step applies them: no GradScaler skips it",
        "if the loss is scaled, step through the scaler: `scaler.step(optimizer); scaler.update()`",
    ),
    "elsewhere": (
        None,
        "the gradient of {name} is non-finite, and no observed backward() computed it (`torch.func`, or code that sets `.grad`)",
        "check the loss and the code that computes this gradient: `torch.isfinite(loss)` shows which of the two is non-finite",
    ),
    "changed": (
        "clip_inf",
        "the gradient of {name} was finite after backward(), and was changed before the update",
        "check the code that scales or clips gradients before step(): an infinite or zero norm, a division by a count of 0",
    ),
}
"""How a gradient that cannot be made again came about."""


def bad_gradient(name: str, gradient: torch.Tensor, context: Context, made: str) -> NanFinding:
    """A gradient that is about to be applied; `made`: how it came about, which could not be run again."""
    slug, explanation, fix = _GRADIENTS[made]
    kind = "inf" if made == "scaled" else kind_word(gradient)
    cause = Diagnosis(slug, explanation.format(name=name), fix)
    return marked(surfaced(gradient, "optimizer", Sink("gradient", name), here(), context, cause, tensor=name, kind=kind), gradient)


def bad_parameter(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, context: Context) -> NanFinding:
    """A parameter that an update has just made non-finite; why is read from the optimizer's own settings."""
    kind = type(optimizer).__name__
    group = next((group for group in optimizer.param_groups if any(one is parameter for one in group["params"])), {})
    if _has_no_eps({**group, "params": [parameter]}):
        eps = "eps=0" if group["eps"] == 0.0 else f"eps={group['eps']:g}, which is 0 in {str(parameter.dtype).removeprefix('torch.')},"
        cause = Diagnosis(
            "adam_eps_zero",
            f"{kind} with {eps} divides 0 by 0 where a gradient of {name} has always been 0",
            "restore the eps of the optimizer (1e-8 is the default)"
            if group["eps"] == 0.0
            else "keep the parameters in float32 and use autocast, or use an eps that this dtype can represent, such as `eps=1e-4`",
        )
    elif _is_torchs(optimizer):
        cause = Diagnosis(
            "lr_too_high",
            f"the update of {name} by {kind} with lr={float(group.get('lr', 0.0)):g} overflows the range of its dtype",
            "lower the learning rate, warm it up, or clip the gradients",
        )
    else:
        cause = Diagnosis(
            None,
            f"`step()` of {kind} makes {name} non-finite; its gradient was finite",
            f"check the arithmetic of `{kind}.step()`: a division by 0, a learning rate that is too high",
        )
    finding = surfaced(parameter, "optimizer", Sink("tensor", name), here(), context, cause, tensor=name, weights="weights poisoned")
    return marked(finding, parameter)


class Undo:
    """One update that is about to begin, and how everything was before the step; another one may begin inside it, as part of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, buffers: Sequence[Held], *, copies: bool) -> None:
        self.optimizer = optimizer
        self._containers: list[tuple[Any, Any]] = []
        tensors: dict[int, torch.Tensor] = {}
        for root in (optimizer.state, *optimizer.param_groups):
            self._collect(root, tensors)
        self.has_copies = copies and sum(tensor.nbytes for tensor in tensors.values()) <= _MOST_BYTES
        self._kept = [Kept.of(tensor, copied=self.has_copies) for tensor in tensors.values()]
        self.buffers = tuple(buffers)
        """Of the models, as they were before the step; where closures make the gradients, before the first of them."""

    def _collect(self, value: Any, tensors: dict[int, torch.Tensor]) -> None:
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif isinstance(value, (MutableMapping, MutableSequence)):
            self._containers.append((value, copy.copy(value)))
            for one in value.values() if isinstance(value, MutableMapping) else value:
                self._collect(one, tensors)

    def is_running(self) -> bool:
        """Whether the call of `step` is not over: one that raised, or was interrupted, has no end that we hear of."""
        return any(
            frame.f_globals.get("__name__") == "torch.optim.optimizer" and frame.f_locals.get("self") is self.optimizer
            for frame in frames_above(sys._getframe(1))
        )

    def is_written(self) -> bool:
        """Whether anything was changed by now, such as by an update between two calls of a closure."""
        return any(version_of(one.tensor) != one.version for one in self._kept)

    def told(self, outcome: Outcome) -> Outcome:
        """What was found in a closure that this update calls: with what is true of the weights."""
        return self.weighed(outcome, "weights changed since the step began") if self.is_written() else outcome

    def weighed(self, outcome: Outcome, otherwise: str) -> Outcome:
        """The outcome with what becomes of the weights: they are put back where there is a copy."""
        finding = outcome.finding
        if finding is None or finding.phase == "parameter":
            return outcome
        return replace(outcome, finding=replace(finding, weights="weights put back" if self.has_copies else otherwise))

    def put_back(self) -> None:
        """Everything as it was, in the tensors and containers that held it."""
        if not self.has_copies:
            return
        for buffer in self.buffers:
            buffer.put_back()
        for kept in self._kept:
            kept.put_back()
        for container, before in self._containers:
            container.clear()
            container.update(before) if isinstance(container, MutableMapping) else container.extend(before)


_HEADROOM = 1e4
_COLLAPSED_RUN = 20
"""Overflow steps in a row after which a scaler is not searching any more."""


class Overflows:
    """Counts the steps that a scaler skips; too many of them are a finding of their own."""

    def __init__(self) -> None:
        self.total = 0
        self.run = 0
        """In a row, up to now."""
        self._counted: set[int] = set()
        """Ids of the parameters of models with bad gradients from before this backward(), as in accumulation: the same skip."""

    def look_before(self, models: Iterable[torch.nn.Module]) -> None:
        """Right before a backward()."""
        self._counted.clear()
        for model in models if self.run else ():
            parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
            if not math.isfinite(largest(parameter.grad for parameter in parameters if parameter.grad is not None)):
                self._counted.update(map(id, parameters))

    def applied(self) -> None:
        """The last one was no skip: an update without a scaler was about to apply it."""
        self.total -= 1
        self.run = 0

    def count(self, leaves: dict[int, torch.Tensor], scalers: Sequence[Any], context: Context) -> NanFinding | None:
        """One more overflow, at the scale of these; a finding when it has collapsed. A scaled loss out of range alone skips nothing."""
        if not any(leaf.grad is not None and kind_of(leaf.grad) for key, leaf in leaves.items() if key not in self._counted):
            return None
        self.total += 1
        self.run += 1
        scale = min((scaler.get_scale() for scaler in scalers), default=math.inf)
        if scale >= 1.0 and self.run < _COLLAPSED_RUN:
            return None
        return NanFinding(
            kind="inf",
            phase="backward",
            location=here(),
            step=context.step,
            backward=context.backward,
            diagnosis="scale_collapse",
            sink=Sink("gradient"),
            sink_kind="inf",
            weights="weights untouched",
            explanation=f"the GradScaler skipped {plural(self.run, 'step')} in a row, and its scale fell to {scale:g}: nothing is trained",
            fix="rerun the cell without the scaler and autocast to find the op, or use bfloat16, which needs no scaler",
        )


def live_scalers() -> list[Any]:
    """Every enabled scaler that has scaled something."""
    return [one for one in live(GradScaler) if getattr(one, "_enabled", False) and isinstance(one._scale, torch.Tensor)]


@contextlib.contextmanager
def at_scale_one(scalers: Iterable[Any]) -> Iterator[list[Any]]:
    """The scalers multiply by 1 inside, by what they did outside. Yields those that were used inside: others may only be lying about."""
    used: list[Any] = []
    with ExitStack() as stack:
        for scaler in scalers:
            stack.callback(vars(scaler).update, dict(vars(scaler)))
            stack.callback(vars(scaler).clear)
            scaler.scale = _Noted(scaler, used)
            scaler._scale = torch.ones_like(scaler._scale)
        yield used


class _Noted:
    """In place of a scaler's `scale`. An object of ours, as a replay puts back what can be reached through any other."""

    def __init__(self, scaler: Any, used: list[Any]) -> None:
        self._scaler = scaler
        self._scale = scaler.scale
        self._used = used

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._used.append(self._scaler)
        return self._scale(*args, **kwargs)


def may_be_scaling(loss: Iterable[torch.Tensor], scalers: Iterable[Any], losses: Sequence[float]) -> bool:
    """Whether a scaler can be what made a step bad that cannot be run again, at scale 1, to see.

    No scaler makes NaN of a finite loss. Infinity it does, if the losses before, or one of ordinary size, come close to it by its scale.
    """
    kinds = [kind_of(one) for one in loss]
    if any(kind & NAN for kind in kinds):
        return False
    if not any(kinds):
        return True
    usual = max((abs(loss) for loss in losses if math.isfinite(loss)), default=max((scaler.get_scale() for scaler in scalers), default=0.0))
    largest = min((torch.finfo(one.dtype).max for one in loss if one.is_floating_point()), default=math.inf)
    return usual > largest / _HEADROOM


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler told this (fused) optimizer to skip its step."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())
