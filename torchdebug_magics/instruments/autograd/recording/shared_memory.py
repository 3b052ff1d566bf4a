"""Writes that no op makes: into memory that NumPy, or another library, shares with a tensor."""

from __future__ import annotations

import ast
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.from_text.statement_slices import simple_statements
from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp
from torchdebug_magics.probing.lines import Line
from torchdebug_magics.probing.source.call_sites import tree_of
from torchdebug_magics.probing.tensors import tensors_in

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.recording.tape import Tape, Use

__all__ = ["Kept", "SharedMemory"]

_MOST_TENSORS = 16
_MOST_BYTES = 1 << 20
_AT_EACH_OP_BYTES = 1 << 16


@dataclass
class Kept:
    """What a tensor held when it was last looked at."""

    storage: weakref.ref[torch.UntypedStorage]
    use: Use
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]
    values: torch.Tensor
    since: int
    """The index of the first op after the look."""


@dataclass
class SharedMemory:
    """Copies of small tensors that others can write: those that NumPy shares, and what is detached from a graph."""

    _kept: dict[int, Kept] = field(default_factory=dict)
    """By the number of the storage."""

    def meet(self, tape: Tape, op: RecordedOp, given: Any) -> None:
        """An op of a graph is about to read its arguments."""
        if not op.in_backward and not op.in_optimizer and op.grad_enabled and any(one.requires_grad for one in op.reads):
            for tensor, use in zip(tensors_in(given), op.reads, strict=False):
                if not use.memory or tensor.device.type != "cpu":
                    continue  # nobody else writes there
                if op.name == "detach" or not (use.requires_grad or tensor.untyped_storage().resizable()):
                    self._keep(tape, tensor, use)

    def _keep(self, tape: Tape, tensor: torch.Tensor, use: Use) -> None:
        if use.memory in self._kept or len(self._kept) >= _MOST_TENSORS or not use.memory or tensor.nbytes > _MOST_BYTES:
            return
        with _disable_current_modes(), torch.no_grad():
            values = tensor.detach().clone()
        layout = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        self._kept[use.memory] = Kept(weakref.ref(tensor.untyped_storage()), use, layout, values, tape.count)

    def changed(self, tape: Tape, calls: tuple[Line, ...], *, is_last: bool) -> tuple[RecordedOp, Kept] | None:
        """The write that no op has made, as one between the last op and the calls that run now; None where there is none."""
        for number, kept in list(self._kept.items()):
            storage = kept.storage()
            if storage is None:
                del self._kept[number]
                continue
            if not is_last and kept.values.nbytes > _AT_EACH_OP_BYTES:
                continue
            with _disable_current_modes(), torch.no_grad():
                now = torch.empty(0, dtype=kept.values.dtype).set_(storage, *kept.layout)
                if torch.equal(now, kept.values) or bool(kept.values.isnan().any()):
                    continue
                if any(one.memory == number for op in tape.since(kept.since) for one in op.writes):
                    kept.values, kept.since = now.clone(), tape.count
                    continue
            del self._kept[number]
            return _write(tape, kept.use, _line_between(tape.ops[-1].calls if tape.ops else (), calls)), kept
        return None


def _write(tape: Tape, use: Use, line: Line | None) -> RecordedOp:
    return RecordedOp(
        index=tape.count, name="numpy", line=line, module=None, module_type="", grad_enabled=True, inference=False, in_backward=False,
        in_optimizer=False, reads=(), writes=(use,), moved=(use.version,),
    )  # fmt: skip


def _line_between(before: tuple[Line, ...], after: tuple[Line, ...]) -> Line | None:
    """The statement between two lines of the innermost function that both stand in: one that assigns to a part of something, or calls."""
    for line in after:
        last = next((one for one in before if (one.file, one.function) == (line.file, line.function)), None)
        tree = tree_of(line.file)
        if last is None or tree is None:
            continue
        functions = [tree, *(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))]
        statements = [one.statement for function in functions for one in simple_statements(function)]
        within = [one for one in statements if last.line < one.lineno < line.line]
        within.sort(key=lambda one: not _writes_part(one))
        found = next((one for one in within if _writes_part(one) or _is_call(one)), None)
        return line if found is None else Line(line.file, found.lineno, line.function)
    return after[0] if after else None


def _writes_part(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AugAssign) else []
    return any(isinstance(one, ast.Subscript) for one in targets) or (isinstance(statement, ast.AugAssign) and bool(targets))


def _is_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and "zero_grad" not in ast.unparse(statement.value)
