"""The optimizer's side: gradients that changed before an update, and updates that make a parameter non-finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchdebug_magics.instruments.nanhunt.causes.diagnose import Diagnosis, diagnose
from torchdebug_magics.instruments.nanhunt.finding import here, kind_word, marked
from torchdebug_magics.instruments.nanhunt.replay.retaken_update import retaken
from torchdebug_magics.instruments.nanhunt.report import Finding
from torchdebug_magics.instruments.nanhunt.watch.sentinel import survey
from torchdebug_magics.probing.tensors import NAN, kind_of, largest
from torchdebug_magics.probing.this_rank import world_size
from torchdebug_magics.probing.where import excerpt, location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence
    from torchdebug_magics.instruments.nanhunt.replay.retaken_update import Before
    from torchdebug_magics.report import Location

_LARGE, _HUGE = 1e4, 1e15
"""Of an update, and of a gradient whose square some optimizers keep."""
_SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
"""What is no larger is 0 in that type."""

__all__ = [
    "averages_by_hand", "bad_gradient", "bad_parameter", "calls_again", "gradients_of", "hold_bad_gradients", "is_risky", "nothing_known",
    "parameters_of",
]  # fmt: skip


def gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, gradient) of all that the next update will change."""
    return [(one, gradient) for group in optimizer.param_groups for one in group["params"] if (gradient := one.grad) is not None]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an update has changed."""
    return [parameter for parameter, _ in gradients_of(optimizer)]


def averages_by_hand(models: Iterable[torch.nn.Module]) -> bool:
    """Whether collectives of the user's may have written the gradients: a tensor's version tells nothing of them."""
    return world_size() > 1 and not any(isinstance(model, DistributedDataParallel) for model in models)


def hold_bad_gradients(models: Iterable[torch.nn.Module]) -> bool:
    """Whether a parameter of these has one now."""
    return not math.isfinite(largest(one.grad for model in models for one in model.parameters() if one.grad is not None))


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


def bad_gradient(name: str, gradient: torch.Tensor, context: Context, *, overflowed: bool, computed: bool) -> Finding:
    """A gradient that is about to be applied; how it came about could not be run again."""
    if overflowed:
        explanation = "the gradients were non-finite after backward(), and this step applies them: no GradScaler skips it"
        fix = "if the loss is scaled, step through the scaler: `scaler.step(optimizer); scaler.update()`"
    elif not computed:
        explanation = (
            f"the gradient of {name} is non-finite, and no observed backward() computed it (`torch.func`, or code that sets `.grad`)"
        )
        fix = "check the loss and the code that computes this gradient: `torch.isfinite(loss)` shows which of the two is non-finite"
    else:
        explanation = f"the gradient of {name} was finite after backward(), and was changed before the update"
        fix = "check the code that scales or clips gradients before step(): an infinite or zero norm, a division by a count of 0"
    found = _at_update(gradient, name, here(), context)
    finding = replace(
        found,
        kind="inf" if overflowed else found.kind,
        diagnosis="clip_inf" if overflowed or computed else None,
        sink=f"gradient of {name}",
        weights="weights untouched",
        explanation=explanation,
        fix=fix,
    )
    return marked(finding, gradient)


def bad_parameter(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, context: Context, before: Before) -> Finding:
    """A parameter that an update has just made non-finite. `before`: what is known of it, and of the optimizer, before that."""
    evidence = retaken(optimizer, group_of(optimizer, parameter), parameter, context, before)
    op = None if evidence is None else evidence.op
    cause = _cause(optimizer, parameter, name, evidence)
    place = here() if op is None or op.line is None else location(*op.line)
    finding = replace(
        _at_update(parameter, name, place, context),
        op=None if op is None else op.name,
        operands=() if evidence is None else tuple(evidence.operands()),
        diagnosis=cause.slug,
        sink=name,
        weights="weights poisoned",
        explanation=cause.explanation,
        fix=cause.fix,
    )
    return marked(finding, parameter)


def _at_update(value: torch.Tensor, name: str, place: Location | None, context: Context) -> Finding:
    """A bad parameter or gradient, met when an optimizer's step runs."""
    kind = kind_word(value)
    return Finding(
        kind=kind,
        phase="optimizer",
        op=None,
        module=None,
        call=None,
        location=place,
        excerpt=excerpt(place) if place is not None else (),
        step=context.step,
        backward=context.backward,
        tensor=name,
        sink_kind=kind,
    )


def nothing_known(_value: object) -> None:
    """Of an update that was not copied before it began."""


def first_bad(parameters: list[torch.Tensor]) -> torch.Tensor | None:
    """The first non-finite one; None, with one synchronisation, where all are finite."""
    return None if math.isfinite(survey((), parameters)[1]) else next((one for one in parameters if kind_of(one)), None)


def group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any] | None:
    """The settings that a parameter has."""
    return next((group for group in optimizer.param_groups if any(one is parameter for one in group["params"])), None)


def _cause(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, evidence: Evidence | None) -> Diagnosis:
    """Read from the optimizer's own settings; of one that torch did not write, from the op that made the value."""
    group, kind = group_of(optimizer, parameter) or {}, type(optimizer).__name__
    if _has_no_eps({**group, "params": [parameter]}):
        eps = "eps=0" if group["eps"] == 0.0 else f"eps={group['eps']:g}, which is 0 in {str(parameter.dtype).removeprefix('torch.')},"
        return Diagnosis(
            "adam_eps_zero",
            f"{kind} with {eps} divides 0 by 0 where a gradient of {name} has always been 0",
            "restore the eps of the optimizer (1e-8 is the default)"
            if group["eps"] == 0.0
            else "keep the parameters in float32 and use autocast, or use an eps that this dtype can represent, such as `eps=1e-4`",
        )
    if evidence is not None and not _is_torchs(optimizer):
        cause = diagnose(evidence)
        if cause.slug is not None or evidence.kind & NAN:
            return replace(cause, explanation=f"in the update of {name} by {kind}: {cause.explanation}")
    return Diagnosis(
        "lr_too_high",
        f"the update of {name} by {kind} with lr={float(group.get('lr', 0.0)):g} overflows the range of its dtype",
        "lower the learning rate, warm it up, or clip the gradients",
    )
