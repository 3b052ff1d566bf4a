"""``stale_value``: a tensor that an op saved for backward is overwritten by a write that PyTorch's version check does not see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.errors.inplace import is_packed, saved_in, saved_names
from torchdebug_magics.instruments.autograd.graph_recorder import Copied, Recorder
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source import finding, statement_at, written_names
from torchdebug_magics.instruments.autograd.tape import RecordedOp, StorageNumbers, Use
from torchdebug_magics.probing.graphs import upstream
from torchdebug_magics.probing.modules import live

_Result = TypeVar("_Result")


class StaleValue(NamedTuple):
    """Which op saved it, and which one overwrote it."""

    saver: RecordedOp
    writer: RecordedOp
    memory: int
    """The number of the storage on the tape."""
    error_ratio: float | None


def stale_finding(stale: StaleValue, members: tuple[str, ...]) -> AutogradFinding:
    """The write, with the names of the parameters and buffers that it changes."""
    saver, writer = stale.saver, stale.writer
    name = next(iter((*members, *written_names(statement_at(writer.where)))), None)
    source, is_update = writer.source or "the write", writer.in_optimizer or writer.name.startswith("_fused_")
    return finding(
        "stale_value",
        f"{f'`{name}`' if name else 'a tensor'} was overwritten after `{saver.name}` saved it for backward",
        writer.where,
        f"move `{source}` below " + ("the last backward() of the step" if is_update else "backward(), or write into a copy (`.clone()`)"),
        op=saver.name,
        saved_at=saver.where,
        writer_op=writer.name,
        tensor=name,
        module=saver.module,
        parameters=members,
        error_ratio=stale.error_ratio,
        explanation="PyTorch's version check does not see this write, so backward() used the new values and raised nothing",
    )


def stale_value(recorder: Recorder, tensors: tuple[torch.Tensor, ...]) -> StaleValue | None:
    """Of the graph that is about to run backward; None, without a look at it, where no write went unnoticed."""
    tape = recorder.settle()
    # A graph that saved this memory before cannot see the write: no version moved, or that of an alias only.
    writes = ((op, *write) for op in tape.ops if not op.in_backward for write in zip(op.writes, op.moved, strict=False))
    silent = [(op, use) for op, use, moved in writes if use.memory and (moved == use.version or not use.requires_grad)]
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


def _saved_in(numbers: StorageNumbers, node: Any, written: Use) -> torch.Tensor | None:
    """The tensor with these elements that the node holds, where PyTorch finds nothing wrong with it."""
    for held in saved_in(node):
        if isinstance(held, str):
            return None  # modified and noticed, or freed: backward() will raise
        first = held.storage_offset() * held.element_size()
        if numbers.of(held) == written.memory and first < written.span[1] and written.span[0] < first + max(1, held.nbytes):
            return held.detach()
    return None


def _is_harmless(node: Any, held: torch.Tensor, kept: Copied) -> bool:
    """Whether the node gives the same gradients with both values: it may not read all that it saved, as running statistics in training.

    One node can be asked where the whole graph cannot: a call of it runs no hook, and no other node. Its outputs get gradients that differ
    in each element: equal ones would hide much, as what a softmax saved.
    """
    with _disable_current_modes(), torch.no_grad():
        if torch.equal(kept.part(held.untyped_storage()), kept.values):
            return True
        if isinstance(node, torch.autograd.function.BackwardCFunction) or any(is_packed(node, name) for name in saved_names(node)):
            return False  # it runs code of the user's
        shapes = [(tuple(one.shape), one) for one in node._input_metadata]
        incoming = [torch.arange(math.prod(shape), device=one.device).sin().to(one.dtype).reshape(shape) for shape, one in shapes]
        try:
            now, then = _with_both(held, kept, lambda: node(*incoming))
        except (RuntimeError, TypeError):
            return False  # it takes other gradients, or there is not the memory for them
        pairs = zip(now, then, strict=True) if isinstance(now, tuple) else ((now, then),)
        return all(one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs)


def _with_both(held: torch.Tensor, kept: Copied, compute: Callable[[], _Result]) -> tuple[_Result, _Result]:
    """With the present values, and with those from before the write, which are there only as long as it takes."""
    place, now = kept.part(held.untyped_storage()), compute()
    present = place.clone()
    try:
        place.copy_(kept.values)
        return now, compute()
    finally:
        place.copy_(present)


def _error(tensors: tuple[torch.Tensor, ...], nodes: list[Any], held: torch.Tensor, kept: Copied) -> float | None:
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
    return (
        any(bool(getattr(leaf, "_post_accumulate_grad_hooks", None)) for leaf in leaves)
        or any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)
        or any(is_packed(node, name) for node in nodes for name in saved_names(node))
        or any(tensor._backward_hooks for tensor in live(torch.Tensor) if not tensor.is_leaf or tensor.requires_grad)
    )
