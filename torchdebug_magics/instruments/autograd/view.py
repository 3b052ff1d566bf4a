"""What an autograd report shows: the verdict, the fix, the lines concerned; of a loss, what it reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, capitalised, listed, plural, share
from torchdebug_magics.html.page import Box, Boxes, Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.instruments.autograd.module_boxes import module_boxes
from torchdebug_magics.instruments.autograd.report import AutogradReport, GraphReport

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.autograd.module_boxes import ModuleBox
    from torchdebug_magics.instruments.autograd.report import Cut, Finding, LiveAutograd
    from torchdebug_magics.report import Location

__all__ = ["live_page", "page"]

_CUTS = {
    "detach": "`detach`", "no_grad": "disabled gradients", "lift_fresh": "a copy into a new tensor",
    "_local_scalar_dense": "a copy into Python numbers", "_to_copy": "a cast to integers or bools",
}  # fmt: skip


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
    drawn = module_boxes(report)
    if drawn:
        blocks.append(_picture(report, drawn))
    if report.cuts and not drawn:
        rows = [(one.op, one.module, _at(one.location)) for one in report.cuts]
        blocks.append(Table("Where the graph is cut", ("op", "module", "line"), rows, {"line": "code"}))
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


def _picture(report: GraphReport, drawn: tuple[ModuleBox, ...]) -> Block:
    """From the input at the top to the loss at the bottom."""
    whole = f"{plural(report.nodes_count, 'graph node')}, {byte_size(report.saved_bytes)} saved for backward"
    boxes = [Box(one.path or "before the first parameter", _box_text(one), _box_status(one), tuple(map(_cut, one.cuts))) for one in drawn]
    return Boxes("Modules that the gradient of the loss reaches, from input to loss", (*boxes, Box("loss", whole, "info")))


def _box_status(box: ModuleBox) -> Status:
    if box.missed_count:
        return "warn" if box.reached_count else "bad"
    return "good" if box.reached_count else "info"


def _box_text(box: ModuleBox) -> str:
    trainable = box.reached_count + box.missed_count
    parts = [f"{box.reached_count} of {plural(trainable, 'parameter')} reached" if box.reached_count else ""]
    parts += [f"not reached: {plural(trainable, 'parameter')}" if box.missed_count and not box.reached_count else ""]
    parts += [f"{plural(box.frozen_count, 'parameter')} frozen" if box.frozen_count else ""]
    parts += [f"{byte_size(box.saved_bytes)} saved for backward" if box.saved_bytes else ""]
    return ", ".join(filter(None, parts))


def _cut(cut: Cut) -> str:
    return f"cut by {_CUTS.get(cut.op, f'`{cut.op}`, which has no derivative')} · {_at(cut.location)}"
