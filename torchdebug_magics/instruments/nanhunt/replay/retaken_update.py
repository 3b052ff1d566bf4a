"""The update that has spoilt a parameter, taken once more op by op, on copies of that parameter alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import walk
from torchdebug_magics.probing.alone.unsent_collectives import UnsentCollectives
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.quiet import quiet
from torchdebug_magics.probing.rerun.undone_writes import Writes
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.snapshot import Snapshot
from torchdebug_magics.probing.this_rank import rank

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth

__all__ = ["Before", "retaken"]

Before: TypeAlias = "Callable[[Any], Any]"
"""What a tensor, or a container of the optimizer's state, held before the update; None where no copy was made."""


def retaken(
    optimizer: torch.optim.Optimizer, group: dict[str, Any] | None, parameter: torch.Tensor, context: Context, before: Before
) -> Evidence | None:
    """The birth of the bad value in the update; None where the update cannot be run so."""
    if group is None or parameter.grad is None:
        return None
    held = before(parameter)
    twin = torch.nn.Parameter(_finite(parameter) if held is None else held.clone())
    twin.grad = parameter.grad.detach().clone()
    double = _twin_of(optimizer, {**group, "params": [twin], "foreach": False, "fused": False, "capturable": False})
    state = optimizer.state.get(parameter, {})
    known = before(state)
    double.state[twin] = {name: _value(value, before) for name, value in (state if known is None else known).items()}
    trace, writes, random, objects = Trace(ModuleCalls(())), Writes(), RandomState.take(), Snapshot([vars(optimizer)])
    try:
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(writes.listener())
            trace.attach(stack)
            if rank() is not None:
                stack.enter_context(UnsentCollectives().listener())
            _without_hooks(type(optimizer).step)(double)
        births: list[Birth] = [birth for birth in walk(trace, [twin.detach()]) if birth.op is not None]
    except Exception:  # noqa: BLE001 - one that wants a closure, or keeps more than its state, cannot be run so: the op stays unknown
        return None
    finally:
        writes.put_back()
        objects.put_back(Guard())
        random.put_back()
    return Evidence(births[0], trace, context) if births else None


def _without_hooks(step: Any) -> Any:
    """Past the wrapper that calls the hooks of `step`, ours among them; the compiler may have put another around that."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def _twin_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """Another optimizer with the same attributes. `copy.copy` would let it write defaults into the one that it is made of."""
    double = object.__new__(type(optimizer))
    double.__dict__.update(vars(optimizer), defaults=dict(optimizer.defaults), param_groups=[group], state=type(optimizer.state)(dict))
    return double


def _value(value: Any, before: Before) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    held = before(value)
    return _finite(value) if held is None else held.clone()


def _finite(value: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(value.detach().clone(), nan=0.0, posinf=0.0, neginf=0.0)
