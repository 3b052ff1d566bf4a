"""The flow over the recorded ops: where a gradient that could have flowed on from a tensor to the parameters ends."""

from __future__ import annotations

import ast
import re
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.probing.source.call_sites import enclosing, tree_of
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp, Tape
    from torchdebug_magics.report import Location

__all__ = ["Dropped", "ancestors", "dropped_on_the_way", "gradient_switch", "rewrapped"]

_CONTEXTS = ("no_grad", "inference_mode", "set_grad_enabled")
_FRESH = frozenset({"lift_fresh", "lift_fresh_copy", "scalar_tensor", "from_file"})
_NUMBERS = frozenset({"_local_scalar_dense", "detach", "_to_copy"})
_READ_AND_WRAPPED = re.compile(r"\b(?:tensor|as_tensor|from_numpy|FloatTensor|Tensor)\(.*\.(?:tolist|item|numpy)\(")
_REWRAPS = re.compile(r"\b(tensor|as_tensor|from_numpy|FloatTensor|LongTensor|Tensor|array|asarray)\s*\(")


class Dropped(NamedTuple):
    """Where a gradient that could have flowed on ends."""

    op: RecordedOp
    cause: str
    """``"no_grad"``, ``"inference_mode"``, ``"detach"``, ``"dtype"``, ``"rewrapped"``, ``"list"`` (of tensors, rewrapped) or ``"data"``."""


def dropped_on_the_way(tape: Tape, root: int, before: int | None = None) -> tuple[Dropped | None, list[RecordedOp]]:
    """The cut nearest to the tensor with that id, and the ops that it was computed by, up to there."""
    found: list[RecordedOp] = []
    for op in ancestors(tape, root, before):
        found.append(op)
        if (dropped := _dropped(op)) is not None:
            return dropped, found
    return next((dropped for op in found if (dropped := rewrapped(tape, op)) is not None), None), found


def ancestors(tape: Tape, root: int, before: int | None = None) -> Iterator[RecordedOp]:
    """The ops that the tensor with that id was computed by, the nearest first; the id is another's after that many ops."""
    made = (op for op in tape.ops if before is None or op.index < before)
    todo = deque([op for op in made if any(one.tensor == root for one in op.makes)][-1:])
    seen: set[int] = set()
    while todo:
        op = todo.popleft()
        if op.index not in seen:
            seen.add(op.index)
            yield op
            todo += [one for one in op.parents if not one.in_optimizer and not one.in_backward]


def _dropped(op: RecordedOp) -> Dropped | None:
    if op.initializes:
        return None
    if any(one.requires_grad for one in op.reads):
        if op.inference or not op.grad_enabled:
            return Dropped(op, "inference_mode" if op.inference else "no_grad")
        if op.name == "detach":
            return Dropped(op, _how_detached(_source(op)))
        if op.makes and not any(one.can_have_grad for one in op.makes):
            return Dropped(op, "dtype")
    for use, maker in op.sources:
        if not use.can_have_grad and maker.grad_enabled and any(one.requires_grad for one in maker.reads):
            return Dropped(maker, "dtype")  # one of several outputs, as the indices of `max`
    return None


def _how_detached(source: str) -> str:
    if ".data" in source:
        return "data"
    return "rewrapped" if "detach" not in source and _REWRAPS.search(source) else "detach"  # `torch.tensor(loss)`


def rewrapped(tape: Tape, op: RecordedOp) -> Dropped | None:
    """Whether the op makes a tensor of numbers that were read from another one: ``torch.tensor(h.item())``, NumPy and back."""
    if op.note == "wraps a graph":
        return Dropped(op, "list")
    is_fresh = op.name in _FRESH
    if is_fresh and _READ_AND_WRAPPED.search(_source(op)):
        return Dropped(op, "rewrapped")
    if not (is_fresh or not op.reads or op.unknown):
        return None
    readers = [one for one in tape.ops if one.index <= op.index and one.name in _NUMBERS and any(use.requires_grad for use in one.reads)]
    if is_fresh or not op.reads:
        return Dropped(op, "rewrapped") if readers and (is_fresh or _REWRAPS.search(_source(op))) else None
    unread = [one for one in readers if not _is_read(tape, one)]
    return Dropped(unread[-1], "rewrapped") if unread else None


def _is_read(tape: Tape, reader: RecordedOp) -> bool:
    return any(parent is reader for op in tape.since(reader.index + 1) for parent in op.parents)


def _source(op: RecordedOp) -> str:
    return op.line.location.source if op.line is not None else ""


def gradient_switch(op: RecordedOp) -> tuple[Location, Location] | None:
    """(the ``with torch.no_grad():`` or the decorator, the line in it) of the innermost of the user's calls that has one."""
    for line in op.calls:
        tree = tree_of(line.file)
        if tree is None:
            continue
        around = list(enclosing(tree, line.line))
        for statement in reversed(around):
            if isinstance(statement, (ast.With, ast.AsyncWith)):
                for item in statement.items:
                    if any(name in ast.unparse(item.context_expr) for name in _CONTEXTS):
                        return location(line.file, item.context_expr.lineno, line.function), line.location
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for decorator in statement.decorator_list:
                    if any(name in ast.unparse(decorator) for name in _CONTEXTS):
                        return location(line.file, decorator.lineno, line.function), line.location
    return _global_switch(op) or _reentrant(op)


def _reentrant(op: RecordedOp) -> tuple[Location, Location] | None:
    """A reentrant checkpoint runs its function without gradients; where no input requires one, so does its output."""
    found = next((line.location for line in op.calls if re.search(r"\bcheckpoint(?:_sequential)?\(", line.location.source)), None)
    return None if found is None else (found, found)


def _global_switch(op: RecordedOp) -> tuple[Location, Location] | None:
    """``torch.set_grad_enabled(False)`` as a statement of its own, before the op."""
    for line in op.calls:
        tree = tree_of(line.file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Expr) and "set_grad_enabled(False)" in ast.unparse(node) and node.lineno <= line.line:
                return location(line.file, node.lineno, line.function), line.location
    return None
