"""``%nanhunt loss``: the birth read from the graph of a tensor that already exists, by what its nodes saved. No replay, no hooks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import number, plural, shape
from torchdebug_magics.instruments.nanhunt.finding import kind_word, marked
from torchdebug_magics.instruments.nanhunt.report import Finding, NanReport
from torchdebug_magics.probing.tensors import INF, NAN, dense, is_bad, kind_of

__all__ = ["examine"]

_LEAF_SEQUENCE = 1 << 62
_UNKNOWN = "a finished graph holds neither modules nor lines: put %%nanhunt above the cell that computes it to get them"


@dataclass(frozen=True)
class _Suspect:
    node: Any
    tensor: torch.Tensor
    operands: tuple[torch.Tensor, ...]
    leaf: torch.Tensor | None = None
    outside: bool = False
    """Whether the tensor was an input that no op of the graph made."""


def examine(*tensors: object, keep_going: bool = False, max_findings: int = 10, layers: bool = False) -> NanReport:
    """Look into tensors, before ``backward()`` frees their graph; the options of the cell magic change nothing here."""
    del keep_going, max_findings, layers
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            msg = f"%nanhunt looks into tensors, not {type(tensor).__name__}: write `%nanhunt loss`"
            raise TorchDebugError(msg)
    reports = [_one(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    findings = tuple(finding for report in reports for finding in report.findings)
    problems = tuple(dict.fromkeys(problem for report in reports for problem in report.problems))
    sentence = " | ".join(report.sentence for report in reports)
    return NanReport(
        found=bool(findings),
        finding=findings[0] if findings else None,
        findings=findings,
        problems=problems,
        sentence=sentence,
        replay="graph" if findings else "",
    )


def _one(tensor: torch.Tensor) -> NanReport:
    kind = kind_of(tensor)
    nodes = sorted(_nodes(tensor), key=lambda node: node._sequence_nr())
    if not kind:
        value = f" ({number(float(tensor.detach()))})" if tensor.numel() == 1 and not tensor.is_complex() else ""
        return NanReport(sentence=f"Nothing non-finite: the tensor is finite{value}; its graph has {plural(len(nodes), 'op')}")
    freed = any(_is_freed(node) for node in nodes)
    problems = [_UNKNOWN]
    if freed:
        problems.insert(0, "backward() has freed this graph, so what the ops saved is gone: run %nanhunt before backward()")
    suspect = _first(nodes, NAN) or _first(nodes, NAN | INF) if not freed else None
    finding = _finding(suspect, tensor) if suspect is not None else _bare(tensor)
    return NanReport(found=True, findings=(finding,), problems=tuple(problems), sentence=_sentence(finding))


def _nodes(tensor: torch.Tensor) -> Iterator[Any]:
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        if node._sequence_nr() < _LEAF_SEQUENCE:
            yield node


def _saved(node: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                # A plain number of the formula, such as the inf of `x * inf`, was made by no op.
                if isinstance(tensor, torch.Tensor) and not (tensor.dim() == 0 and tensor.grad_fn is None and not tensor.requires_grad):
                    found.setdefault(name.removeprefix("_saved_"), tensor)
    return found


def _is_freed(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError:
                return True
    return False


def _first(nodes: list[Any], kinds: int) -> _Suspect | None:
    """The earliest node that is known to have made something bad: by its own saved result, or by what its user saved."""
    for node in nodes:
        saved = _saved(node)
        again = _again(node, saved)
        if again is not None and kind_of(again) & kinds:
            return _Suspect(node, again, tuple(saved.values()))
        inputs = {name: tensor for name, tensor in saved.items() if not name.startswith(("result", "output", "mask"))}
        for tensor in inputs.values():
            if kind_of(tensor) & kinds:
                return _maker(node, tensor)
        for name, tensor in saved.items():
            if name.startswith(("result", "output")) and kind_of(tensor) & kinds:
                return _Suspect(node, tensor, tuple(inputs.values()))
    return None


_REPEATABLE = frozenset(
    [
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "div",
        "exp",
        "expm1",
        "sub",
        "acos",
        "asin",
        "atanh",
        "erfinv",
        "logit",
        "lgamma",
        "square",
    ]
)


def _again(node: Any, saved: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The result of a simple op, computed once more from finite inputs that its node saved; None where it saved none such."""
    name = _op(node.name())
    inputs = [saved[key] for key in ("self", "other") if key in saved]
    if name not in _REPEATABLE or not inputs or any(is_bad(one) for one in inputs):
        return None
    try:
        with torch.no_grad():
            result = getattr(torch, name)(*inputs)
    except (TypeError, RuntimeError):
        return None
    return result if isinstance(result, torch.Tensor) else None


def _maker(user: Any, tensor: torch.Tensor) -> _Suspect:
    """Who made a saved input: the node of its own graph, or nobody."""
    if tensor.grad_fn is not None:
        return _Suspect(tensor.grad_fn, tensor, tuple(_saved(tensor.grad_fn).values()))
    return _Suspect(user, tensor, (), tensor if tensor.is_leaf and tensor.requires_grad else None, outside=True)


def _finding(suspect: _Suspect, sink: torch.Tensor) -> Finding:
    tensor = suspect.tensor.detach()
    name = None if suspect.outside else _op(suspect.node.name())
    finding = Finding(
        kind=kind_word(tensor),
        phase="parameter" if suspect.leaf is not None else "data" if suspect.outside else "forward",
        op=name,
        module=None,
        call=None,
        location=None,
        step=0,
        backward=0,
        tensor=f"of shape {shape(tuple(tensor.shape))}" if suspect.outside else None,
        fix=f"look at what enters {name}" if name else "look at where this tensor comes from",
        explanation=f"{name} is the first op of the graph whose result is bad" if name else "it was bad before the graph began",
        sink="loss",
        sink_kind=kind_word(sink),
    )
    finding = marked(finding, tensor)
    values = tuple(_value(one, finding.index, tensor) for one in suspect.operands if one.dtype is not torch.bool)
    return replace(finding, operands=values)


def _bare(sink: torch.Tensor) -> Finding:
    """A bad tensor without a graph to look into."""
    return _finding(_Suspect(None, sink.detach(), (), outside=True), sink)


def _value(operand: torch.Tensor, index: tuple[int, ...], like: torch.Tensor) -> Any:
    numbers = dense(operand) if operand.is_floating_point() or operand.is_complex() else operand
    if numbers is None:
        return "a tensor"
    try:
        return numbers.detach().expand(like.shape)[index].item()
    except (RuntimeError, IndexError):
        return "x".join(map(str, operand.shape)) or "scalar"


def _op(node: str) -> str:
    """``LogSoftmaxBackward0`` -> ``_log_softmax``: the ATen op behind a node's name, as far as ATen has one of a like name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", re.sub(r"Backward\d*$", "", node)).lower()
    for name in (f"_{words}", f"{words}_forward", words):
        if hasattr(torch.ops.aten, name):
            return name
    return words


def _sentence(finding: Finding) -> str:
    parts = finding.sentence().split(" · ")[1:]
    return " · ".join(["NaN in this tensor" if finding.sink_kind == "nan" else "Inf in this tensor", *parts])
