"""What a run begins with, and another one must find again: objects, gradients, generators, names and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.instruments.deterministic.twice.figures import figures
from torchdebug_magics.probing.attributes import Names
from torchdebug_magics.probing.contents import Contents
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.snapshot import Bound, Snapshot

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.body import Body
    from torchdebug_magics.probing.guard import Guard

__all__ = ["State"]

_ALL = Bound(objects=2_000_000, bytes=4 << 30)


class State:
    """Of everything that a body can reach, at one moment. What tensors hold is not in it: see `Contents`."""

    def __init__(self, body: Body, guard: Guard, also: Iterable[str] = ()) -> None:
        self._body = body
        self._guard = guard
        self.names = frozenset(body.namespace.keys() - body.hidden)
        self._has_figures = bool(figures())
        self._snapshot = Snapshot([Names(body.namespace, self.names | frozenset(also)), *body.roots, figures()], _ALL)
        self._gradients = [
            (one, None if is_lazy(one) else one.grad, one.requires_grad) for one in self._snapshot.of_kind(torch.Tensor) if _is_leaf(one)
        ]
        self._random = RandomState.take()
        self._environment = dict(os.environ)

    def contents(self) -> Contents:
        """What all tensors hold now."""
        contents = Contents()
        for tensor in self._snapshot.of_kind(torch.Tensor):
            if not is_lazy(tensor):
                contents.keep(tensor)
        return contents

    def put_back(self) -> None:
        """Make all of it as it was; names that are new are gone."""
        for name in self._body.namespace.keys() - self._body.hidden - self.names:
            del self._body.namespace[name]
        self._snapshot.put_back(self._guard)
        if not self._has_figures:  # pyplot itself may be new
            figures().clear()
        for tensor, gradient, requires_grad in self._gradients:
            self._guard.run("putting back a gradient", _put_gradient, tensor, gradient, requires_grad)
        self._random.put_back()
        for name in os.environ.keys() - self._environment:
            del os.environ[name]
        os.environ |= {name: value for name, value in self._environment.items() if os.environ.get(name) != value}


def _is_leaf(tensor: Any) -> bool:
    return is_lazy(tensor) or (bool(tensor.is_leaf) and not tensor.is_inference())


def _put_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None, requires_grad: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # a lazy one would refuse
        if tensor.grad is not gradient:
            tensor.grad = gradient
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
