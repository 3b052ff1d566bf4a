"""A training as it is now, to be put back any number of times: objects, what tensors hold, gradients, random states and settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.probing.contents import Contents
from torchdebug_magics.probing.graphs import is_graph_leaf
from torchdebug_magics.probing.rerun.replay_state import Flags, listening
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.snapshot import Bound, Snapshot

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.outside.effects import Effects

__all__ = ["KeptState"]

_BOUND = Bound(objects=1_000_000, bytes=1 << 30)
_DATA_BYTES = 1 << 30
"""How much of tensors that are no part of a model or an optimizer is copied, the smallest first: a training rarely writes to its data."""


class KeptState:
    """Everything that is reachable from `roots`, and the disk as `effects` keeps it; `guard` notes what could not be put back."""

    def __init__(self, roots: Iterable[object], guard: Guard, effects: Effects) -> None:
        self._guard, self.effects = guard, effects
        self._objects = Snapshot([*roots, *listening()], _BOUND)
        tensors = [one for one in self._objects.of_kind(torch.Tensor) if not is_lazy(one)]
        self._leaves = [(one, one.grad, one.requires_grad) for one in tensors if _is_leaf(one)]
        self._contents = Contents()
        trained = _trained(self._objects)
        for tensor in tensors:
            if id(tensor) in trained:
                self._contents.keep(_once(tensor))
        for _, gradient, _ in self._leaves:
            if gradient is not None:
                self._contents.keep(_once(gradient))
        room_bytes = _DATA_BYTES
        for tensor in sorted((one for one in tensors if id(one) not in trained), key=_size_bytes):
            room_bytes -= _size_bytes(tensor)
            if room_bytes < 0:
                break
            guard.run("keeping a tensor", self._contents.keep, _once(tensor))
        self._random = RandomState.take()
        self._settings = Flags()

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """What is reachable of a type."""
        return self._objects.of_kind(kind)

    def put_back(self) -> None:
        """Make all of it as it was. May be done again, also where an interrupt has ended the first time."""
        self.effects.again()
        self._settings.put_back()
        self._objects.put_back(self._guard)
        self._contents.put_back()
        for tensor, gradient, requires_grad in self._leaves:
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        self._random.put_back()


def _is_leaf(tensor: torch.Tensor) -> bool:
    return is_graph_leaf(tensor) and not tensor.is_inference() and (tensor.is_floating_point() or tensor.is_complex())


def _trained(objects: Snapshot) -> set[int]:
    """The ids of tensors that belong to a model or to an optimizer."""
    models = objects.of_kind(torch.nn.Module)
    own = [one for model in models for one in (*model._parameters.values(), *model._buffers.values()) if one is not None]
    for optimizer in objects.of_kind(torch.optim.Optimizer):
        own += [one for group in optimizer.param_groups for one in group["params"]]
        entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
        own += [one for entry in entries for one in entry.values() if isinstance(one, torch.Tensor)]
    return set(map(id, own))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Of an expanded tensor, each number once: what stands for several cannot be written."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor


def _size_bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
