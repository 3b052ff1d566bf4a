"""The page of a stepzero report: the parameters that moved, and folds with those that did not, buffers, data and memory."""

from __future__ import annotations

from torchdebug_magics.format import Format, plural
from torchdebug_magics.html.page import Block, Facts, Fold, Note, Page, Status, Table
from torchdebug_magics.instruments.stepzero.report import StepzeroReport

_MOVED: dict[str, Format] = {"distance": "number", "of its norm": "share", "in learning rates": "number"}


def page(report: StepzeroReport) -> Page:
    """Lay out the report: the reasons, the parameters that moved, and folds for the rest."""
    file = ((("file", f"`{report.file}`"),)) if report.file and report.action != "dropped" else ()
    rows = (*report.causes, *file) if report.action == "compared" else file
    if report.action == "kept":
        rows = (("elements", report.elements()), *(file or (("step zero", report.memory),)))
    blocks: list[Block] = [Facts(rows)] if rows else []
    blocks += [Note(problem, "warn") for problem in report.problems]
    if report.moved:
        marked = frozenset(place for place, row in enumerate(report.moved) if row.why)
        moved = [(row.parameter, row.distance, row.relative, row.learning_rates, *([row.why] if marked else [])) for row in report.moved]
        columns = ("parameter", *_MOVED, *(["note"] if marked else []))
        formats: dict[str, Format] = {"parameter": "code", "note": "prose", **_MOVED}
        blocks.append(Table("Parameters that moved", columns, moved, formats, marked=marked))
    if report.unmoved:
        unmoved = [(row.parameter, row.why) for row in report.unmoved]
        table = Table("Parameters that never moved", ("parameter", "why"), unmoved, {"parameter": "code", "why": "prose"})
        blocks.append(Fold(f"Never moved: {plural(len(unmoved), 'parameter')}", (table,)))
    if report.buffers:
        changed = [(row.buffer, row.distance) for row in report.buffers]
        table = Table("Buffers that changed", ("buffer", "distance"), changed, {"buffer": "code", "distance": "number"})
        blocks.append(Fold(f"Changed: {plural(len(changed), 'buffer')}", (table,)))
    if report.data:
        words = {True: "changed", False: "unchanged", None: "-"}
        data = [(row.data, words[row.changed], row.digest) for row in report.data]
        table = Table("Data", ("data", "since step zero", "digest"), data, {"data": "code", "digest": "code"})
        blocks.append(Fold(f"Data: {plural(len(data), 'digest')}", (table,)))
    if report.action == "compared":
        memory = Facts((("step zero", report.memory), ("restore", "`%stepzero --restore`")))
        blocks.append(Fold("Details: memory of step zero, how to restore", (memory,)))
    is_odd = bool(report.moved_though_frozen or report.unexpected)
    status: Status = "good" if report.action != "compared" else "warn" if is_odd else "good" if report.moved else "info"
    return Page("stepzero", status, report.title, tuple(blocks))
