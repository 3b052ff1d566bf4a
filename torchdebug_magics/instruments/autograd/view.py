"""What an autograd report shows: the verdict, the fix, the lines concerned; of a loss, what it reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import capitalised, listed, plural, share
from torchdebug_magics.html.page import Bars, Code, Facts, Fold, Measure, Note, Page, Table
from torchdebug_magics.instruments.autograd.report import AutogradReport, GraphReport

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.autograd.report import Finding, LiveAutograd
    from torchdebug_magics.report import Location

__all__ = ["live_page", "page"]


def page(report: AutogradReport | GraphReport) -> Page:
    """The verdict first."""
    return _of_loss(report) if isinstance(report, GraphReport) else _of_cell(report)


def live_page(snapshot: LiveAutograd) -> Page:
    """While the cell runs."""
    how = "recording" if snapshot.is_recording else "watching"
    steps = f"{plural(snapshot.backward_count, 'backward pass', 'es')}, {plural(snapshot.steps_count, 'optimizer step')}"
    return Page("autograd", "busy", f"{how.capitalize()}: {steps}")


def _of_cell(report: AutogradReport) -> Page:
    blocks: list[Block] = []
    if report.finding is not None:
        blocks += _finding(report.finding)
    if len(report.findings) > 1:
        blocks.append(Fold(f"{plural(len(report.findings) - 1, 'more finding')}", tuple(_more(one) for one in report.findings[1:])))
    blocks += [Note(problem, "warn") for problem in report.problems]
    status: Status = "good" if report.finding is None else "warn" if report.finding.is_hint else "bad"
    status = "info" if status == "good" and (report.raised or not report.backward_count) else status
    return Page("autograd", status, capitalised(report.verdict), tuple(blocks))


def _finding(finding: Finding) -> list[Block]:
    rows = (
        ("fix", finding.fix),
        ("saved" if finding.writer_op else "op", _at(finding.saved_at)),
        ("first backward", _at(finding.first_backward_at)),
        ("shared part", _at(finding.shared_from)),
        ("module", finding.module or ""),
        ("parameters", listed(finding.parameters) if len(finding.parameters) > 1 else ""),
        ("gradient error", share(finding.error_ratio) if finding.error_ratio is not None else ""),
        ("why", finding.explanation),
    )
    blocks: list[Block] = [Facts(tuple((name, text) for name, text in rows if text))]
    if finding.excerpt:
        blocks.append(Code(finding.excerpt, finding.location.line if finding.location is not None else None))
    return blocks


def _more(finding: Finding) -> Block:
    return Facts(
        tuple((name, text) for name, text in (("fix", finding.fix), ("why", finding.explanation)) if text), capitalised(finding.sentence())
    )


def _at(where: Location | None) -> str:
    if where is None:
        return ""
    return f"{where}: `{where.source}`" if where.source else str(where)


def _of_loss(report: GraphReport) -> Page:
    blocks: list[Block] = []
    if report.cuts:
        rows = [(one.op, one.module, _at(one.location)) for one in report.cuts]
        blocks.append(Table("Where the graph is cut", ("op", "module", "line"), rows, {"line": "code"}))
    if report.modules:
        blocks.append(_picture(report))
    if report.reaches:
        rows_of = [
            (one.name, "reached" if one.reached else "frozen" if one.is_frozen else "not reached", one.path_length, one.grad_norm)
            for one in report.reaches
        ]
        marked = frozenset(place for place, one in enumerate(report.reaches) if not one.reached and not one.is_frozen)
        formats = {"nodes to the loss": "count", "gradient norm": "number"}
        blocks.append(
            Table("Parameters", ("parameter", "state", "nodes to the loss", "gradient norm"), rows_of, formats, marked)  # type: ignore[arg-type]
        )
    blocks += [Note(problem, "warn") for problem in report.problems]
    missed = any(not one.reached and not one.is_frozen for one in report.reaches)
    status: Status = "bad" if report.found else "warn" if missed else "good" if report.reaches else "info"
    return Page("autograd", status, capitalised(report.verdict), tuple(blocks))


def _picture(report: GraphReport) -> Block:
    """Modules as bars, in the order from the input to the loss."""
    labels = tuple(one.module or "outside modules" for one in report.modules)
    measures = (
        Measure("saved for backward", tuple(float(one.saved_bytes) for one in report.modules), "bytes"),
        Measure("graph nodes", tuple(float(one.nodes_count) for one in report.modules), "count"),
        Measure("parameters reached", tuple(float(one.reached_count) for one in report.modules), "count"),
    )
    return Bars("The graph by module", labels, measures)
