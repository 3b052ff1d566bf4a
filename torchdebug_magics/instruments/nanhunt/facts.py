"""A finding in named values, worded for someone who does not know torch's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, shape, share

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import Finding, NanReport, Phase

__all__ = ["kind_name", "rows", "whole_module"]

_PHASES: dict[Phase, str] = {
    "data": "in the input `{tensor}`",
    "parameter": "in the parameter `{tensor}`, before this cell's first step",
    "forward": "in the forward pass, inside the model, by {op}",
    "loss": "in the forward pass, outside the model, by {op}",
    "backward": "in the backward pass, by the derivative of {op}",
    "optimizer": "in the optimizer's update of `{tensor}`",
}
_GRAPH_PHASES: dict[Phase, str] = {
    "data": "in {tensor}, outside the graph",
    "parameter": "in a parameter, {tensor}",
    "forward": "in the forward pass, by {op}",
}
"""Nothing is known of steps and modules."""
_REPLAYS = {
    "statements": "the statements of the bad step were run again, operation by operation",
    "module": "the model call of the bad step was run again, operation by operation",
    "graph": "the recorded autograd graph was walked; nothing was run again",
}
_UNREPLAYED = "the bad step was not run again"


def rows(finding: Finding, report: NanReport) -> tuple[tuple[str, str], ...]:
    """Name and value of all that is known."""
    is_graph = report.replay == "graph"
    phases = {**_PHASES, **_GRAPH_PHASES} if is_graph else _PHASES
    op = f"`{finding.op}`" if finding.op else "an operation that could not be traced"
    where = phases[finding.phase].format(op=op, tensor=finding.tensor)
    known = (
        ("what", f"{_kind(finding)}, born {where}"),
        ("when", "" if is_graph else _when(finding)),
        ("module", "" if is_graph else _module(finding)),
        ("rows", _rows(finding)),
        ("first bad element", _first(finding)),
        ("bad elements", _bad(finding)),
        ("surfaced in", finding.sink),
        ("weights", finding.weights.removeprefix("weights ")),
        ("how it was found", _replay(report)),
    )
    return tuple((name, value) for name, value in known if value)


def kind_name(finding: Finding) -> str:
    """The kind, in full."""
    return "NaN" if finding.kind == "nan" else "infinity"


def whole_module(path: str) -> str:
    """A module path, or a word for the root's empty one."""
    return path or "(root)"


def _kind(finding: Finding) -> str:
    return (
        f"{kind_name(finding)} (NaN by the time it surfaced)" if (finding.kind, finding.sink_kind) == ("inf", "nan") else kind_name(finding)
    )


def _when(finding: Finding) -> str:
    return f"after {plural(finding.step, 'completed optimizer step')} and {plural(finding.backward, 'backward pass', 'es')} in this cell"


def _module(finding: Finding) -> str:
    if finding.module is None:
        return "" if finding.phase in {"data", "parameter", "optimizer"} else "outside every module"
    model = f" of `{finding.model}`" if finding.model else ""
    call = f", call {finding.call} in that step" if finding.call else ""
    return f"{f'`{finding.module}`' if finding.module else 'the root'}{model}{call}"


def _rows(finding: Finding) -> str:
    if not finding.rows:
        return ""
    return f"{', '.join(map(str, finding.rows))} (along the first dimension)"


def _first(finding: Finding) -> str:
    index = f"[{', '.join(map(str, finding.index))}]" if finding.index else ""
    values = ", ".join(value if isinstance(value, str) else number(value) for value in finding.operands)
    made = f"made from {values}" if values else ""
    return ", ".join(part for part in (index, made) if part)


def _bad(finding: Finding) -> str:
    if not finding.element_count:
        return ""
    amount = f"{finding.bad_count:,} of {finding.element_count:,} ({share(finding.bad_count / finding.element_count)})"
    return f"{amount}, in a result of shape {shape(finding.shape)}" + (f" and type {finding.dtype}" if finding.dtype else "")


def _replay(report: NanReport) -> str:
    said = _REPLAYS.get(report.replay, _UNREPLAYED)
    match report.reproduced:
        case True:
            return f"{said}; reproduced: the loss was the same to the last bit"
        case False:
            return f"{said}; not reproduced: the loss came out different, so take the details with care"
        case None:
            return said
