"""The page of a nanhunt report: headline, fix, line and picture; path, details and layers fold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from torchdebug_magics.format import Format, number, plural, shape, share, sparkline
from torchdebug_magics.html.page import Block, Cell, Chart, Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.instruments.nanhunt.report import LayerRow, LiveNan, NanFinding, NanReport, PathStep, largest, overflow

_MOST_NAMES = 6
"""The number of ops or modules that one row of the path names."""
_PATH: Mapping[str, Format] = {"#": "count", "pass": "text", "ops": "code", "modules": "code", "line": "text", "code": "code"}
_HALF_RANGE = "of fp16 range"
_GROWTH = 1e3
"""Growth of the largest magnitude from which on its chart is shown at once."""
_REPLAYS = {
    "statements": "the statements of the bad step were run again, op by op",
    "module": "the model call of the bad step was run again, op by op",
    "graph": "from the recorded autograd graph; nothing was run again",
}
_REPRODUCED = {
    True: "; reproduced: the loss is the same to the last bit",
    False: "; not reproduced: the loss is different, so the details may not apply to the bad step",
    None: "",
}


class _Column(NamedTuple):
    """A column of the layer table."""

    name: str
    format: Format
    value: Callable[[LayerRow], Cell]


_LAYERS = (
    _Column("module", "code", lambda row: whole_module(row.module)),
    _Column("type", "text", lambda row: row.type),
    _Column("call", "count", lambda row: row.call),
    _Column("shape", "text", lambda row: shape(row.shape)),
    _Column("dtype", "text", lambda row: row.dtype),
    _Column("NaN", "count", lambda row: row.nan_count),
    _Column("+Inf", "count", lambda row: row.posinf_count),
    _Column("-Inf", "count", lambda row: row.neginf_count),
    _Column("min", "number", lambda row: row.min),
    _Column("max", "number", lambda row: row.max),
    _Column("mean magnitude", "number", lambda row: row.mean_abs),
    _Column(_HALF_RANGE, "share", lambda row: row.fp16_share),
    _Column("gradient NaN", "count", lambda row: row.grad_nan_count),
    _Column("gradient Inf", "count", lambda row: row.grad_inf_count),
    _Column("gradient max", "number", lambda row: row.grad_max_abs),
    _Column("gradient mean", "number", lambda row: row.grad_mean_abs),
)
_INFINITIES = frozenset({"+Inf", "-Inf", "gradient Inf"})
"""Columns that are shown together or not at all."""


def page(report: NanReport) -> Page:
    """The whole report."""
    return Page("nanhunt", report.status, report.title, _nothing(report) if report.finding is None else _found(report.finding, report))


def _found(finding: NanFinding, report: NanReport) -> tuple[Block, ...]:
    """What to change and where; then, folded, what a reader may ask next."""
    first, path, layers, rest = first_rows(finding), _path_table(finding), report.layers, report.findings[1:]
    history = _history(report)
    is_telling = finding.has_diverged or _grew(report)
    step = "" if report.replay == "graph" else "step, "
    of_step = "" if report.layers_step is None else f" of step {report.layers_step:,}"
    others = tuple((f"{number}", f"{one.sentence()}. Fix: {one.fix}") for number, one in enumerate(rest, start=2))
    folds: tuple[tuple[str, Iterable[Block]], ...] = (
        (f"{path.caption}: {plural(len(path.rows), 'line')}", [replace(path, caption="In the order of execution")] if finding.path else ()),
        (f"Details: elements, {step}how it was found", [Facts(further_rows(finding, report))]),
        (plural(len(rest), "more finding"), [Facts(others)] if rest else ()),
        ("History: largest magnitude in each backward pass", () if is_telling else history),
        (f"Layers: {plural(len(layers), 'module call')}{of_step}", [_layer_table(report)] if layers else ()),
    )
    return (
        *([Facts(first)] if first else []),
        *_code(finding),
        *(history if is_telling else ()),
        *_notes(report),
        *(Fold(title, tuple(blocks)) for title, blocks in folds if blocks),
    )


def _nothing(report: NanReport) -> tuple[Block, ...]:
    """What was checked, and the layers where they were requested."""
    history = _history(report)
    subjects = "the loss, the gradients and the outputs" if report.forward_count else "the loss and all gradients"
    if not report.backward_count:
        subjects = "the gradients" if report.steps_count and not report.forward_count else "the outputs"
    checked = "; ".join(filter(None, (subjects, largest(report))))
    has_checked = report.backward_count or report.steps_count or report.forward_count
    return (
        *([Facts((("checked", checked),))] if has_checked else []),
        *([_layer_table(report)] if report.layers else []),
        *_notes(report),
        *([Fold("History: largest magnitude in each backward pass", history)] if history else []),
    )


def live_page(snapshot: LiveNan) -> Page:
    """One line and a sparkline, while the cell runs."""
    parts = [snapshot.phase, f"step {snapshot.steps_count:,}"]
    if snapshot.loss is not None:
        parts.append(f"loss {number(snapshot.loss)}")
    if snapshot.steps_per_s is not None:
        parts.append(f"{snapshot.steps_per_s:,.3g} steps per second")
    if snapshot.overflow_steps_count:
        parts.append(f"{snapshot.overflow_steps_count:,} skipped by the GradScaler")
    bars = f"{sparkline(snapshot.history)} {number(float(snapshot.history[-1]))}" if snapshot.history else ""
    return Page(
        "nanhunt", "busy", " · ".join(parts), (Facts((("largest magnitude in the loss and all gradients", bars),)),) if bars else ()
    )


def _code(finding: NanFinding) -> tuple[Code, ...]:
    location = finding.location
    if location is None or not (finding.excerpt or location.source):
        return ()
    underlined = finding.underlined if finding.excerpt else None
    return (Code(finding.excerpt or ((location.line, location.source),), location.line, str(location), underlined),)


def _notes(report: NanReport) -> tuple[Note, ...]:
    skipped = overflow(report)
    why = "scaled gradients overflowed, so the scaler lowered its scale and left the weights unchanged"
    return (*([Note(f"{skipped}: {why}. This is expected.")] if skipped else []), *(Note(problem, "warn") for problem in report.problems))


def _grew(report: NanReport) -> bool:
    """Whether the history explains the finding: the magnitude grew without a pause."""
    finite = [value for value in report.history if 0 < value < math.inf]
    return len(finite) > 1 and max(finite) == finite[-1] >= _GROWTH * finite[0]


def _history(report: NanReport) -> tuple[Chart, ...]:
    values = report.history
    if len(values) < 2:  # noqa: PLR2004 - one point is no line
        return ()
    first = max(0, report.backward_count - len(values))
    return (Chart("Largest magnitude in the loss and all gradients, log scale", values, "backward pass", "magnitude", first),)


def _layer_table(report: NanReport) -> Table:
    """Every module call of the replayed step, in the order of the calls; the bad ones are marked."""
    step = "" if report.layers_step is None else f" in step {report.layers_step:,}"
    dtypes = {row.dtype for row in report.layers}
    columns = [column for column in _LAYERS if _says_something(column, report.layers)]
    infinities = "" if _has_infinities(report.layers) else ", no inf"
    what = "Outputs and gradients" if any(column.name.startswith("gradient") for column in columns) else "Outputs"
    return Table(
        f"{what} of every module call{step}" + (f", all {dtypes.pop()}" if len(dtypes) == 1 else "") + infinities,
        tuple(column.name for column in columns),
        tuple(tuple(column.value(row) for column in columns) for row in report.layers),
        {column.name: column.format for column in columns},
        frozenset(position for position, row in enumerate(report.layers) if _is_bad(row, report.finding)),
    )


def _says_something(column: _Column, rows: tuple[LayerRow, ...]) -> bool:
    """Whether a column differs from row to row, and applies to these rows."""
    values = {column.value(row) for row in rows}
    if column.name == _HALF_RANGE and not any(row.dtype == "float16" for row in rows):
        return False
    if column.name == "dtype":
        return len(values) > 1
    if column.name in _INFINITIES:
        return values != {None} and _has_infinities(rows)
    return values != ({1} if column.name == "call" else {None})


def _has_infinities(rows: tuple[LayerRow, ...]) -> bool:
    return any(row.posinf_count or row.neginf_count or row.grad_inf_count for row in rows)


def _path_table(finding: NanFinding) -> Table:
    """The path to where the value surfaced, a row for each line of code in each pass."""
    groups = [tuple(steps) for _, steps in groupby(finding.path, key=lambda step: (step.location, step.phase == "backward"))]
    # A tensor that was non-finite before any op has a row of its own.
    before: list[tuple[Cell, ...]] = [("before", _source(finding), None, None, None)] if finding.is_given else []
    rows = [*before, *map(_path_row, groups)]
    return Table(
        f"Path from {_source(finding)} to {sink(finding) or 'where it surfaced'}",
        tuple(_PATH),
        tuple((position, *row) for position, row in enumerate(rows, start=1)),
        _PATH,
        frozenset({0}),
        is_sequence=True,
    )


def _source(finding: NanFinding) -> str:
    if finding.is_given:
        return f"{'input' if finding.phase == 'data' else 'parameter'} {finding.tensor}"
    return f"`{finding.op}`" if finding.op else "the source op"


def _path_row(steps: tuple[PathStep, ...]) -> tuple[Cell, ...]:
    location = steps[0].location
    modules = list(dict.fromkeys(whole_module(step.module) for step in steps if step.module is not None))
    return (
        "backward" if steps[0].phase == "backward" else "forward",
        _some([step.op for step in steps]),
        _some(modules) or None,
        None if location is None else str(location),
        None if location is None else location.source,
    )


def _some(names: list[str]) -> str:
    """The first and the last, where there are too many to read."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    half = _MOST_NAMES // 2
    return f"{', '.join(names[:half])}, … ({len(names) - 2 * half} more) …, {', '.join(names[-half:])}"


