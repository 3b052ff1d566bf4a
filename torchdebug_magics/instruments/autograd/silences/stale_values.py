"""``stale_value``: a saved tensor was overwritten without a change of its version, so PyTorch does not complain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.errors.broken_node import is_packed, saved_names
from torchdebug_magics.probing.graphs import upstream
from torchdebug_magics.probing.modules import live

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.autograd.recording.graph_recorder import Overwritten, Recorder
    from torchdebug_magics.instruments.autograd.recording.storage_numbers import StorageNumbers
    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp, Use

__all__ = ["StaleValue", "stale_value"]

_Result = TypeVar("_Result")


class StaleValue(NamedTuple):
    """Which op saved it, and which one overwrote it."""

    saver: RecordedOp
    writer: RecordedOp
    name_memory: int
    error_ratio: float | None


def stale_value(recorder: Recorder, tensors: tuple[torch.Tensor, ...]) -> StaleValue | None:
    """Of the graph that is about to run backward; None, without a look at it, where no write went unnoticed."""
    tape = recorder.settle()
    silent = [
        (op, use) for op in tape.ops for use, moved in zip(op.writes, op.moved, strict=False) if use.memory and _is_silent(op, use, moved)
    ]
    if not silent:
        return None
    nodes = list(upstream(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    for node in nodes:
        saver = None if hasattr(node, "variable") else tape.by_node.get(node._sequence_nr())
        if saver is None:
            continue
        for writer, written in silent:
            if writer.index <= saver.index or not any(use.overlaps(written) for use in (*saver.reads, *saver.makes)):
                continue
            held, kept = _saved_in(tape.numbers, node, written), recorder.overwritten.get(written.memory)
            if held is None or kept is None or _is_harmless(node, held, kept):
                continue  # without the values from before the write nobody knows whether they matter
            ratio = _error(tensors, nodes, held, kept)
            if ratio != 0.0:
                return StaleValue(saver, writer, written.memory, ratio)
    return None


def _is_silent(op: RecordedOp, written: Use, moved: int) -> bool:
    """Whether a graph that saved this memory before cannot see the write: no version moved, or that of an alias only."""
    if op.in_backward:
        return False
    return moved == written.version or not written.requires_grad


def _saved_in(numbers: StorageNumbers, node: Any, written: Use) -> torch.Tensor | None:
    """The tensor with these elements that the node holds, where PyTorch finds nothing wrong with it."""
    for name in saved_names(node):
        if is_packed(node, name):
            continue
        try:
            held = getattr(node, name)
        except RuntimeError:
            return None  # modified and noticed, or freed: backward() will raise
        for tensor in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(tensor, torch.Tensor) and numbers.of(tensor) == written.memory:
                first = tensor.storage_offset() * tensor.element_size()
                if first < written.span[1] and written.span[0] < first + max(1, tensor.nbytes):
                    return tensor.detach()
    return None


def _is_harmless(node: Any, held: torch.Tensor, kept: Overwritten) -> bool:
    """Whether the node gives the same gradients with both values: it may not read all that it saved, as running statistics in training.

    One node can be asked where the whole graph cannot: a call of it runs no hook, and no other node.
    """
    with _disable_current_modes(), torch.no_grad():
        if torch.equal(_place(held, kept), kept.before):
            return True
        if isinstance(node, torch.autograd.function.BackwardCFunction) or any(is_packed(node, name) for name in saved_names(node)):
            return False  # it runs code of the user's
        try:
            now, then = _with_both(held, kept, lambda: _gradients_of(node))
        except (RuntimeError, TypeError):
            return False  # it takes other gradients, or there is not the memory for them
        pairs = list(zip(now, then, strict=True))
        return all(one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs)


def _gradients_of(node: Any) -> tuple[Any, ...]:
    """For gradients of its outputs that differ in each element: equal ones would hide much, as what a softmax saved."""
    metadata = node._input_metadata
    incoming = [torch.arange(math.prod(one.shape), device=one.device).sin().to(one.dtype).reshape(tuple(one.shape)) for one in metadata]
    outgoing = node(*incoming)
    return outgoing if isinstance(outgoing, tuple) else (outgoing,)


def _place(held: torch.Tensor, kept: Overwritten) -> torch.Tensor:
    """What was written, as it is now."""
    return torch.empty(0, dtype=kept.before.dtype, device=held.device).set_(held.untyped_storage(), *kept.layout)


def _with_both(held: torch.Tensor, kept: Overwritten, compute: Callable[[], _Result]) -> tuple[_Result, _Result]:
    """With the present values, and with those from before the write, which are there only as long as it takes."""
    place, now = _place(held, kept), compute()
    present = place.clone()
    try:
        place.copy_(kept.before)
        return now, compute()
    finally:
        place.copy_(present)


def _error(tensors: tuple[torch.Tensor, ...], nodes: list[Any], held: torch.Tensor, kept: Overwritten) -> float | None:
    """The relative error of the gradient: the true one is computed with the values that were saved, on the graph, which is kept."""
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    if not leaves or any(one.numel() != 1 for one in tensors) or _runs_code(nodes, leaves):
        return None
    with _disable_current_modes():
        now, true = _with_both(held, kept, lambda: torch.autograd.grad(tensors, leaves, retain_graph=True, allow_unused=True))
        pairs = [(one, other) for one, other in zip(now, true, strict=True) if one is not None and other is not None]
        norm = sum(float(other.double().norm()) ** 2 for _, other in pairs) ** 0.5
        error = sum(float((one.double() - other.double()).norm()) ** 2 for one, other in pairs) ** 0.5
    return error / norm if norm else None


def _runs_code(nodes: list[Any], leaves: list[torch.Tensor]) -> bool:
    """Whether a pass through the graph would run code of the user's: hooks, backwards of functions, checkpoints."""
    if any(bool(getattr(leaf, "_post_accumulate_grad_hooks", None)) for leaf in leaves):
        return True
    if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes):
        return True
    if any(is_packed(node, name) for node in nodes for name in saved_names(node)):
        return True
    return any(one._backward_hooks for one in live(torch.Tensor) if not one.is_leaf or one.requires_grad)
