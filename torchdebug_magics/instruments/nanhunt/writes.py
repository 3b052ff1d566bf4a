"""Tensors from before a replay that it writes in place: copied just before the first write, and written back."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdebug_magics.instruments.nanhunt.trace import written_by
from torchdebug_magics.probing.dispatch import OpListener, Run
from torchdebug_magics.probing.tensors import tensors_in

__all__ = ["Writes"]


class Writes:
    """What would be too much to copy beforehand (weights, running sums, data) costs memory only where it is written."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        """Memory that ops of the replay made; its addresses were free before, so none can be older."""
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor, int]] = {}

    def listener(self) -> OpListener:
        """The mode that sees every op of the replay."""
        return OpListener(self._before_write)

    def put_back(self) -> None:
        """Undo the writes, the last one first: an earlier copy of the same memory is the older one."""
        with torch.no_grad():
            for tensor, copy, version in reversed(self._copies.values()):
                with contextlib.suppress(RuntimeError):  # an inference tensor, outside its mode
                    tensor.data.copy_(copy)
                    # A graph of the user's that saved it finds it as it was.
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    def _before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        for tensor in written_by(func, args, kwargs):
            memory = _memory(tensor)
            if memory and memory not in self._own:
                key = memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
                if key not in self._copies:
                    self._copies[key] = tensor, tensor.detach().clone(), 0 if tensor.is_inference() else tensor._version
        given = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
        result = run()
        self._own.update({_memory(tensor) for tensor in tensors_in(result)} - given)
        return result


def _memory(tensor: torch.Tensor) -> int:
    """Where its storage is, or 0 where it has none of its own."""
    if (
        is_traceable_wrapper_subclass(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_nested
        or tensor._is_zerotensor()
        or tensor.is_quantized
    ):
        return 0
    try:
        address: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return 0
    return address
