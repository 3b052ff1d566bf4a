"""Everything of a training that may not change, in a form that can be compared."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from torchdebug_magics.probing.state.snapshot import Snapshot


def state_of(values: Iterable[Any]) -> list[Any]:
    """Weights, buffers, gradients, optimizer states, modes, hooks and random states of all that the values can reach, to the last bit."""
    reached = Snapshot(values)
    state: list[Any] = [pickle.dumps(random.getstate()), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()]  # noqa: NPY002
    for module in reached.of_kind(torch.nn.Module):
        hooks = [len(table) for name, table in vars(module).items() if name.endswith("_hooks") and hasattr(table, "__len__")]
        plain = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        state.append((type(module).__name__, module.training, hooks, plain))
    tensors = [tensor for tensor in reached.of_kind(torch.Tensor) if not torch.nn.parameter.is_lazy(tensor)]
    state += [(id(t), t.requires_grad, t._version, _numbers(t), id(t.grad) if t.is_leaf else 0) for t in tensors]
    for optimizer in reached.of_kind(torch.optim.Optimizer):
        entries = [{key: _numbers(value) for key, value in entry.items()} for entry in optimizer.state.values() if isinstance(entry, dict)]
        groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        state.append((len(optimizer.state), entries, repr(groups), [list(map(id, group["params"])) for group in optimizer.param_groups]))
    return state


def _numbers(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    with torch.no_grad():
        return value.detach().double().flatten().tolist() if value.is_floating_point() else repr(value.detach())
