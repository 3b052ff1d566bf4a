"""All that runs until something is wrong: one reduction over the loss and the gradients, with one synchronisation."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch._C._autograd import _get_sequence_nr

from torchdebug_magics.instruments.nanhunt.causes.tensor_names import shares_memory
from torchdebug_magics.instruments.nanhunt.rerun.attempt import caller
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.graphs import leaves_of
from torchdebug_magics.probing.storages import bytes_of
from torchdebug_magics.probing.tensors import are_ordinary, dense, extremes, kind_of, largest, peak, values_of

_NOWHERE = nullcontext()
_MOST_PLACES = 1000
_MOST_BYTES = 4 << 30
"""So much is read in about a second. Of a model that is larger nobody knows how it began."""


def survey(loss: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> tuple[float, float]:
    """The loss (of several elements: the largest magnitude) and the largest magnitude of it and all gradients."""
    given = list(loss)
    # Our reductions are not shown to a dispatch mode of the user's.
    with modes_aside() if torch._C._len_torch_dispatch_stack() else _NOWHERE, torch.no_grad():
        losses = given if are_ordinary(given) else [numbers for numbers in map(dense, given) if numbers is not None]
        if len(losses) != 1 or losses[0].numel() != 1 or losses[0].is_complex():
            value = largest(losses)
            return value, peak([value, largest(gradients)])
        value, *values = values_of([losses[0].reshape(()), *extremes(gradients)])
        return value, peak([value, *values])


def site() -> tuple[object, int] | None:
    """Which place in the user's program is running now."""
    frame = caller(sys._getframe(1))
    return None if frame is None else (frame.f_code, frame.f_lasti)


class Leaves:
    """The leaf tensors that a backward() gives gradients to.

    Walking the graph of a small model costs a part of its step. It is not walked again where the same place asks after as many new
    autograd nodes as before, and all leaves were parameters of the models called.
    """

    def __init__(self) -> None:
        self._only_parameters: set[Hashable] = set()
        self._last: Hashable = None
        """That of the last call, where it is one of these: equal without a hash, which a code object works out anew each time."""
        self._nodes = 0

    def of(self, site: Hashable, roots: tuple[torch.Tensor, ...], parameters: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those of the graph, and `parameters`."""
        nodes = _get_sequence_nr()
        place = site, nodes - self._nodes, len(parameters)
        self._nodes = nodes
        if place == self._last:
            return parameters
        if place in self._only_parameters:
            self._last = place
            return parameters
        leaves = {id(leaf): leaf for leaf in leaves_of(roots)}
        if len(self._only_parameters) >= _MOST_PLACES:
            self._only_parameters, self._last = set(), None  # graphs that are never twice the same
        if leaves.keys() <= parameters.keys():
            self._only_parameters.add(place)
        return {**parameters, **leaves}


@dataclass(frozen=True)
class Beginning:
    """Of all parameters and buffers that were alive."""

    bad: tuple[weakref.ref[torch.Tensor], ...] = ()
    is_known: bool = False

    @classmethod
    def take(cls, modules: Iterable[torch.nn.Module]) -> Beginning:
        """As it is now; one reduction where all is finite."""
        held = {
            id(tensor): tensor
            for module in modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor)
        }
        tensors = list(held.values())
        if bytes_of(tensors) > _MOST_BYTES:
            return cls()
        bad = [] if math.isfinite(largest(tensors)) else [tensor for tensor in tensors if kind_of(tensor)]
        return cls(tuple(map(weakref.ref, bad)), is_known=True)

    def was_bad(self, tensor: torch.Tensor) -> bool:
        """Whether what holds these numbers was there and was bad, as far as that is known."""
        alive = (reference() for reference in self.bad)
        return any(held is not None and shares_memory(held, tensor) for held in alive)