def _is_bad(row: LayerRow, finding: NanFinding | None) -> bool:
    """Whether the output is bad, or the gradient of a finding in backward: a bad loss makes all gradients bad."""
    outputs = (row.nan_count, row.posinf_count, row.neginf_count)
    gradients = (row.grad_nan_count, row.grad_inf_count) if finding is not None and finding.phase == "backward" else ()
    return any((*outputs, *gradients))


# Names of ops, modules and tensors are code, and stand between backticks.
def first_rows(finding: NanFinding) -> tuple[tuple[str, str], ...]:
    """The fix, the reason, and the values: what is read first."""
    return _known(
        ("fix", finding.fix),
        ("why", finding.explanation),
        ("where", "" if finding.is_given else ", ".join(filter(None, finding.details()))),  # the reason names the rows
        ("weights", finding.weights.removeprefix("weights ")),
        ("again", _again(finding)),
    )


def _again(finding: NanFinding) -> str:
    """The later steps with the same finding; how often it came where no optimizer counts steps."""
    steps = dict.fromkeys(step for step in finding.again if step != finding.step)
    if not steps:
        return f"{plural(len(finding.again), 'more time')}" if finding.again else ""
    return f"in {'steps' if len(steps) > 1 else 'step'} {', '.join(map(str, steps))}"


