"""``%nanhunt loss``: the birth read from the graph of a tensor that already exists. No replay, no hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import number, plural, shape
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import owner_of
from torchdebug_magics.instruments.nanhunt.finding import kind_word, marked
from torchdebug_magics.instruments.nanhunt.report import Finding, NanReport, Phase
from torchdebug_magics.instruments.nanhunt.saved_graph import SavedGraph, Suspect
from torchdebug_magics.probing.modules import live_modules, parts_of
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.tensors import dense, kind_of

__all__ = ["examine"]

_SINK = "this tensor"
_UNKNOWN = "a recorded graph holds neither modules nor lines: put `%%nanhunt` above the cell that computes the tensor"
_FREED = "backward() has freed the tensors that this graph saved: run `%nanhunt` before backward()"
_UNSEEN = "this kind of tensor has no values that can be read"


def examine(*tensors: object, keep_going: bool = False, max_findings: int = 10, layers: bool = False, anyway: bool = False) -> NanReport:
    """Examine tensors before ``backward()`` frees their graph; the options of the cell magic have no effect."""
    del keep_going, max_findings, layers, anyway
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            msg = f"%nanhunt examines tensors, not {type(tensor).__name__}: write `%nanhunt loss`"
            raise TorchDebugError(msg)
    reports = [_one(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    findings = tuple(finding for report in reports for finding in report.findings)
    return NanReport(
        found=bool(findings),
        finding=findings[0] if findings else None,
        findings=findings,
        problems=tuple(dict.fromkeys(problem for report in reports for problem in report.problems)),
        sentence=" | ".join(report.sentence for report in reports),
        headline=_headline(reports),
        replay="graph" if findings else "",
    )


def _headline(reports: list[NanReport]) -> str:
    """The title: of several tensors, how many are finite."""
    bad = [finding for report in reports for finding in report.findings]
    if len(reports) == 1:
        return f"{_head(bad[0])}, {_origin(bad[0])}" if bad else reports[0].sentence
    return f"NaN or inf in {len(bad)} of {len(reports)} tensors" if bad else f"No NaN or inf in {len(reports)} tensors"


def _one(tensor: torch.Tensor) -> NanReport:
    random = RandomState.take()
    try:
        graph = SavedGraph(tensor)
    finally:
        random.put_back()  # a checkpoint makes what it saved anew
    if not kind_of(tensor):
        return _nothing(tensor, graph)
    suspect = None if graph.is_freed else graph.first_bad()
    problems = (_FREED, _UNKNOWN) if graph.is_freed else (_UNKNOWN,)
    finding = _bare(tensor) if suspect is None or suspect.tensor is tensor else _finding(suspect, tensor)
    return NanReport(found=True, findings=(finding,), problems=problems, sentence=_sentence(finding))


def _nothing(tensor: torch.Tensor, graph: SavedGraph) -> NanReport:
    numbers = dense(tensor)
    hides = numbers is None and tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()) and not tensor._is_zerotensor()
    if hides and not tensor.is_quantized:
        return NanReport(sentence=f"Nothing was checked: {_UNSEEN}", problems=(_UNSEEN,))
    value = f" ({number(float(numbers))})" if numbers is not None and numbers.numel() == 1 and not numbers.is_complex() else ""
    return NanReport(sentence=f"No NaN or inf in this tensor{value}; its graph has {plural(graph.op_count, 'op')}")


def _finding(suspect: Suspect, sink: torch.Tensor) -> Finding:
    phase: Phase = "forward" if suspect.op is not None else "parameter" if suspect.is_leaf else "data"
    finding = _of(suspect.tensor, sink, phase)
    if suspect.op is None:
        name = _name(suspect.tensor)
        return replace(
            finding,
            tensor=name,
            explanation=f"{name} was non-finite before it entered the graph",
            fix="check where it is computed or loaded",
        )
    values = tuple(_value(one, finding.index, suspect.tensor) for one in suspect.operands if one.dtype is not torch.bool)
    return replace(
        finding,
        op=suspect.op,
        operands=values,
        explanation=f"`{suspect.op}` is the first op of the graph with a non-finite result",
        fix=f"check the inputs of `{suspect.op}`",
    )


def _bare(sink: torch.Tensor) -> Finding:
    """A non-finite tensor whose graph, if any, saved only finite tensors."""
    has_graph = sink.grad_fn is not None
    return replace(
        _of(sink, sink, "forward" if has_graph else "data"),
        tensor=None if has_graph else _SINK,
        explanation="the tensors that its graph saved are finite" if has_graph else "this tensor was not computed by a recorded graph",
        fix="rerun the cell that makes this tensor with `%%nanhunt` above it",
    )


def _of(tensor: torch.Tensor, sink: torch.Tensor, phase: Phase) -> Finding:
    finding = Finding(
        kind=kind_word(tensor), phase=phase, op=None, module=None, call=None, location=None, step=0, backward=0, sink=_SINK,
        sink_kind=kind_word(sink),
    )  # fmt: skip
    return marked(finding, tensor.detach())


def _name(tensor: torch.Tensor) -> str:
    """The key in the `state_dict` of the model that holds the tensor."""
    modules = list(live_modules())
    inner = parts_of(modules)
    owner = owner_of(tensor, [module for module in modules if id(module) not in inner])
    return owner[1] if owner is not None else f"a tensor of shape {shape(tuple(tensor.shape))}"


def _value(operand: torch.Tensor, index: tuple[int, ...], like: torch.Tensor) -> Any:
    numbers = dense(operand) if operand.is_floating_point() or operand.is_complex() else operand
    if numbers is None:
        return "a tensor"
    try:
        return numbers.detach().expand(like.shape)[index].item()
    except (RuntimeError, IndexError):
        return "x".join(map(str, operand.shape)) or "scalar"


def _sentence(finding: Finding) -> str:
    """What is known: no step, layer or line."""
    return " · ".join(part for part in (f"{_head(finding)}, {_origin(finding)}", *finding.details()) if part)


def _origin(finding: Finding) -> str:
    match finding.phase:
        case "parameter":
            return f"from {_tensor('parameter', finding)}"
        case "data":
            return "which has no graph" if finding.tensor == _SINK else f"from {_tensor('input', finding)}"
        case _:
            return f"from {finding.op}" if finding.op else "source op not identified"


def _tensor(role: str, finding: Finding) -> str:
    name = finding.tensor or ""
    return f"{'an' if role == 'input' else 'a'} {role}{name.removeprefix('a tensor')}" if name.startswith("a tensor") else f"{role} {name}"


def _head(finding: Finding) -> str:
    return f"{'NaN' if finding.sink_kind == 'nan' else 'Inf'} in {_SINK}"
