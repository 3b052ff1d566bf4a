"""What an op does that its name and its tensors' shapes do not tell: asked of the code and the values while it runs."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.probing.source.call_sites import node_at, value_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.probing.where import local_values

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Note", "note_of"]

Note: TypeAlias = Literal["", "wraps a graph", "takes probabilities"]
_ROUNDING = 16


def note_of(name: str, args: tuple[Any, ...], frame: FrameType | None) -> Note:
    """Of an op that is about to run in the line at which a frame stands."""
    if name == "lift_fresh" and frame is not None and _wraps_graph(frame):
        return "wraps a graph"
    return "takes probabilities" if name == "_log_softmax" and _sums_to_one(args[0], args[1]) else ""


def _wraps_graph(frame: FrameType) -> bool:
    """Whether ``torch.tensor(losses)`` is called with tensors that require a gradient: their numbers are read without an op."""
    call = node_at(frame)
    if not isinstance(call, ast.Call) or not call.args:
        return False
    return any(tensor.requires_grad for tensor in tensors_in(_held(call.args[0], frame)))


def _held(node: ast.expr, frame: FrameType) -> list[Any]:
    if isinstance(node, (ast.List, ast.Tuple)):
        return [part for one in node.elts for part in _held(one, frame)]
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and ast.unparse(node.elt) == ast.unparse(node.generators[0].target):
        return _held(node.generators[0].iter, frame)
    value = value_of(node, frame, local_values(frame))
    return list(value) if type(value) in {list, tuple} else [value]


def _sums_to_one(logits: torch.Tensor, dim: int) -> bool:
    """Whether what is to become a distribution by a softmax is one already."""
    if not logits.requires_grad or logits.layout is not torch.strided or logits.is_meta or not logits.numel() or logits.size(dim) == 1:
        return False
    with _disable_current_modes(), torch.no_grad():
        values = logits.detach()
        off = (values.sum(dim) - 1).abs().max()
        return bool(values.min() >= 0) and bool(off <= _ROUNDING * torch.finfo(values.dtype).eps)
