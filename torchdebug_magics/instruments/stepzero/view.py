"""The page of a stepzero report: the parameters that moved, and folds with those that did not, buffers, data and memory."""

from __future__ import annotations

from collections.abc import Sequence

from torchdebug_magics.format import Format, plural
from torchdebug_magics.html.page import Block, Facts, Fold, Note, Page, Status, Table
from torchdebug_magics.instruments.stepzero.report import ParameterRow, StepzeroReport

_MOVED: dict[str, Format] = {"distance": "number", "of its norm": "share", "in learning rates": "number"}


def page(report: StepzeroReport) -> Page:
    """Lay out the report: the reasons, the parameters that moved, and folds for the rest."""
    blocks: list[Block] = [Facts(rows)] if (rows := _summary(report)) else []
    blocks += [Note(problem, "warn") for problem in report.problems]
    if report.moved:
        blocks.append(_moved(report.moved))
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
    return Page("stepzero", _status(report), report.title, tuple(blocks))


def _summary(report: StepzeroReport) -> tuple[tuple[str, str], ...]:
    file = [("file", f"`{report.file}`")] if report.file and report.action != "dropped" else []
    if report.action == "compared":
        return (*report.causes, *file)
    if report.action != "kept":
        return tuple(file)
    return (("elements", report.elements()), *(file or [("step zero", report.memory)]))


def _moved(rows: Sequence[ParameterRow]) -> Table:
    marked = frozenset(place for place, row in enumerate(rows) if row.why)
    cells = [(row.parameter, row.distance, row.relative, row.learning_rates, *([row.why] if marked else [])) for row in rows]
    return Table(
        "Parameters that moved",
        ("parameter", *_MOVED, *(["note"] if marked else [])),
        cells,
        {"parameter": "code", "note": "prose", **_MOVED},
        marked=marked,
    )


def _status(report: StepzeroReport) -> Status:
    if report.action != "compared":
        return "good"
    return "warn" if report.moved_though_frozen or report.unexpected else "info" if not report.moved else "good"
