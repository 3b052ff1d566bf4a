"""What a run begins with, and another one must find again: objects, gradients, generators, names, the environment and the process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from queue import Queue
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.instruments.deterministic.twice.beginning.iterator_standins import StandIns
from torchdebug_magics.instruments.deterministic.twice.beginning.open_figures import figures
from torchdebug_magics.instruments.deterministic.twice.beginning.process_settings import Process
from torchdebug_magics.probing.attributes import Names
from torchdebug_magics.probing.contents import Contents
from torchdebug_magics.probing.graphs import is_graph_leaf
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.snapshot import Bound, Snapshot
from torchdebug_magics.probing.where import runs_alone

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.body import Body
    from torchdebug_magics.probing.guard import Guard

__all__ = ["State"]

_OF_COMPILERS = "__"
"""How the names begin that a compiler puts beside the user's: what it has compiled stays, and looks for them."""
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
        self._stand_ins = StandIns(self._snapshot.objects())
        self._queues = [(one, one.unfinished_tasks, list(one.queue)) for one in self._snapshot.of_kind(Queue)]
        self._random = RandomState.take()
        self._process = Process(guard)
        self._environment = dict(os.environ)

    @property
    def is_whole(self) -> bool:
        """Whether a run that begins here can be undone: what is added to a sparse gradient is seen by nobody."""
        return all(gradient is None or gradient.layout is torch.strided for _, gradient, _ in self._gradients)

    def contents(self) -> Contents:
        """What all tensors hold now."""
        contents = Contents()
        for tensor in self._snapshot.of_kind(torch.Tensor):
            if not is_lazy(tensor):
                contents.keep(tensor)
        return contents

    def is_found_again(self, value: object) -> bool:
        """Whether something stands in for it in a later run."""
        return value in self._stand_ins

    def stand_in(self) -> None:
        """Let new objects stand where those are that cannot be put back in place; to be followed by `put_back`."""
        self._snapshot.put_in_place(self._stand_ins.made(), self._guard)

    def put_back(self) -> None:
        """Make all of it as it was; names that are new are gone."""
        for name in self._body.namespace.keys() - self._body.hidden - self.names:
            if not name.startswith(_OF_COMPILERS):
                del self._body.namespace[name]
        self._snapshot.put_back(self._guard)
        if runs_alone():  # else what a thread has put there meanwhile stays
            for queue, unfinished, items in self._queues:
                _fill(queue, unfinished, items)
        if not self._has_figures:  # pyplot itself may be new
            figures().clear()
        for tensor, gradient, requires_grad in self._gradients:
            self._guard.run("putting back a gradient", _put_gradient, tensor, gradient, requires_grad)
        self._random.put_back()
        self._process.put_back()
        for name in os.environ.keys() - self._environment:
            del os.environ[name]
        os.environ |= {name: value for name, value in self._environment.items() if os.environ.get(name) != value}


def _is_leaf(tensor: Any) -> bool:
    return is_lazy(tensor) or (is_graph_leaf(tensor) and not tensor.is_inference())


def _fill(queue: Queue[Any], unfinished: int, items: list[Any]) -> None:
    with queue.mutex:
        queue.unfinished_tasks = unfinished
        queue.queue.clear()
        queue.queue.extend(items)


def _put_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None, requires_grad: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # a lazy one would refuse
        if tensor.grad is not gradient:
            tensor.grad = gradient
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
