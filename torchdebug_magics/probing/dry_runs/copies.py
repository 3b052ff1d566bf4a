"""Real tensors that a forward may write into, in the places of the user's."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Copies"]


class Copies:
    """The same tensor always has the same copy, and views of one memory stay views of one memory, so that ties and sums hold."""

    def __init__(self) -> None:
        self._copies = WeakIdKeyDictionary()
        self._memories: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor; a parameter stays itself, as it is seldom written and often large."""
        if isinstance(tensor, torch.nn.Parameter) or not _is_plain(tensor):
            return tensor
        if tensor not in self._copies:
            copy = self._copied(tensor.detach())
            self._copies[tensor] = copy.requires_grad_() if tensor.requires_grad else copy
        found: torch.Tensor = self._copies[tensor]
        return found

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in self._memories:
            if memory.nbytes() > 2 * tensor.numel() * tensor.element_size():  # a few rows of a data set: not the whole of it
                return tensor.clone()
            self._memories[memory._cdata] = memory.clone()
        alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alike.set_(self._memories[memory._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is memory and nothing else."""
    if type(tensor) is not torch.Tensor or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout == torch.strided and not tensor.is_meta and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
