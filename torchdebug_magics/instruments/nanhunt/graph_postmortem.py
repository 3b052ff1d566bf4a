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
_UNKNOWN = "a finished graph holds neither modules nor lines: put %%nanhunt above the cell that computes it to get them"
_FREED = "backward() has freed this graph, so what the ops saved is gone: run %nanhunt before backward()"
_UNSEEN = "its numbers cannot be looked at: it is a tensor of a kind that holds none, or hides them"


def examine(*tensors: object, keep_going: bool = False, max_findings: int = 10, layers: bool = False) -> NanReport:
    """Look into tensors, before ``backward()`` frees their graph; the options of the cell magic change nothing here."""
    del keep_going, max_findings, layers
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            msg = f"%nanhunt looks into tensors, not {type(tensor).__name__}: write `%nanhunt loss`"
            raise TorchDebugError(msg)
    reports = [_one(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    findings = tuple(finding for report in reports for finding in report.findings)
    return NanReport(
        found=bool(findings),
        finding=findings[0] if findings else None,
        findings=findings,
        problems=tuple(dict.fromkeys(problem for report in reports for problem in report.problems)),
        sentence=" | ".join(report.sentence for report in reports),
        replay="graph" if findings else "",
    )


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
        return NanReport(sentence=f"Nothing could be looked at: {_UNSEEN}", problems=(_UNSEEN,))
    value = f" ({number(float(numbers))})" if numbers is not None and numbers.numel() == 1 and not numbers.is_complex() else ""
    return NanReport(sentence=f"Nothing non-finite: the tensor is finite{value}; its graph has {plural(graph.op_count, 'op')}")


def _finding(suspect: Suspect, sink: torch.Tensor) -> Finding:
    phase: Phase = "forward" if suspect.op is not None else "parameter" if suspect.is_leaf else "data"
    finding = _of(suspect.tensor, sink, phase)
    if suspect.op is None:
        name = _name(suspect.tensor)
        return replace(finding, tensor=name, explanation=f"{name} was bad before it entered the graph", fix="look at where it comes from")
    values = tuple(_value(one, finding.index, suspect.tensor) for one in suspect.operands if one.dtype is not torch.bool)
    return replace(
        finding,
        op=suspect.op,
        operands=values,
        explanation=f"{suspect.op} is the first op of the graph that is known to have a bad result",
        fix=f"look at what enters {suspect.op}",
    )


def _bare(sink: torch.Tensor) -> Finding:
    """A bad tensor whose graph, if it has one, kept nothing that is bad."""
    has_graph = sink.grad_fn is not None
    return replace(
        _of(sink, sink, "forward" if has_graph else "data"),
        tensor=None if has_graph else _SINK,
        explanation="the ops of its graph kept no number that is bad" if has_graph else "no graph leads to this tensor",
        fix="run the cell that makes this tensor again with %%nanhunt above it",
    )


def _of(tensor: torch.Tensor, sink: torch.Tensor, phase: Phase) -> Finding:
    finding = Finding(
        kind=kind_word(tensor), phase=phase, op=None, module=None, call=None, location=None, step=0, backward=0, sink=_SINK,
        sink_kind=kind_word(sink),
    )  # fmt: skip
    return marked(finding, tensor.detach())


def _name(tensor: torch.Tensor) -> str:
    """As in the `state_dict` of the model that holds it."""
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
    """What is known, and nothing of steps, layers or lines."""
    origin = {
        "parameter": f"it comes from a parameter that is bad itself: {finding.tensor}",
        "data": f"it comes from an input that is bad itself: {finding.tensor}" if finding.tensor != _SINK else "no graph leads to it",
    }.get(finding.phase, f"the first bad result is that of {finding.op}" if finding.op else "which op made it is not known")
    return " · ".join(part for part in (_head(finding), origin, *finding.details()) if part)


def _head(finding: Finding) -> str:
    return f"{'NaN' if finding.sink_kind == 'nan' else 'Inf'} in {_SINK}"
