"""Collectives that are answered in this process, and sent to nobody.

A reduction gives this rank's own part, and a gather that part in every place. What only another rank has cannot be had.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from torchdebug_magics.probing.dispatch import OpListener, Run, modes_aside
from torchdebug_magics.probing.distributed.this_rank import rank
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.source.user_code import locate, user_frame
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.storages import is_shard
from torchdebug_magics.probing.tensors import largest, tensors_in
from torchdebug_magics.report import Location

_NOTHING = frozenset(["barrier", "monitored_barrier_", "send"])
"""Collectives that return no data to this rank."""
_OWN_PART = frozenset(["allreduce_", "allreduce_coalesced_", "reduce_", "all_reduce_"])
_OWN_COPY = frozenset(["all_reduce", "all_reduce_coalesced"])
_IN_EVERY_PLACE = frozenset(["allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "gather_"])
_ANSWERED = _NOTHING | _OWN_PART | _OWN_COPY | _IN_EVERY_PLACE | {"all_gather_into_tensor"}


class OthersNeeded(Exception):  # noqa: N818 - not an error: a reason
    """Why something cannot be run by one rank alone."""


@dataclass(frozen=True)
class Exchange:
    """A collective that was not sent."""

    op: str
    dtype: torch.dtype
    peak: float
    """The largest magnitude of what this rank would have given; 0 of integers."""
    element_count: int
    memory: frozenset[int]
    """The positions of the tensors that the collective writes or reads."""
    location: Location | None
    """The user's line that asked for it."""


class UnsentCollectives:
    """Answers every collective while its `listener` is on top of the stack of modes: what an answer copies, those below it see."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        """The collectives that would have brought numbers."""
        self.refused = ""
        """Why a collective could not be answered; the user's own code may have caught the error."""

    def listener(self, owner: object = None) -> OpListener:
        """The mode; a sweep of the owner's finds it."""
        return OpListener(self._op, owner)

    def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.keys().isdisjoint({"process_group", "group_name"}):
            return run()
        name = func._schema.name.partition("::")[2]
        if name not in _ANSWERED and not _is_root(name, given):
            self.refused = f"it needs what other ranks send (`{name.strip('_')}`)"
            raise OthersNeeded(self.refused)
        values = [value for value in given.values() if next(tensors_in(value), None) is not None]
        if name not in _NOTHING:
            self._note(name, list(tensors_in(values[-1])))
        if name in _OWN_COPY:
            return tree_map_only(torch.Tensor, torch.clone, values[0])
        if name == "all_gather_into_tensor":
            return torch.cat([values[0]] * given["group_size"])
        if name in _IN_EVERY_PLACE and len(values) > 1:  # a gather has places in one rank alone
            _fill(*values)
        # What the schema promises: the written tensors, and a finished `Work`.
        returned = [_done(values[0]) if "Work" in str(output.type) else values[0] for output in func._schema.returns]
        return returned[0] if len(returned) == 1 else tuple(returned) or None

    def _note(self, name: str, tensors: list[torch.Tensor]) -> None:
        frame = user_frame(sys._getframe(1))
        with modes_aside():
            peak = largest(tensors)
        self.exchanges.append(
            Exchange(
                op=name.strip("_"),
                dtype=tensors[0].dtype,
                peak=peak,
                element_count=sum(tensor.numel() for tensor in tensors),
                memory=frozenset(map(memory_of, tensors)),
                location=None if frame is None else locate(frame),
            )
        )


def _is_root(name: str, given: dict[str, Any]) -> bool:
    """Whether this rank is the one that a broadcast comes from."""
    if name != "broadcast_" or "root_rank" not in given:
        return False
    binding: Any = sys.modules["torch._C._distributed_c10d"]  # not every build of torch has it; where a job runs, it is there
    return bool(binding.ProcessGroup.unbox(given["process_group"]).rank() == given["root_rank"])


def _fill(places: Any, parts: Any) -> None:
    """Put each part of this rank's into all of its places: a list of tensors, or one that holds them all."""
    pairs = zip(places, parts, strict=True) if isinstance(parts, (list, tuple)) else [(places, parts)]
    for place, part in pairs:
        if isinstance(place, torch.Tensor):
            place.view(-1, part.numel()).copy_(part.reshape(1, -1))
        else:
            for tensor in place:
                tensor.copy_(part)


def _done(written: Any) -> Any:
    binding: Any = sys.modules["torch._C._distributed_c10d"]
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors_in(written)))
    return binding._create_work_from_future(future).boxed()


class LoneRerun:
    """Keeps what runs between `start` and `put_back` in this process; outside a job there is nothing to do.

    No context manager, and `put_back` may be called twice: an interrupt must not leave it half done.
    """

    def __init__(self) -> None:
        self.is_in_job = rank() is not None
        self.collectives = UnsentCollectives()
        known = live(DistributedDataParallel) if self.is_in_job else []
        self.wrappers: list[DistributedDataParallel] = [wrapper for wrapper in known if "reducer" in vars(wrapper)]
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
