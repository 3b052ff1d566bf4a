"""Named values of a finding, worded for readers who do not know torch's internals.

Names of ops, modules and tensors are code, and stand between backticks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, shape, share

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import Finding, NanReport

__all__ = ["first_rows", "further_rows", "sink", "whole_module"]

_REPLAYS = {
    "statements": "the statements of the bad step were run again, op by op",
    "module": "the model call of the bad step was run again, op by op",
    "graph": "from the recorded autograd graph; nothing was run again",
}
_UNREPLAYED = "the bad step was not run again"


def first_rows(finding: Finding) -> tuple[tuple[str, str], ...]:
    """The fix, the reason, and the values: what is read first."""
    is_given = finding.phase in {"data", "parameter"}  # the reason names the rows
    return _known(
        ("fix", finding.fix),
        ("why", finding.explanation),
        ("where", "" if is_given else ", ".join(filter(None, finding.details()))),
        ("weights", finding.weights.removeprefix("weights ")),
        ("again", _again(finding)),
    )


def _again(finding: Finding) -> str:
    """The later steps with the same finding; how often it came where no optimizer counts steps."""
    steps = dict.fromkeys(step for step in finding.again if step != finding.step)
    if not steps:
        return f"{plural(len(finding.again), 'more time')}" if finding.again else ""
    return f"in {'steps' if len(steps) > 1 else 'step'} {', '.join(map(str, steps))}"


def further_rows(finding: Finding, report: NanReport) -> tuple[tuple[str, str], ...]:
    """Everything else that is known."""
    is_graph = report.replay == "graph"
    strings = any(isinstance(value, str) for value in finding.operands)
    return _known(
        ("kind", _kind(finding)),
        ("rows", finding.rows_text if finding.phase in {"data", "parameter"} else ""),
        ("first bad element", f"[{', '.join(map(str, finding.index))}]" if finding.index else ""),
        ("operands", _operands(finding) if strings else ""),
        ("bad elements", _bad(finding)),
        ("module", "" if is_graph else _module(finding)),
        ("surfaced in", "" if is_graph else sink(finding)),
        ("when", "" if is_graph else _when(finding)),
        ("how it was found", _replay(report)),
    )


def _known(*rows: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in rows if value)


def whole_module(path: str) -> str:
    """A module path, or ``"(root)"`` for the empty one."""
    return path or "(root)"


def sink(finding: Finding) -> str:
    """Where the non-finite value surfaced."""
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
    if finding.averaging is not None:
        return ""
    kind = "NaN" if finding.kind == "nan" else "inf"
    return f"{kind}, and NaN by the time it surfaced" if (kind, finding.sink_kind) == ("inf", "nan") else kind


def _when(finding: Finding) -> str:
    return f"after {plural(finding.step, 'completed optimizer step')} and {plural(finding.backward, 'backward pass', 'es')} in this cell"


def _module(finding: Finding) -> str:
    if finding.module is None:
        return ""
    model = f" of `{finding.model}`" if finding.model else ""
    call = f", call {finding.call} in that step" if finding.call else ""
    return f"{f'`{finding.module}`' if finding.module else 'the root'}{model}{call}"


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
            return f"{said}; reproduced: the loss is the same to the last bit"
        case False:
            return f"{said}; not reproduced: the loss is different, so the details may not apply to the bad step"
        case None:
            return said
