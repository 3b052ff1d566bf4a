"""Second derivatives that ``autograd.grad()`` returns otherwise than its caller means: sums of several."""

from __future__ import annotations

import ast
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp, walk
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import as_atom, called, expression, nodes
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Edit

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.graph_recorder import GraphRecorder

_PRODUCTS = frozenset({"addmm", "mm", "linear", "matmul"})
_LOOKS = 3
"""At what a line returns."""


class SecondDerivatives:
    """Looks at each call that differentiates what an earlier one has returned."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self.faults: list[AutogradFinding] = []
        self._recorder = recorder
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """(what a call has returned, the id of the input that it belongs to), by the id of the first."""
        self._looks: Counter[Line] = Counter()

    def returned(self, call: Sequence[Any], result: Any) -> None:
        """A call has returned the gradients of outputs with respect to inputs; `call` has both, and the weights of the outputs."""
        line = self._recorder.line_here()
        output, point, weights, gradient = map(_single, (*call, result))
        if line is None or point is None or gradient is None or gradient.layout is not torch.strided or gradient.is_meta:
            return
        if self._is_gradient(output, point) and gradient.numel() > 1 and not self.faults and self._looks[line] < _LOOKS:
            self._looks[line] += 1
            passed = self._computed_from(point)
            with modes_aside(), torch.no_grad():
                count_alike = weights is None or bool((weights == 1).all())  # products of a Hessian and a vector have other weights
                # Columns that meet in no product have no derivatives by two of them.
                meet = any(op.name in _PRODUCTS and any(use.shape == tuple(point.shape) for use in op.reads) for op in passed)
                if output is not None and meet and count_alike and _is_of_columns(output, point) and gradient.count_nonzero():
                    self.faults.append(_mixed(line, is_tensor=output.dim() > 0))
        self._known[id(gradient)] = weakref.ref(gradient), id(point)

    def _is_gradient(self, output: torch.Tensor | None, point: torch.Tensor) -> bool:
        """Whether the output, or what it is a sum or a part of, was returned for the same input."""
        known = [tensor for ref, of in self._known.values() if of == id(point) and (tensor := ref()) is not None]
        makers = {tensor.grad_fn for tensor in known} - {None}
        before = None if output is None else output.grad_fn
        return before is not None and bool(makers & {before, *(node for node, _ in before.next_functions)})

    def _computed_from(self, point: torch.Tensor) -> list[RecordedOp]:
        """The forward ops between an input and what was differentiated."""
        tape = self._recorder.settle()
        consumers, memory = tape.consumers(), tape.numbers.of(point)
        readers = [op for op in tape.ops if op.is_forward and any(use.memory == memory for use in op.reads)]
        return [op for op in walk(readers, lambda op: consumers.get(op.index, ())) if op.is_forward]


def _mixed(line: Line, *, is_tensor: bool) -> AutogradFinding:
    """The second derivatives of all columns at once, or of their sum: what comes back for a column is their sum."""
    statement = statement_at(line.location)
    asking = [call for call in nodes(ast.Call, statement) if called(call) == "grad" and len(call.args) > 1]
    edits: tuple[Edit, ...] = ()
    if len(asking) == 1 and (is_tensor or isinstance(asking[0].args[0], ast.Call)):
        call = asking[0]
        output, point = call.args[0], as_atom(call.args[1])
        if isinstance(output, ast.Call) and called(output) == "sum" and isinstance(output.func, ast.Attribute):
            output = output.args[0] if output.args else output.func.value
        each = f"torch.autograd.grad({as_atom(output)}[:, i].sum(), {point}, create_graph=True)[0][:, i]"
        diagonal = f"torch.stack([{each} for i in range({point}.shape[1])], 1)"
        first = next((node for node in nodes(ast.Subscript, statement) if node.value is call), None)
        edits = exchanging(line.location, call if first is None else first, expression(diagonal if first is not None else f"({diagonal},)"))
    return finding(
        "mixed_derivatives",
        "each of these second derivatives is a sum: all columns are differentiated at once",
        line.location,
        f"`{edits[0].new}`" if edits else "differentiate one column of the gradient at a time, as by `grad[:, 0].sum()`",
        edits=edits,
        explanation="`grad()` returns for column i the sum over all j of the derivatives by the columns i and j",
    )


def _single(value: Any) -> torch.Tensor | None:
    """The tensor, where it is the only one."""
    tensors = list(tensors_in([value]))
    return tensors[0] if len(tensors) == 1 else None


def _is_of_columns(output: torch.Tensor, point: torch.Tensor) -> bool:
    """Whether all columns of a gradient are differentiated, of samples with several each."""
    before = output.grad_fn
    is_whole = tuple(output.shape) == tuple(point.shape) or (output.dim() == 0 and before is not None and before.name().startswith("Sum"))
    return is_whole and point.dim() == 2 and min(point.shape) > 1 and not isinstance(point, torch.nn.Parameter)  # noqa: PLR2004 - samples and columns
