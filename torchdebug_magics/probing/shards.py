"""Tensors that several ranks hold together (`DTensor`, as FSDP2 and tensor parallelism make them), and the part of each that is here.

Any operator on a DTensor may communicate, even ``norm()`` or ``item()``: one rank alone would then wait for the others for ever. So all
that looks at numbers or memory looks at the local tensor. Nothing here communicates, or imports ``torch.distributed.tensor``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from torchdebug_magics.report import Sharding

__all__ = [
    "gathered_for", "has_flat_parameters", "held_of", "is_shard", "is_shard_type", "local_of", "ranks_of", "sharding_of",
    "shards_may_be", "shards_note",
]  # fmt: skip

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def shards_may_be() -> bool:
    """Whether there may be DTensors in this process at all."""
    return "torch.distributed.tensor" in sys.modules


def is_shard(tensor: object) -> bool:
    """Whether it is a DTensor, however it is laid out."""
    return type(tensor) not in _PLAIN and is_shard_type(type(tensor))


def is_shard_type(kind: type) -> bool:
    """Whether tensors of that type are DTensors."""
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and issubclass(kind, dtensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor in this process, without a graph; any other tensor is given back as it is.

    Where a collective that was begun before is still on its way, it waits for its result.
    """
    if not is_shard(tensor):
        return tensor
    dtensor: Any = tensor
    waits = getattr(dtensor._local_tensor, "trigger_wait", None)  # of an `AsyncCollectiveTensor`
    found: torch.Tensor = dtensor._local_tensor if waits is None else waits()
    return found


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """As `local_of`, for who asks for its memory and not for its numbers: waits for nothing."""
    if type(tensor) in _PLAIN:
        return tensor
    found: Any = tensor
    found = found._local_tensor if is_shard(found) else found
    held: torch.Tensor = found.elem if hasattr(type(found), "trigger_wait") else found
    return held


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """The whole shape, the shape here and the placements of a DTensor; None for any other tensor."""
    if not is_shard(tensor):
        return None
    dtensor: Any = tensor
    return Sharding(tuple(dtensor.shape), tuple(dtensor._local_tensor.shape), tuple(map(_text, dtensor.placements)))


def _text(placement: Any) -> str:
    return f"Shard({placement.dim})" if placement.is_shard() and type(placement).__name__ == "Shard" else repr(placement)


def gathered_for(modules: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """The `id` of each tensor that FSDP2 gathers and puts in a parameter's place while a module runs -> that parameter."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        state_of: Any = getattr(type(module), "_get_fsdp_state", None)
        state = None if state_of is None else state_of(module)
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for one in (one for group in groups for one in getattr(group, "fsdp_params", ())):
            if (gathered := getattr(one, "_unsharded_param", None)) is not None:
                found[id(gathered)] = one.sharded_param
    return found


def has_flat_parameters(model: torch.nn.Module) -> bool:
    """Whether `FullyShardedDataParallel`, the older FSDP, holds parameters of it: its forward communicates even on tensors without data."""
    wrapper: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return any(isinstance(part, wrapper) for part in model.modules())


def ranks_of(tensors: Iterable[torch.Tensor]) -> int:
    """Over how many ranks they are laid out; 1 where all are whole here."""
    meshes: list[Any] = [getattr(tensor, "device_mesh", None) for tensor in tensors if is_shard(tensor)]
    return max((int(mesh.size()) for mesh in meshes if mesh is not None), default=1)


def shards_note(parameters: Iterable[torch.Tensor], what: str) -> str:
    """That `what` is of the shards in this process; empty where no parameter is one."""
    among = list(parameters)
    sharded = sum(map(is_shard, among))
    return f"{sharded} of {len(among)} parameters are sharded: {what} of the shards in this process" if sharded else ""
