"""Keeps a rerun within one rank: the other ranks do not rerun their step, and would never answer a collective."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchdebug_magics.probing.alone.unsent_collectives import OthersNeeded, UnsentCollectives
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.shards import is_shard
from torchdebug_magics.probing.this_rank import rank

if TYPE_CHECKING:
    from contextlib import ExitStack

__all__ = ["LoneRerun", "is_spread"]


class LoneRerun:
    """Keeps what runs between `start` and `put_back` in this process; outside a job there is nothing to do.

    No context manager, and `put_back` may be called twice: an interrupt must not leave it half done.
    """

    def __init__(self) -> None:
        self.is_in_job = rank() is not None
        self.collectives = UnsentCollectives()
        known = live(DistributedDataParallel) if self.is_in_job else []
        self.wrappers: list[DistributedDataParallel] = [one for one in known if "reducer" in vars(one)]
        """The wrappers whose constructor has finished."""
        self._before = [(vars(wrapper), dict(vars(wrapper))) for wrapper in self.wrappers]

    def refuse(self, modules: Iterable[torch.nn.Module]) -> None:
        """`OthersNeeded` where these cannot be called by one rank, or not now."""
        if not self.is_in_job:
            return
        if any(map(is_spread, modules)):
            msg = "the model's parameters are spread over ranks, so that no rank can call it alone"
            raise OthersNeeded(msg)
        if any(wrapper.mixed_precision is not None for wrapper in self.wrappers):
            msg = "DistributedDataParallel casts its model's parameters"
            raise OthersNeeded(msg)
        if self.wrappers and torch._C._current_autograd_node() is not None:
            msg = "a reducer counts the gradients of the backward pass that is running, and would count those of a replay"
            raise OthersNeeded(msg)

    def start(self) -> None:
        """From now on a model that averages its gradients is called as the model that it wraps: nothing is broadcast or awaited."""
        for wrapper in self.wrappers:
            vars(wrapper).update(_pre_forward=partial(_moved, wrapper), _post_forward=_as_it_is)

    def attach(self, stack: ExitStack, owner: object = None) -> None:
        """Answer collectives until the stack closes; to be entered last, so that all others see what an answer copies."""
        if self.is_in_job:
            stack.enter_context(self.collectives.listener(owner))

    def put_back(self) -> None:
        """Everything as it was."""
        for attributes, before in self._before:
            for name in ("_pre_forward", "_post_forward"):
                attributes.pop(name, None)
                if name in before:
                    attributes[name] = before[name]


def is_spread(module: torch.nn.Module) -> bool:
    """Whether FSDP, or tensor parallelism, has left only a part of its parameters here."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(kind for name in ("FullyShardedDataParallel", "FSDPModule") if (kind := getattr(fsdp, name, None)) is not None)
    return any(isinstance(part, kinds) for part in module.modules()) or any(map(is_shard, module.parameters()))


def _moved(wrapper: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    if not wrapper.device_ids:
        return inputs, kwargs
    moved, named = wrapper.to_kwargs(inputs, kwargs, torch.device(wrapper.device_type, wrapper.device_ids[0]))
    return moved[0], named[0]


def _as_it_is(output: Any) -> Any:
    return output