def further_rows(finding: NanFinding, report: NanReport) -> tuple[tuple[str, str], ...]:
    """Everything else that is known."""
    is_graph = report.replay == "graph"
    done = f"{plural(finding.step, 'completed optimizer step')} and {plural(finding.backward, 'backward pass', 'es')}"
    strings = any(isinstance(value, str) for value in finding.operands)
    operands = [f"a tensor of {value}" if isinstance(value, str) else number(value) for value in finding.operands]
    return _known(
        ("kind", _kind(finding)),
        ("rows", finding.rows_text if finding.is_given else ""),
        ("first bad element", f"[{', '.join(map(str, finding.index))}]" if finding.index else ""),
        ("operands", ", ".join(operands) if strings else ""),
        ("bad elements", _bad(finding)),
        ("module", "" if is_graph else _module(finding)),
        ("surfaced in", "" if is_graph else sink(finding)),
        ("when", "" if is_graph else f"after {done} in this cell"),
        ("how it was found", _REPLAYS.get(report.replay, "the bad step was not run again") + _REPRODUCED[report.reproduced]),
    )


def _known(*rows: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in rows if value)


def whole_module(path: str) -> str:
    """A module path, or ``"(root)"`` for the empty one."""
    return path or "(root)"


def sink(finding: NanFinding) -> str:
    """Where the non-finite value surfaced."""
    kind, name = finding.sink.kind, finding.sink.name
    # What stands for a name is plain words.
    shown = name if name.startswith(("a ", "an ", "of ")) else f"`{name}`"
    if kind == "gradient":
        return f"the gradient of {shown}" if name else "a gradient"
    return f"`{name}`" if kind == "tensor" else kind and f"the {kind}"


def _kind(finding: NanFinding) -> str:
    if finding.averaging is not None:
        return ""
    kind = "NaN" if finding.kind == "nan" else "inf"
    return f"{kind}, and NaN by the time it surfaced" if (kind, finding.sink_kind) == ("inf", "nan") else kind


def _module(finding: NanFinding) -> str:
    if finding.module is None:
        return ""
    model = f" of `{finding.model}`" if finding.model else ""
    call = f", call {finding.call} in that step" if finding.call else ""
    return f"{f'`{finding.module}`' if finding.module else 'the root'}{model}{call}"


def _bad(finding: NanFinding) -> str:
    if not finding.element_count:
        return ""
    if not finding.shape:
        return f"the only one, of type {finding.dtype}" if finding.dtype else "the only one"
    amount = f"{finding.bad_count:,} of {finding.element_count:,} ({share(finding.bad_count / finding.element_count)})"
    return f"{amount}, in a tensor of shape {shape(finding.shape)}" + (f" and type {finding.dtype}" if finding.dtype else "")
