"""The optimizer's side: gradients that changed before an update, and updates that make a parameter non-finite."""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.nanhunt.finding import here, kind_word, marked
from torchdebug_magics.instruments.nanhunt.report import Finding
from torchdebug_magics.instruments.nanhunt.sentinel import survey
from torchdebug_magics.instruments.nanhunt.trace import Op, Trace
from torchdebug_magics.instruments.nanhunt.walk import walk
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.tensors import kind_of
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.evidence import Context

_LARGE = 1e4

__all__ = ["bad_gradient", "bad_parameter", "gradients_of", "is_risky", "parameters_of"]


def gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, gradient) of all that the next update will change."""
    return [(one, one.grad) for group in optimizer.param_groups for one in group["params"] if one.grad is not None]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an update has changed."""
    return [parameter for parameter, _ in gradients_of(optimizer)]


def is_risky(optimizer: torch.optim.Optimizer, peak: float) -> bool:
    """Whether an update may leave the range of its type: large numbers, a large rate, or a division by what may be 0."""
    if not peak < _LARGE or not type(optimizer).__module__.startswith("torch.optim"):
        return True
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        on_device = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"
        if group.get("eps", 1.0) == 0.0 or (not on_device and not abs(float(rate)) < 1.0):
            return True
    return False


def bad_gradient(name: str, gradient: torch.Tensor, context: Context, *, overflowed: bool, computed: bool) -> Finding:
    """A gradient that is about to be applied; how it came about could not be run again."""
    if overflowed:
        explanation = "the gradients overflowed at the GradScaler's scale, and this step applies them without the scaler"
        fix = "step through the scaler: scaler.step(optimizer); scaler.update()"
    elif not computed:
        explanation = f"the gradient of {name} came from no backward() that was seen (torch.func, or code that sets .grad), and is bad"
        fix = (
            "look at the loss and at what computes this gradient, as nanhunt cannot look into it: `torch.isfinite(loss)` tells which is bad"
        )
    else:
        explanation = f"the gradient of {name} was finite after backward() and is not any more: something between the two changed it"
        fix = "look at what scales or clips the gradients before step(): a norm that is infinite or 0, a division by a count of 0"
    place = here()
    finding = Finding(
        kind="inf" if overflowed else kind_word(gradient),
        phase="optimizer",
        op=None,
        module=None,
        call=None,
        location=place,
        excerpt=excerpt(place) if place is not None else (),
        step=context.step,
        backward=context.backward,
        tensor=name,
        diagnosis="clip_inf" if overflowed or computed else None,
        sink=f"gradient of {name}",
        sink_kind=kind_word(gradient),
        weights="weights untouched",
        explanation=explanation,
        fix=fix,
    )
    return marked(finding, gradient)


def bad_parameter(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, context: Context) -> Finding:
    """A parameter that an update has just made non-finite."""
    op = _birth(optimizer, parameter)
    slug, explanation, fix = _cause(optimizer, parameter, name)
    place = here()
    finding = Finding(
        kind=kind_word(parameter),
        phase="optimizer",
        op=None if op is None else op.name,
        module=None,
        call=None,
        location=place,
        excerpt=excerpt(place) if place is not None else (),
        step=context.step,
        backward=context.backward,
        tensor=name,
        diagnosis=slug,
        sink=name,
        sink_kind=kind_word(parameter),
        weights="weights poisoned",
        explanation=explanation,
        fix=fix,
    )
    return marked(finding, parameter)


def first_bad(parameters: list[torch.Tensor]) -> torch.Tensor | None:
    """The first non-finite one; None, with one synchronisation, where all are finite."""
    return None if math.isfinite(survey((), parameters)[1]) else next((one for one in parameters if kind_of(one)), None)


def _birth(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Op | None:
    """The op of the update that is the birth: the update run once more on copies of that parameter alone."""
    group = _group(optimizer, parameter)
    if group is None or parameter.grad is None:
        return None
    twin = torch.nn.Parameter(torch.where(torch.isfinite(parameter), parameter, torch.zeros_like(parameter)).detach().clone())
    twin.grad = parameter.grad.detach().clone()
    double = copy.copy(optimizer)
    double.param_groups = [{**group, "params": [twin], "foreach": False, "fused": False, "capturable": False}]
    double.state = type(optimizer.state)(dict)
    double.state[twin] = {name: _finite(value) for name, value in optimizer.state.get(parameter, {}).items()}
    trace, random = Trace(ModuleCalls(())), RandomState.take()
    try:
        with ExitStack() as stack:
            trace.attach(stack)
            # Past the wrapper that calls the hooks of `step`, ours among them.
            getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)(double)
    finally:
        random.put_back()
    births = walk(trace, [twin.detach()])
    return births[0].op if births else None


def _group(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any] | None:
    return next((group for group in optimizer.param_groups if any(one is parameter for one in group["params"])), None)


def _finite(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.nan_to_num(value.detach().clone(), nan=0.0, posinf=0.0, neginf=0.0)
    return copy.copy(value)


def _cause(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> tuple[str, str, str]:
    """(slug, explanation, fix) read from the optimizer's own settings."""
    group, kind = _group(optimizer, parameter) or {}, type(optimizer).__name__
    if group.get("eps", 1.0) == 0.0:
        return (
            "adam_eps_zero",
            f"{kind} with eps=0 divides 0 by 0 where a gradient of {name} has always been 0",
            "give the optimizer its eps back (1e-8 is the default)",
        )
    return (
        "lr_too_high",
        f"the update of {name} by {kind} with lr={float(group.get('lr', 0.0)):g} leaves the range of its type",
        "lower the learning rate, warm it up, or clip the gradients",
    )
