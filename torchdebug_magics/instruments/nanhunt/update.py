"""Which op of an optimizer makes a parameter non-finite: its update, run once more on copies of that parameter alone."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.trace import Op, Trace
from torchdebug_magics.instruments.nanhunt.walk import walk
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.rng import RandomState

__all__ = ["birth_op", "cause"]


def birth_op(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Op | None:
    """The op that is the birth, or None where the copy's update stays finite."""
    group = next((group for group in optimizer.param_groups if any(one is parameter for one in group["params"])), None)
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


def _finite(value: Any) -> Any:
    return (
        torch.nan_to_num(value.detach().clone(), nan=0.0, posinf=0.0, neginf=0.0) if isinstance(value, torch.Tensor) else copy.copy(value)
    )


def cause(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> tuple[str, str, str]:
    """(slug, explanation, fix) read from the optimizer's own settings."""
    group = next((group for group in optimizer.param_groups if any(one is parameter for one in group["params"])), {})
    kind, rate = type(optimizer).__name__, group.get("lr", 0.0)
    if group.get("eps", 1.0) == 0.0:
        return (
            "adam_eps_zero",
            f"{kind} with eps=0 divides 0 by 0 where a gradient of {name} has always been 0",
            "give the optimizer its eps back (1e-8 is the default)",
        )
    return (
        "lr_too_high",
        f"the update of {name} by {kind} with lr={float(rate):g} leaves the range of its type",
        "lower the learning rate, warm it up, or clip the gradients",
    )
