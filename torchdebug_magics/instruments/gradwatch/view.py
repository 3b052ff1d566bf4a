"""The page of a gradwatch report: the fix, the code, the heatmap of modules and steps; in folds, the curves and a row for each module."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchdebug_magics.format import capitalised, listed, number, plural, sparkline
from torchdebug_magics.html.page import Block, Chart, Code, Facts, Fold, Heatmap, Note, Page, Table
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradReport, Values

_COLUMNS = ("module", "type", "parameters", "norm", "largest norm", "update / weight", "zeros")
_FEW = 3
_FIRST_ROWS = 20
"""Modules in the heatmap that is not folded."""


def page(report: GradReport) -> Page:
    """The finding, the heatmap of gradient norms, and the rest in folds."""
    blocks: list[Block] = [] if report.finding is None else _finding(report.finding)
    blocks += [Facts(tuple(("but", doubt) for doubt in report.doubts))] if report.doubts else []
    if report.untrained and report.finding is None:
        blocks.append(Facts((("not trained", f"{listed(report.untrained)}: frozen, or without a gradient"),)))
    if report.rows and report.steps_count >= _FEW:
        blocks.append(_first_heatmap(report))
    blocks += [Note(problem, "warn") for problem in report.problems]
    blocks += [Fold(f"Also: {capitalised(finding.title())}", tuple(_finding(finding))) for finding in report.findings[1:]]
    if report.rows:
        blocks += _curves(report)
        blocks.append(Fold(f"Modules: {plural(len(report.rows), 'row')}", (_table(report),)))
    return Page("gradwatch", report.status, report.title, tuple(blocks))


def live_page(report: GradReport) -> Page:
    """While the cell runs: text and coloured cells, which cost next to nothing to draw."""
    losses, totals = [[value for value in values if value is not None] for values in (report.losses, report.totals)]
    parts = [f"step {report.steps_count - 1:,}" if report.steps_count else "waiting for the first optimizer step"]
    parts += [f"loss {number(losses[-1])}"] if losses and not math.isnan(losses[-1]) else []
    parts += [f"learning rate {number(float(report.learning_rate))}"] if report.learning_rate is not None else []
    blocks: list[Block] = [Note(capitalised(report.finding.headline), "warn")] if report.finding is not None else []
    blocks += [Facts((("gradient norm", f"{sparkline(totals)} {number(totals[-1])}"),))] if totals else []
    blocks += [_first_heatmap(report, is_quick=True)] if report.norms else []
    return Page("gradwatch", "busy", capitalised(" · ".join(parts)), tuple(blocks))


def _finding(finding: GradFinding) -> list[Block]:
    modules = listed([module or "(model)" for module in finding.modules]) if len(finding.modules) > 1 else ""
    rows = (("fix", finding.fix), ("why", finding.explanation), ("modules", modules))
    line = finding.location.line if finding.location is not None else None
    return [Facts(tuple((name, text) for name, text in rows if text)), *([Code(finding.excerpt, line)] if finding.excerpt else [])]


def _curves(report: GradReport) -> list[Block]:
    if report.steps_count < _FEW:
        return []
    curves: list[Block] = []
    width = "step" if report.steps_per_value == 1 else f"{plural(report.steps_per_value, 'step')} each"
    for title, values, label in (("Loss", report.losses, "loss"), ("Norm of all gradients", report.totals, "norm")):
        known = [value for value in values if value is not None]
        if len(known) >= _FEW or label == "norm":
            drawn = tuple(math.nan if value is None else value for value in values)
            curves.append(Chart(title, drawn, width, label, log=label == "norm" or all(value > 0 for value in known)))
    all_norms = [_heatmap("Gradient norm by module", report, report.norms)] if len(report.norms) > _FIRST_ROWS else []
    by_module = (
        *all_norms,
        _heatmap("Update norm / weight norm by module", report, report.ratios),
        _heatmap("Share of zero gradients by module", report, report.zeros, log=False),
    )
    return [
        Fold("Loss and gradient norm by step" if len(curves) > 1 else "Gradient norm by step", tuple(curves)),
        Fold("Updates and zeros by module", by_module),
    ]


def _first_heatmap(report: GradReport, *, is_quick: bool = False) -> Heatmap:
    """The gradient norms of at most `_FIRST_ROWS` modules, evenly chosen: the heatmap ends on the first screen."""
    names, last = list(report.norms), len(report.norms) - 1
    if last < _FIRST_ROWS:
        return _heatmap("Gradient norm by module", report, report.norms, is_quick=is_quick)
    chosen = [names[round(at * last / (_FIRST_ROWS - 1))] for at in range(_FIRST_ROWS)]
    title = f"Gradient norm by module ({_FIRST_ROWS} of {plural(len(names), 'module')}, evenly chosen)"
    return _heatmap(title, report, {name: report.norms[name] for name in chosen}, is_quick=is_quick)


def _heatmap(title: str, report: GradReport, values: dict[str, Values], **how: bool) -> Heatmap:
    return Heatmap(title, tuple((name or "(model)", tuple(row)) for name, row in values.items()), "step", report.steps_per_value, **how)


def _table(report: GradReport) -> Table:
    concerned: Sequence[str] = () if report.finding is None else report.finding.modules or (report.finding.module or "-",)
    rows = [
        (row.module or "(model)", row.type, row.parameters_count, row.norm_median, row.norm_max, row.ratio_median, row.zero_share)
        for row in report.rows
    ]
    marked = frozenset(at for at, one in enumerate(report.rows) if one.module in concerned)
    formats = {"parameters": "count", "norm": "number", "largest norm": "number", "update / weight": "number", "zeros": "share"}
    return Table("Modules (medians of the last 64 steps)", _COLUMNS, rows, formats, marked)  # type: ignore[arg-type]
