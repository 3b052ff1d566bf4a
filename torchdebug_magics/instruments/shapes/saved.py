"""What autograd saves for the backward pass: each storage once, parameters and buffers left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.calls import Calls

__all__ = ["Saved"]


class Saved:
    """Adds up the bytes, by the call in which a storage was saved first."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seen: dict[int, StorageWeakRef] = {}  # weak: the address is not given away, and nothing is held
        self.total_bytes = 0

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
            size_bytes = tensor.untyped_storage().nbytes()
            self.total_bytes += size_bytes
            if (current := self._calls.current) is not None:
                current.saved_bytes += size_bytes
        return tensor

    def _is_new(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.is_nested or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            return False
        reference = StorageWeakRef(tensor.untyped_storage())
        return self._seen.setdefault(reference.cdata, reference) is reference


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
