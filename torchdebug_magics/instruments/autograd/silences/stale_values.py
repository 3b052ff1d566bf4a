"""``stale_value``: a saved tensor was overwritten without a change of its version, so PyTorch does not complain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.errors.broken_node import is_packed, saved_names
from torchdebug_magics.probing.graphs import upstream
from torchdebug_magics.probing.modules import live

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.recording.op_recorder import Recorder
    from torchdebug_magics.instruments.autograd.recording.storage_numbers import StorageNumbers
    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp, Use

__all__ = ["StaleValue", "stale_value"]


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
            if (held := _saved_in(tape.numbers, node, written)) is not None:
                ratio = _error(recorder, tensors, nodes, held, written.memory)
                if ratio != 0.0:
                    return StaleValue(saver, writer, written.memory, ratio)
    return None


def _is_silent(op: RecordedOp, written: Use, moved: int) -> bool:
    """Whether a graph that saved this memory before cannot see the write: no version moved, or that of an alias only."""
    if op.in_backward or op.name.startswith(("native_batch_norm", "batch_norm", "_native_batch_norm", "cudnn_batch_norm")):
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


def _error(recorder: Recorder, tensors: tuple[torch.Tensor, ...], nodes: list[Any], held: torch.Tensor, memory: int) -> float | None:
    """The relative error of the gradient: the true one is computed with the values that were saved, on the graph, which is kept."""
    kept = recorder.overwritten.get(memory)
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    if kept is None or not leaves or any(one.numel() != 1 for one in tensors) or _runs_code(nodes, leaves):
        return None
    with _disable_current_modes():
        place = torch.empty(0, dtype=held.dtype, device=held.device).set_(held.untyped_storage(), *kept.layout)
        present = place.clone()
        if torch.equal(present, kept.before):
            return 0.0
        now = torch.autograd.grad(tensors, leaves, retain_graph=True, allow_unused=True)
        try:
            place.copy_(kept.before)
            true = torch.autograd.grad(tensors, leaves, retain_graph=True, allow_unused=True)
        finally:
            place.copy_(present)
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
