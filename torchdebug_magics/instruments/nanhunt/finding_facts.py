"""A finding in named values, worded for someone who does not know torch's internals.

Names of ops, modules and tensors are code, and stand between backticks; all else is plain words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, shape, share

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import Finding, NanReport, Phase

__all__ = ["kind_name", "rows", "sink", "whole_module"]

_PHASES: dict[Phase, str] = {
    "data": "in the input {tensor}",
    "parameter": "in the parameter {tensor}, {since}",
    "forward": "in the forward pass, inside the model",
    "loss": "in the forward pass, outside the model",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's update of {tensor}",
}
_MAKERS: dict[Phase, str] = {
    "forward": ", by `{op}`",
    "loss": ", by `{op}`",
    "backward": ", by the derivative of `{op}`",
    "optimizer": ", by `{op}`",
}
_GRAPH_PHASES: dict[Phase, str] = {
    "data": "in {tensor}, outside the graph",
    "parameter": "in a parameter, {tensor}",
    "forward": "in the forward pass",
}
"""A graph that is walked afterwards knows ops, and neither steps nor modules."""
_REPLAYS = {
    "statements": "the statements of the bad step were run again, operation by operation",
    "module": "the model call of the bad step was run again, operation by operation",
    "graph": "the recorded autograd graph was walked; nothing was run again",
}
_UNREPLAYED = "the bad step was not run again"
_MOST_ROWS = 20
"""As many as a finding keeps."""


def rows(finding: Finding, report: NanReport) -> tuple[tuple[str, str], ...]:
    """Name and value of all that is known."""
    is_graph = report.replay == "graph"
    known = (
        ("what", f"{_kind(finding)}, {_born(finding, is_graph=is_graph)}"),
        ("when", "" if is_graph else _when(finding)),
        ("module", "" if is_graph else _module(finding)),
        ("rows", _rows(finding)),
        ("first bad element", f"[{', '.join(map(str, finding.index))}]" if finding.index else ""),
        ("made from", _operands(finding)),
        ("bad elements", _bad(finding)),
        ("surfaced in", sink(finding)),
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


def sink(finding: Finding) -> str:
    """Where it surfaced."""
    prefix = "gradient of "
    match finding.sink:
        case "" | "gradient":
            return finding.sink and "a gradient"
        case "loss" | "output":
            return f"the {finding.sink}"
        case text if text.startswith(prefix):
            return f"the gradient of {_tensor(text.removeprefix(prefix))}"
        case text:
            return f"`{text}`"


def _tensor(name: str) -> str:
    """A name as code; what stands for one is plain words."""
    return name if name.startswith(("a ", "an ", "of ")) else f"`{name}`"


def _kind(finding: Finding) -> str:
    became = " (NaN by the time it surfaced)" if (finding.kind, finding.sink_kind) == ("inf", "nan") else ""
    return f"{kind_name(finding)}{became}"


def _born(finding: Finding, *, is_graph: bool) -> str:
    if finding.averaging is not None:
        return "from the averaging of gradients over ranks"
    phases = {**_PHASES, **_GRAPH_PHASES} if is_graph else _PHASES
    if finding.phase == "optimizer" and finding.sink.startswith("gradient of "):
        where = "in {sink}, before the optimizer's update"
    else:
        where = phases[finding.phase]
    maker = _MAKERS["backward"] if finding.is_tangent else _MAKERS.get(finding.phase, "") if finding.op else ""
    return f"born {where}{maker}".format(
        since=finding.since.removeprefix("bad "), tensor=_tensor(finding.tensor or ""), op=finding.op, sink=sink(finding)
    )


def _when(finding: Finding) -> str:
    return f"after {plural(finding.step, 'completed optimizer step')} and {plural(finding.backward, 'backward pass', 'es')} in this cell"


def _module(finding: Finding) -> str:
    if finding.module is None:
        return ""
    model = f" of `{finding.model}`" if finding.model else ""
    call = f", call {finding.call} in that step" if finding.call else ""
    return f"{f'`{finding.module}`' if finding.module else 'the root'}{model}{call}"


def _rows(finding: Finding) -> str:
    if not finding.rows:
        return ""
    first, last = finding.rows[0], finding.rows[-1]
    if 1 < len(finding.rows) == next(iter(finding.shape), 0):
        return f"all {len(finding.rows)} (along the first dimension)"
    together = len(finding.rows) > 2 and last - first + 1 == len(finding.rows)  # noqa: PLR2004 - "0 to 1" is no shorter
    said = f"{first} to {last}" if together else ", ".join(map(str, finding.rows))
    return f"{said} (along the first dimension{'; the first 20' if len(finding.rows) == _MOST_ROWS else ''})"


def _operands(finding: Finding) -> str:
    return ", ".join(f"a tensor of {value}" if isinstance(value, str) else number(value) for value in finding.operands)


def _bad(finding: Finding) -> str:
    if not finding.element_count:
        return ""
    if not finding.shape:
        return f"the only one, of type {finding.dtype}" if finding.dtype else "the only one"
    amount = f"{finding.bad_count:,} of {finding.element_count:,} ({share(finding.bad_count / finding.element_count)})"
    return f"{amount}, in a tensor of shape {shape(finding.shape)}" + (f" and type {finding.dtype}" if finding.dtype else "")


def _replay(report: NanReport) -> str:
    said = _REPLAYS.get(report.replay, _UNREPLAYED)
    match report.reproduced:
        case True:
            return f"{said}; reproduced: the loss was the same to the last bit"
        case False:
            return f"{said}; not reproduced: the loss came out different, so take the details with care"
        case None:
            return said
