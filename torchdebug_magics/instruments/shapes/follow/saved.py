"""What autograd saves for the backward pass: each storage once, parameters and buffers left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final

import torch
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_get_disabled_error_message,
    _top_saved_tensors_default_hooks,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchdebug_magics.instruments.shapes.follow.module_calls import Calls
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.storages import held_of, is_shard, storage_of

_UNCOUNTED: Final = "activations saved inside `torch.func` transforms are not counted"


class Saved:
    """Adds up the bytes, by the call in which a storage was saved first."""

    def __init__(self, calls: Calls, hooks: Hooks, guard: Guard) -> None:
        self._calls = calls
        self._hooks = hooks
        self._guard = guard
        self._seen: dict[int, StorageWeakRef] = {}  # weak: the address is not given away, and nothing is held
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sharded: set[int] = set()
        """Ids of modules in which FSDP may put gathered parameters just before they are called; those are no activations."""
        self.total_bytes = 0

    def put_at(self, tensor: torch.Tensor, size_bytes: int) -> None:
        """Count `size_bytes` should this tensor be saved, whatever its memory holds."""
        if (memory := storage_of(tensor)) is not None:
            reference = StorageWeakRef(memory)
            self._sizes[reference.cdata] = reference, size_bytes

    def begin(self, inputs: Iterable[torch.Tensor]) -> None:
        """What the forward is given counts as far as it is given: eight rows of a data set are not the data set."""
        given: dict[int, int] = {}
        for tensor in {id(tensor): tensor for tensor in inputs}.values():
            if (memory := storage_of(tensor)) is not None:
                given[memory._cdata] = given.get(memory._cdata, 0) + held_of(tensor).numel() * tensor.element_size()
                self.put_at(tensor, min(given[memory._cdata], memory.nbytes()))

    def leave_out(self, model: torch.nn.Module) -> None:
        """Do not count its parameters and buffers, which are there anyway."""
        for module in model.modules():
            self._leave_out(module)
            if any(map(is_shard, module._parameters.values())):
                self._sharded.add(id(module))

    def _leave_out(self, module: torch.nn.Module) -> None:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                self._is_new(tensor)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved from here on, whether or not gradients are on; not inside of ``torch.func``."""
        with ExitStack() as stack:
            if _saved_tensors_hooks_get_disabled_error_message() is None:
                stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
                self._hooks.ends_of_saving(stack, self._aside)
            else:
                self._guard.remark(_UNCOUNTED)
            yield

    @contextmanager
    def _aside(self, original: Callable[[str], AbstractContextManager[None]], message: str) -> Iterator[None]:
        """Where hooks on what is saved would be refused, ours are not there."""
        top = _top_saved_tensors_default_hooks(True)  # noqa: FBT003 - torch names it differently in each release
        is_ours = top is not None and top[0] == self._pack
        if is_ours:
            self._guard.remark(_UNCOUNTED)
            _pop_saved_tensors_default_hooks()
        try:
            with original(message):
                yield
        finally:
            if is_ours:
                _push_saved_tensors_default_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        current = self._calls.current
        if current is not None and id(current.module) in self._sharded:
            self._leave_out(current.module)
        if self._is_new(tensor):
            size_bytes = self._size(tensor)
            self.total_bytes += size_bytes
            if current is not None:
                current.saved_bytes += size_bytes
        if tensor.is_leaf:
            return tensor
        with modes_aside():  # a node that holds its own result, as that of a ReLU does, would hold itself, this and the model for ever
            return tensor.detach()

    def _size(self, tensor: torch.Tensor) -> int:
        memory = held_of(tensor).untyped_storage()
        known = self._sizes.get(memory._cdata)
        return known[1] if known is not None else memory.nbytes()

    def _is_new(self, tensor: torch.Tensor) -> bool:
        memory = storage_of(tensor)
        if memory is None:
            return False
        reference = StorageWeakRef(memory)
        return self._seen.setdefault(reference.cdata, reference) is reference


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
