"""What a nanhunt report shows: the verdict, the fix, the line, the facts; then how it got there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, sparkline
from torchdebug_magics.html.page import Chart, Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.instruments.nanhunt import facts
from torchdebug_magics.instruments.nanhunt.verdict import overflow

if TYPE_CHECKING:
    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Cell, Status
    from torchdebug_magics.instruments.nanhunt.report import Finding, LayerRow, LiveNan, NanReport

__all__ = ["live_page", "page"]

_LONG_PATH = 8
_OUTPUT: Mapping[str, Format] = {
    "module": "text",
    "type": "text",
    "call": "count",
    "shape": "text",
    "dtype": "text",
    "NaN": "count",
    "+Inf": "count",
    "-Inf": "count",
    "min": "number",
    "max": "number",
    "mean magnitude": "number",
    "of fp16 range": "share",
}
_GRADIENT: Mapping[str, Format] = {
    "gradient NaN": "count",
    "gradient Inf": "count",
    "gradient max": "number",
    "gradient mean": "number",
}
_PATH: Mapping[str, Format] = {"#": "count", "operation": "text", "in": "text", "module": "text", "line": "text", "code": "text"}
_OTHERS: Mapping[str, Format] = {
    "#": "count",
    "step": "count",
    "kind": "text",
    "in": "text",
    "operation or tensor": "text",
    "module": "text",
    "line": "text",
    "fix": "text",
}


def page(report: NanReport) -> Page:
    """The whole report."""
    finding = report.finding
    blocks = (
        *(_finding(finding, report) if finding is not None else ()),
        *([_other_table(report.findings[1:])] if len(report.findings) > 1 else []),
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
    return Page("nanhunt", "info", " · ".join(parts), (Facts((("largest magnitude", bars),)),) if bars else ())


def _status(report: NanReport) -> Status:
    if report.found:
        return "bad"
    if report.problems:
        return "warn"
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
    return (table,) if len(finding.path) <= _LONG_PATH else (Fold(f"{table.caption}: {len(finding.path)} operations", (table,)),)


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
    calls = plural(len(report.layers), "module call")
    return (table,) if report.found else (Fold(f"{table.caption}: {calls}", (table,)),)


def _layer_table(report: NanReport) -> Table:
    """Every module call of the step that was looked at, in the order of the calls; the bad ones marked."""
    with_gradients = any(row.grad_max_abs is not None or row.grad_nan_count is not None for row in report.layers)
    formats = {**_OUTPUT, **_GRADIENT} if with_gradients else dict(_OUTPUT)
    step = "" if report.layers_step is None else f" in step {report.layers_step:,}"
    return Table(
        f"Outputs{' and gradients' if with_gradients else ''} of every module call{step}",
        tuple(formats),
        tuple(_layer(row)[: len(formats)] for row in report.layers),
        formats,
        frozenset(position for position, row in enumerate(report.layers) if _is_bad(row)),
    )


def _path_table(finding: Finding) -> Table:
    """From the birth to where it surfaced."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            position,
            step.op,
            step.phase,
            None if step.module is None else facts.whole_module(step.module),
            None if step.location is None else str(step.location),
            None if step.location is None else step.location.source,
        )
        for position, step in enumerate(finding.path, start=1)
    )
    return Table(f"From the birth to {finding.sink or 'where it surfaced'}", tuple(_PATH), rows, _PATH, frozenset({0}))


def _other_table(findings: tuple[Finding, ...]) -> Table:
    """What was found after the first."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            position,
            found.step,
            facts.kind_name(found),
            found.phase,
            found.op or found.tensor,
            None if found.module is None else facts.whole_module(found.module),
            None if found.location is None else str(found.location),
            found.fix,
        )
        for position, found in enumerate(findings, start=2)
    )
    return Table("Other findings", tuple(_OTHERS), rows, _OTHERS)


def _layer(row: LayerRow) -> tuple[Cell, ...]:
    return (
        facts.whole_module(row.module),
        row.type,
        row.call,
        " x ".join(map(str, row.shape)),
        row.dtype,
        row.nan_count,
        row.posinf_count,
        row.neginf_count,
        row.min,
        row.max,
        row.mean_abs,
        row.fp16_share,
        row.grad_nan_count,
        row.grad_inf_count,
        row.grad_max_abs,
        row.grad_mean_abs,
    )


def _is_bad(row: LayerRow) -> bool:
    counts = (row.nan_count, row.posinf_count, row.neginf_count, row.grad_nan_count, row.grad_inf_count)
    return any(counts)
