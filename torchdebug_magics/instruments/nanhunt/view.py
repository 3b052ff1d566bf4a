"""What a nanhunt report shows: the verdict, the fix, the line, the facts; then how it got there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.format import number, plural, shape, sparkline
from torchdebug_magics.html.page import Chart, Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.instruments.nanhunt import finding_facts as facts
from torchdebug_magics.instruments.nanhunt.verdict import overflow

if TYPE_CHECKING:
    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Cell, Status
    from torchdebug_magics.instruments.nanhunt.report import Finding, LayerRow, LiveNan, NanReport, PathStep

__all__ = ["live_page", "page"]

_LONG_PATH = 8
_MOST_NAMES = 6
"""Of the operations or modules that one row of the path names."""
_PATH: Mapping[str, Format] = {"#": "count", "pass": "text", "operations": "code", "modules": "code", "line": "text", "code": "code"}


class _Column(NamedTuple):
    """A column of the layer table."""

    name: str
    format: Format
    value: Callable[[LayerRow], Cell]


_LAYERS = (
    _Column("module", "code", lambda row: facts.whole_module(row.module)),
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
    _Column("of fp16 range", "share", lambda row: row.fp16_share),
    _Column("gradient NaN", "count", lambda row: row.grad_nan_count),
    _Column("gradient Inf", "count", lambda row: row.grad_inf_count),
    _Column("gradient max", "number", lambda row: row.grad_max_abs),
    _Column("gradient mean", "number", lambda row: row.grad_mean_abs),
)
_INFINITIES = frozenset({"+Inf", "-Inf", "gradient Inf"})
"""Columns that are there together, or not at all."""


def page(report: NanReport) -> Page:
    """The whole report."""
    finding = report.finding
    blocks = (
        *(_finding(finding, report) if finding is not None else ()),
        *_others(report.findings[1:]),
        *_overflow(report),
        *(Note(problem, "warn") for problem in report.problems),
        *_history(report),
        *_layers(report),
    )
    return Page("nanhunt", _status(report), report.verdict, blocks)


def live_page(snapshot: LiveNan) -> Page:
    """One line and a row of bars, for as long as the cell runs."""
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


def _status(report: NanReport) -> Status:
    if report.found:
        return "bad"
    if report.problems:
        return "warn"
    if report.raised:
        return "info"
    return "good" if report.backward_count or report.steps_count or report.forward_count else "info"


def _finding(finding: Finding, report: NanReport) -> tuple[Block, ...]:
    advice = tuple((name, text) for name, text in (("fix", finding.fix), ("why", finding.explanation)) if text)
    return (
        *([Facts(advice)] if advice else []),
        *_code(finding),
        Facts(facts.rows(finding, report)),
        *_path(finding),
    )


def _code(finding: Finding) -> tuple[Code, ...]:
    location = finding.location
    if location is None or not (finding.excerpt or location.source):
        return ()
    return (Code(finding.excerpt or ((location.line, location.source),), location.line, str(location)),)


def _path(finding: Finding) -> tuple[Table | Fold, ...]:
    if not finding.path:
        return ()
    table = _path_table(finding)
    return (table,) if len(table.rows) <= _LONG_PATH else (Fold(f"The way it went: {len(table.rows)} lines", (table,)),)


def _others(findings: tuple[Finding, ...]) -> tuple[Facts, ...]:
    """What was found after the first, each with its own fix."""
    rows = tuple((f"{number}", f"{one.sentence()}. Fix: {one.fix}") for number, one in enumerate(findings, start=2))
    return (Facts(rows, "Other findings"),) if rows else ()


def _overflow(report: NanReport) -> tuple[Note, ...]:
    said = overflow(report)
    why = "scaled gradients overflowed, the scaler lowered its scale and left the weights as they were"
    return (Note(f"{said}: {why}. This is not a fault."),) if said else ()


def _history(report: NanReport) -> tuple[Chart, ...]:
    values = report.history
    if len(values) < 2:  # noqa: PLR2004 - one point is no line
        return ()
    first = max(0, report.backward_count - len(values))
    return (Chart("Largest magnitude in the loss and all gradients", values, "backward pass", "magnitude", first),)


def _layers(report: NanReport) -> tuple[Table | Fold, ...]:
    if not report.layers:
        return ()
    table = _layer_table(report)
    step = "" if report.layers_step is None else f" of step {report.layers_step:,}"
    return (table,) if report.found else (Fold(f"Layers: {plural(len(report.layers), 'module call')}{step}", (table,)),)


def _layer_table(report: NanReport) -> Table:
    """Every module call of the step that was looked at, in the order of the calls; the bad ones marked."""
    step = "" if report.layers_step is None else f" in step {report.layers_step:,}"
    dtypes = {row.dtype for row in report.layers}
    columns = [column for column in _LAYERS if _says_something(column, report.layers)]
    infinities = "" if _has_infinities(report.layers) else ", no infinity"
    what = "Outputs and gradients" if any(column.name.startswith("gradient") for column in columns) else "Outputs"
    return Table(
        f"{what} of every module call{step}" + (f", all {dtypes.pop()}" if len(dtypes) == 1 else "") + infinities,
        tuple(column.name for column in columns),
        tuple(tuple(column.value(row) for column in columns) for row in report.layers),
        {column.name: column.format for column in columns},
        frozenset(position for position, row in enumerate(report.layers) if _is_bad(row, report.finding)),
    )


def _says_something(column: _Column, rows: tuple[LayerRow, ...]) -> bool:
    """Columns that hold nothing, a type that all share, and calls that were each the only one, take room and tell nothing."""
    values = {column.value(row) for row in rows}
    if column.name == "dtype":
        return len(values) > 1
    if column.name in _INFINITIES:
        return values != {None} and _has_infinities(rows)
    return values != ({1} if column.name == "call" else {None})


def _has_infinities(rows: tuple[LayerRow, ...]) -> bool:
    return any(row.posinf_count or row.neginf_count or row.grad_inf_count for row in rows)


def _path_table(finding: Finding) -> Table:
    """From the birth to where it surfaced, a row for each line of code in each pass."""
    groups = [tuple(steps) for _, steps in groupby(finding.path, key=lambda step: (step.location, step.phase == "backward"))]
    rows = [*_origin(finding), *map(_path_row, groups)]
    return Table(
        f"From the birth to {facts.sink(finding) or 'where it surfaced'}",
        tuple(_PATH),
        tuple((position, *row) for position, row in enumerate(rows, start=1)),
        _PATH,
        frozenset({0}),
        is_sequence=True,
    )


def _origin(finding: Finding) -> list[tuple[Cell, ...]]:
    """What was bad before any operation."""
    if finding.phase not in {"data", "parameter"}:
        return []
    return [("before", f"{'input' if finding.phase == 'data' else 'parameter'} {finding.tensor}", None, None, None)]


def _path_row(steps: tuple[PathStep, ...]) -> tuple[Cell, ...]:
    location = steps[0].location
    modules = list(dict.fromkeys(facts.whole_module(step.module) for step in steps if step.module is not None))
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


def _is_bad(row: LayerRow, finding: Finding | None) -> bool:
    """By its output; by its gradient only where the backward is at fault: a bad loss makes all gradients bad."""
    outputs = (row.nan_count, row.posinf_count, row.neginf_count)
    gradients = (row.grad_nan_count, row.grad_inf_count) if finding is not None and finding.phase == "backward" else ()
    return any((*outputs, *gradients))
