"""What autograd saves for the backward pass: each storage once, parameters and buffers left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchdebug_magics.probing.dry_runs.leaves import memory_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.follow.module_calls import Calls

__all__ = ["Saved"]


class Saved:
    """Adds up the bytes, by the call in which a storage was saved first."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seen: dict[int, StorageWeakRef] = {}  # weak: the address is not given away, and nothing is held
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total_bytes = 0

    def put_at(self, tensor: torch.Tensor, size_bytes: int) -> None:
        """Count `size_bytes` should this tensor be saved, whatever its memory holds."""
        if (memory := memory_of(tensor)) is not None:
            reference = StorageWeakRef(memory)
            self._sizes[reference.cdata] = reference, size_bytes

    def begin(self, inputs: Iterable[torch.Tensor]) -> None:
        """What the forward is given counts as far as it is given: eight rows of a data set are not the data set."""
        given: dict[int, int] = {}
        for tensor in {id(one): one for one in inputs}.values():
            if (memory := memory_of(tensor)) is not None:
                given[memory._cdata] = given.get(memory._cdata, 0) + tensor.numel() * tensor.element_size()
                self.put_at(tensor, min(given[memory._cdata], memory.nbytes()))

    def leave_out(self, model: torch.nn.Module) -> None:
        """Its parameters and buffers are there anyway."""
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._is_new(tensor)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved from here on."""
        with torch.enable_grad(), self.hooks():
            yield

    def hooks(self) -> AbstractContextManager[None]:
        """Count what is saved inside, whether or not gradients are on."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_new(tensor):
            size_bytes = self._size(tensor)
            self.total_bytes += size_bytes
            if (current := self._calls.current) is not None:
                current.saved_bytes += size_bytes
        return tensor

    def _size(self, tensor: torch.Tensor) -> int:
        memory = tensor.untyped_storage()
        told = self._sizes.get(memory._cdata)
        return told[1] if told is not None else memory.nbytes()

    def _is_new(self, tensor: torch.Tensor) -> bool:
        memory = memory_of(tensor)
        if memory is None:
            return False
        reference = StorageWeakRef(memory)
        return self._seen.setdefault(reference.cdata, reference) is reference


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
