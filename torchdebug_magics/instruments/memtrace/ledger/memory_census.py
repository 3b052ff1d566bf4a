"""A census: every torch storage that is alive, whoever made it, with what it is to a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger
from torchdebug_magics.instruments.memtrace.ledger.phases import ACTIVATION, BUFFER, GRADIENT, OPTIMIZER_STATE, PARAMETER
from torchdebug_magics.memory.tensor_holders import saved_in
from torchdebug_magics.probing.graphs import is_graph_leaf, upstream
from torchdebug_magics.probing.modules import live_kinds
from torchdebug_magics.probing.storages import storages


class Census:
    """All that is found by the garbage collector's list of objects, and by the autograd graphs that hang on it."""

    def __init__(self) -> None:
        found = live_kinds(torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
        self.tensors = [tensor for tensor in found[torch.Tensor] if not isinstance(tensor, FakeTensor)]
        self.modules = [module for module in found[torch.nn.Module] if "_modules" in getattr(module, "__dict__", ())]
        self.optimizers = found[torch.optim.Optimizer]

    def storages(self) -> Iterator[tuple[torch.UntypedStorage, str]]:
        """(storage, what it is if nothing else is known of it); one may come several times."""
        for tensor in self.tensors:
            if is_graph_leaf(tensor):
                yield from ((storage, "") for storage in _of(tensor))
        for tensor in saved_tensors(tensor.grad_fn for tensor in self.tensors if has_graph(tensor)):
            yield from ((storage, ACTIVATION) for storage in _of(tensor))
        for tensor in self.tensors:
            if not is_graph_leaf(tensor):
                yield from ((storage, "") for storage in _of(tensor))

    def mark(self, ledger: Ledger) -> None:
        """Say of each block in the ledger what it is to a model, where it is anything."""
        for module in self.modules:
            mark(ledger, module._buffers.values(), BUFFER)
        parameters = [tensor for tensor in self.tensors if is_graph_leaf(tensor) and tensor.requires_grad]
        parameters += [
            parameter for module in self.modules for parameter in module._parameters.values() if parameter is not None
        ]  # frozen ones, too
        mark(ledger, parameters, PARAMETER)
        mark_gradients(ledger, parameters)
        for optimizer in self.optimizers:
            mark_state(ledger, optimizer)


def saved_tensors(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """What autograd keeps for the backward pass of these nodes and all before them. No unpack hook of the user's is run."""
    return (held for node in upstream(roots) for _, held in saved_in(node) if isinstance(held, torch.Tensor))


def mark(ledger: Ledger, tensors: Iterable[torch.Tensor | None], role: str) -> None:
    """Say what the blocks of these tensors are."""
    for block in _blocks_of(ledger, tensors):
        block.role = role


def mark_called(ledger: Ledger, model: torch.nn.Module) -> None:
    """Say of its parameters and buffers that a model was called with them."""
    mark(ledger, model.buffers(), BUFFER)
    for block in _blocks_of(ledger, model.parameters()):
        block.role, block.is_called = PARAMETER, True


def _blocks_of(ledger: Ledger, tensors: Iterable[torch.Tensor | None]) -> Iterator[Block]:
    ledger.settle()
    for tensor in tensors:
        if tensor is not None:
            for storage in _of(tensor):
                block = ledger.live.get(storage._cdata)
                if block is not None:
                    yield block


def mark_gradients(ledger: Ledger, parameters: Iterable[torch.Tensor]) -> None:
    """Say which blocks are the gradients of these leaves."""
    mark(ledger, (parameter.grad for parameter in parameters if is_graph_leaf(parameter)), GRADIENT)


def mark_state(ledger: Ledger, optimizer: torch.optim.Optimizer) -> None:
    """Say which blocks an optimizer keeps from step to step."""
    parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
    todo: list[Any] = list(optimizer.state.values())
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            if id(one) not in parameters:
                mark(ledger, [one], OPTIMIZER_STATE)
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (list, tuple)):
            todo += one


def has_graph(tensor: torch.Tensor) -> bool:
    """Whether it has a history."""
    # Asked of a view whose base was written in place, torch makes the graph anew: not for us to cause.
    try:
        return tensor.requires_grad and not tensor.is_leaf
    except RuntimeError:  # see `is_graph_leaf`
        return False


def _of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    try:
        return list(storages(tensor))
    except Exception:  # noqa: BLE001 - a subclass of the user's that does not tell what it is made of: it has no memory of its own
        return []
