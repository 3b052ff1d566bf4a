"""Notes which tensors go through `all_reduce` and `broadcast`: the evidence that their owners are replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef

from torchdebug_magics.probing.storages import storages
from torchdebug_magics.probing.wrappers import wrap

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torchdebug_magics.probing.guard import Guard

__all__ = ["CollectiveNotes", "Group", "group_of"]

Group = tuple[int, ...]
"""Ranks of a process group."""
_MOST = 1 << 16


def group_of(group: Any) -> Group:
    """Ranks of a process group, or of the whole job where it is None; empty outside of it."""
    try:
        return tuple(distributed.get_process_group_ranks(group or distributed.group.WORLD))
    except (AttributeError, KeyError, ValueError):
        return ()


class CollectiveNotes:
    """Tensors that were reduced or broadcast since the last optimizer step."""

    def __init__(self, owner: object, guard: Guard, shared: Callable[[int], bool]) -> None:
        self._owner = owner
        self._guard = guard
        self._shared = shared
        """Told of each storage; whether it belongs to a replica that is known."""
        self._storages: dict[int, tuple[StorageWeakRef, Group]] = {}
        """By storage address; the weak reference keeps the address from being used again."""

        self.sums_count = 0
        """Reduced tensors of several elements that do not belong to a replica."""

    def attach(self, stack: ExitStack) -> None:
        """Record collectives until the stack closes."""
        if distributed.is_available():
            wrap(stack, self._owner, distributed, "all_reduce", functools.partial(self._around, 1))
            wrap(stack, self._owner, distributed, "broadcast", functools.partial(self._around, 0))

    def forget(self) -> None:
        """Forget the collectives of a finished step."""
        self._storages.clear()

    def group(self, tensor: torch.Tensor | None) -> Group:
        """The ranks of the collective that a tensor went through; empty if there was none."""
        noted = (self._storages.get(one._cdata) for one in storages(tensor)) if tensor is not None else ()
        return next((group for _, group in filter(None, noted)), ())

    def _around(self, sums: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._guard.run("the look at a collective", self._note, sums, *args, **kwargs)
        return original(*args, **kwargs)

    def _note(self, sums: int, tensor: torch.Tensor, _op_or_source: Any = None, group: Any = None, *_: Any, **__: Any) -> None:
        ranks = group_of(group)
        if len(ranks) > 1 and len(self._storages) < _MOST:
            for one in storages(tensor):
                if not self._shared(one._cdata):
                    self.sums_count += sums * (tensor.numel() > 1)
                    self._storages[one._cdata] = StorageWeakRef(one), ranks
