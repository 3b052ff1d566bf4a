"""``%nanhunt loss``: the birth read from the graph of a tensor that already exists. No replay, no hooks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import number, plural, shape
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, value_at
from torchdebug_magics.instruments.nanhunt.causes.op_table import Diagnosis
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import name_in_a_model
from torchdebug_magics.instruments.nanhunt.finding import kind_word, marked, surfaced
from torchdebug_magics.instruments.nanhunt.report import NanFinding, NanReport, Phase, Sink
from torchdebug_magics.probing.graphs import saved_by, upstream
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.tensors import INF, NAN, dense, is_bad, kind_of

_SINK = "this tensor"
_UNKNOWN = "a recorded graph holds neither modules nor lines: put `%%nanhunt` above the cell that computes the tensor"
_FREED = "backward() has freed the tensors that this graph saved: run `%nanhunt` before backward()"
_UNSEEN = "this kind of tensor has no values that can be read"
_RESULTS = ("result", "output")
_OWN = (*_RESULTS, "indices", "logsumexp", "log_sumexp", "philox", "rng", "save_")
"""How the names of saved tensors begin that the op itself made."""
_PUTS_INFINITIES = frozenset({"masked_fill", "masked_scatter", "where", "constant_pad_nd", "copy_slices", "index_put", "fill"})
"""An infinity from these was written down by somebody, or came in by another way."""


def examine(_: CellContext, *tensors: object, **_of_a_session: object) -> NanReport | None:
    """Examine tensors before ``backward()`` frees their graph; the options of the cell magic have no effect."""
    if not tensors:
        return None
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            msg = f"%nanhunt examines tensors, not {type(tensor).__name__}: write `%nanhunt loss`"
            raise TorchDebugError(msg)
    reports = [_examined(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    findings = tuple(finding for report in reports for finding in report.findings)
    found = f"NaN or inf in {len(findings)} of {len(reports)} tensors" if findings else f"No NaN or inf in {len(reports)} tensors"
    return NanReport(
        findings=findings,
        problems=tuple(dict.fromkeys(problem for report in reports for problem in report.problems)),
        sentence=" | ".join(report.sentence for report in reports),
        headline=reports[0].headline or reports[0].sentence if len(reports) == 1 else found,
        replay="graph" if findings else "",
    )


def _examined(tensor: torch.Tensor) -> NanReport:
    with RandomState.kept():  # a checkpoint makes what it saved anew
        graph = SavedGraph(tensor)
    if not kind_of(tensor):
        return _nothing(tensor, graph)
    finding, origin = _finding(None if graph.is_freed else graph.first_bad(), tensor)
    headline = f"{'NaN' if finding.sink_kind == 'nan' else 'Inf'} in {_SINK}, {origin}"
    return NanReport(
        findings=(finding,),
        problems=(_FREED, _UNKNOWN) if graph.is_freed else (_UNKNOWN,),
        sentence=" · ".join(filter(None, (headline, *finding.details()))),
        headline=headline,
    )


def _nothing(tensor: torch.Tensor, graph: SavedGraph) -> NanReport:
    numbers = dense(tensor)
    hides = numbers is None and tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()) and not tensor._is_zerotensor()
    if hides and not tensor.is_quantized:
        return NanReport(sentence=f"Nothing was checked: {_UNSEEN}", problems=(_UNSEEN,))
    op_count = sum(not hasattr(node, "variable") for node in graph.nodes)
    value = f" ({number(float(numbers))})" if numbers is not None and numbers.numel() == 1 and not numbers.is_complex() else ""
    return NanReport(sentence=f"No NaN or inf in this tensor{value}; its graph has {plural(op_count, 'op')}")


def _finding(suspect: Suspect | None, sink: torch.Tensor) -> tuple[NanFinding, str]:
    """Of a tensor of the graph, or of `sink` itself where what its graph saved is finite; with where it comes from, in words."""
    phase: Phase = "forward"
    name: str | None = None
    if suspect is None or suspect.tensor is sink:
        suspect = Suspect(sink)
        explanation, origin = "the tensors that its graph saved are finite", "source op not identified"
        fix = "rerun the cell that makes this tensor with `%%nanhunt` above it"
        if sink.grad_fn is None:
            phase, name, explanation, origin = "data", _SINK, "this tensor was not computed by a recorded graph", "which has no graph"
    elif suspect.op is None:
        phase, role = ("parameter", "parameter") if suspect.is_leaf else ("data", "input")
        of_shape = f"of shape {shape(tuple(suspect.tensor.shape))}"
        known = name_in_a_model(suspect.tensor)
        name, article = known or f"a tensor {of_shape}", "a" if suspect.is_leaf else "an"
        origin = f"from {role} {known}" if known else f"from {article} {role} {of_shape}"
        explanation, fix = f"{name} was non-finite before it entered the graph", "check where it is computed or loaded"
    else:
        origin, explanation = f"from {suspect.op}", f"`{suspect.op}` is the first op of the graph with a non-finite result"
        fix = f"check the inputs of `{suspect.op}`"
    bad, cause = suspect.tensor, Diagnosis(None, explanation, fix)
    seen = {"op": suspect.op, "tensor": name, "sink_kind": kind_word(sink), "weights": ""}
    finding = marked(surfaced(bad, phase, Sink("tensor", _SINK), None, Context(step=0, backward=0), cause, **seen), bad.detach())
    values = tuple(value_at(operand.detach(), finding.index, bad) for operand in suspect.operands if operand.dtype is not torch.bool)
    return replace(finding, operands=values), origin


@dataclass(frozen=True)
class Suspect:
    """A bad tensor of the graph with nothing bad known before it."""

    tensor: torch.Tensor
    operands: tuple[torch.Tensor, ...] = ()
    op: str | None = None
    """What made it; None where it came into the graph from outside."""
    is_leaf: bool = False
    """Whether gradients are collected for it, as for a parameter."""
    order: int = 0


class SavedGraph:
    """Everything upstream of one tensor. Reads, and changes nothing."""

    def __init__(self, sink: torch.Tensor) -> None:
        # Each after all that it takes from: autograd numbers its nodes as they are made.
        self.nodes = sorted(upstream([sink.grad_fn]), key=lambda node: -1 if hasattr(node, "variable") else node._sequence_nr())
        self._sink = sink
        read = {node: _saved(node) for node in self.nodes}
        self._saved = {node: saved for node, (saved, _) in read.items()}
        self.is_freed = any(freed for _, freed in read.values())
        """Whether a backward() has dropped what some node saved."""
        self._values: dict[tuple[Any, int], torch.Tensor] = {}
        """What left a node by one of its outputs, where anyone kept it."""
        for node, saved in self._saved.items():
            for tensor in saved.values():
                if tensor.grad_fn is not None:
                    self._values.setdefault((tensor.grad_fn, tensor.output_nr), tensor)
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                self._values[node, 0] = variable
            elif (node, 0) not in self._values and (again := _again(node, saved)) is not None:
                self._values[node, 0] = again

    def first_bad(self) -> Suspect | None:
        """Where the bad numbers of the sink come from: back along values that are bad, or that nobody kept, past none that is finite."""
        found: dict[Any, Suspect | None] = {}
        for order, node in enumerate(self.nodes):
            before = [
                suspect
                for maker, number in node.next_functions
                if maker is not None and (suspect := found.get(maker)) and not self._is_finite(maker, number)
            ]
            before += self._entering(node, order)
            # A NaN before an infinity, which may have done no harm; then the order of the run.
            first = min(before, key=lambda one: (not kind_of(one.tensor) & NAN, one.order), default=None)
            found[node] = self._own(node, order) if first is None else first
        return found.get(self._sink.grad_fn)

    def _is_finite(self, node: Any, number: int) -> bool:
        value = self._values.get((node, number))
        return value is not None and not is_bad(value)

    def _entering(self, node: Any, order: int) -> list[Suspect]:
        """Bad numbers from outside the graph. Nobody differentiates them, so only a node that saved them knows them."""
        return [
            Suspect(tensor, order=order)
            for name, tensor in self._saved[node].items()
            if tensor.grad_fn is None and not tensor.requires_grad and not name.startswith(_OWN) and "mask" not in name and is_bad(tensor)
        ]

    def _own(self, node: Any, order: int) -> Suspect | None:
        bad = next((value for value in self._made(node) if is_bad(value)), None)
        if bad is None:
            return None
        if hasattr(node, "variable"):
            return Suspect(bad, is_leaf=True, order=order)
        name = _op(node.name())
        if name in _PUTS_INFINITIES and kind_of(bad) == INF:
            return None
        operands = tuple(tensor for key, tensor in self._saved[node].items() if not key.startswith((*_OWN, "mask")))
        return Suspect(bad, operands, name, order=order)

    def _made(self, node: Any) -> list[torch.Tensor]:
        outputs = [self._values[node, number] for number in range(len(node._input_metadata)) if (node, number) in self._values]
        return outputs + [tensor for name, tensor in self._saved[node].items() if name.startswith(_RESULTS)]


def _saved(node: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """What a node saved, by name, and whether any of it was freed. ``saved_tensors`` is what a Function of the user's has."""
    tensors: dict[str, torch.Tensor] = {}
    freed = False
    for name, held in saved_by(node, packed=True):
        if isinstance(held, str):  # freed, or overwritten since
            freed |= "freed" in held
        # A plain number of the formula, such as the inf of `x * inf`, was made by no op.
        elif held.dim() or held.grad_fn is not None or held.requires_grad:
            tensors.setdefault(name.removeprefix("_saved_"), held)
    return tensors, freed


def _again(node: Any, saved: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The result of an op that takes nothing but tensors, computed once more where its node saved them all and they are finite."""
    name, inputs = _op(node.name()), [saved[key] for key in ("self", "other") if key in saved]
    overload: Any = getattr(getattr(torch.ops.aten, name, None), "Tensor" if "other" in saved else "default", None)
    takes = [] if overload is None else [str(argument.type) for argument in overload._schema.arguments]
    if not inputs or takes != ["Tensor"] * len(inputs) or any(map(is_bad, inputs)):
        return None
    with torch.no_grad():
        result = overload(*inputs)
    return result if isinstance(result, torch.Tensor) else None


def _op(node: str) -> str:
    """``LogSoftmaxBackward0`` -> ``_log_softmax``: the ATen op behind a node's name, as far as ATen has one of a like name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", re.sub(r"Backward\d*$", "", node)).lower()
    for name in (f"_{words}", f"{words}_forward", words):
        if hasattr(torch.ops.aten, name):
            return name
    return words
