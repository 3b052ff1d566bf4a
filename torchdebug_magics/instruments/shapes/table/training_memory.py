"""What training would take, before there is a GPU to try it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.shapes.report import Need
from torchdebug_magics.machine.gpus import Gpus
from torchdebug_magics.machine.limits import smallest_limit
from torchdebug_magics.probing.dry_runs.leaves import named_tensors, sizes

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.follow.parameters import Parameters
    from torchdebug_magics.probing.dry_runs.inputs import Inputs

__all__ = ["needs"]

# Tensors of a parameter's size that an optimizer keeps beside it.
_STATE = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}


@dataclass(frozen=True)
class _Limit:
    size_bytes: int | None
    name: str


def needs(model: torch.nn.Module, parameters: Parameters, activation_bytes: int, inputs: Inputs) -> tuple[Need, ...]:
    """An estimate for each of the common optimizers; nothing where there is nothing to train."""
    if not parameters.trainable:
        return ()
    batch = _batch(inputs)
    limit = _limit(model)
    return tuple(_need(name, tensors, parameters, activation_bytes, batch, limit) for name, tensors in _STATE.items())


def _need(name: str, tensors: int, parameters: Parameters, activation_bytes: int, batch: int | None, limit: _Limit) -> Need:
    held_bytes = parameters.local_bytes + parameters.buffer_bytes
    state_bytes = tensors * parameters.trainable_bytes
    fixed_bytes = held_bytes + parameters.trainable_bytes + state_bytes
    return Need(
        optimizer=name,
        parameters_bytes=held_bytes,
        gradients_bytes=parameters.trainable_bytes,
        optimizer_bytes=state_bytes,
        activations_bytes=activation_bytes,
        limit_bytes=limit.size_bytes,
        limit=limit.name,
        batch=batch,
        largest_batch=_largest(fixed_bytes, activation_bytes, batch, limit.size_bytes),
    )


def _largest(fixed_bytes: int, activation_bytes: int, batch: int | None, limit_bytes: int | None) -> int | None:
    """Activations grow with the batch, the rest does not."""
    if not batch or limit_bytes is None or not activation_bytes:
        return None
    return max(0, (limit_bytes - fixed_bytes) * batch // activation_bytes)


def _batch(inputs: Inputs) -> int | None:
    """The first size of the first tensor that has any."""
    return next((shape[0] for _, tensor in named_tensors(inputs.named_values()) if (shape := sizes(tensor))), None)


def _limit(model: torch.nn.Module) -> _Limit:
    """Of the device that the model is on; for one that is not on a GPU yet, of the first GPU there is, or of this machine."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda" and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(device)
        return _Limit(int(properties.total_memory), str(properties.name))
    with Gpus() as gpus:
        gpu = next(iter(gpus.read()), None)
    if gpu is not None:
        return _Limit(gpu.total_bytes, gpu.name)
    found = smallest_limit()
    return _Limit(None, "") if found is None else _Limit(found.limit_bytes, found.whose)
