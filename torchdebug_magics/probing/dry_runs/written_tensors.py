"""Tensors of the user's that a forward writes in place: kept just before the first write, and written back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from torchdebug_magics.probing.dry_runs.leaves import memory_of

__all__ = ["Writes", "written"]


class Writes:
    """What stands in no module's table (a global, a list, weights that are clamped) costs memory only where it is written."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        """Memory that the run made; its addresses were free before, so none of them can be the user's."""
        self._held: dict[int, tuple[torch.Tensor, torch.UntypedStorage | None]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}

    def made(self, values: Any, given: Any = ()) -> None:
        """Results of an op that was given these, and stand-ins: nobody else knows their memory."""
        memories = _memories(values)
        self._own |= memories - _memories(given) if memories else memories

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, computes: bool) -> None:
        """Keep what `func` writes. On fakes nothing is computed: only the count of the writes moves."""
        if not func._schema.is_mutable:
            return
        for tensor in written(func, args, kwargs):
            if isinstance(tensor, FakeTensor) or (memory := memory_of(tensor)) is None or memory._cdata in self._own:
                continue
            if memory._cdata not in self._held:
                with _disable_current_modes():
                    self._held[memory._cdata] = tensor, memory.clone() if computes else None
            if not tensor.is_inference():
                self._versions.setdefault(id(tensor), (tensor, tensor._version))

    def put_back(self) -> None:
        """Make every tensor that was written as it was."""
        for tensor, copy in self._held.values():
            if copy is not None:
                with contextlib.suppress(RuntimeError):  # resized meanwhile, or an inference tensor outside its mode
                    tensor.untyped_storage().copy_(copy)
        for tensor, version in self._versions.values():
            # A graph of the user's that saved it finds it as it was.
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _memories(values: Any) -> set[int]:
    """The addresses of the real ones."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor))
    return {memory._cdata for tensor in tensors if (memory := memory_of(tensor)) is not None}


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an op writes to, as its schema says."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
