"""What a stepzero report shows: the verdict, what moved, what did not, and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size
from torchdebug_magics.html.page import Facts, Note, Page, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.stepzero.report import ParameterRow, StepzeroReport

__all__ = ["page"]

_MOVED: dict[str, Format] = {"distance": "number", "of its norm": "share", "in learning rates": "number"}


def page(report: StepzeroReport) -> Page:
    """The whole report."""
    blocks: list[Block] = [Note(problem) for problem in report.problems]
    if report.unmoved:
        rows = [(row.parameter, row.why) for row in report.unmoved]
        blocks.append(Table("Never moved", ("parameter", "why"), rows, {"parameter": "code", "why": "prose"}))
    if report.moved:
        blocks.append(_moved(report.moved))
    if report.buffers:
        changed = [(row.buffer, row.distance) for row in report.buffers]
        blocks.append(Table("Buffers that changed", ("buffer", "distance"), changed, {"buffer": "code", "distance": "number"}))
    if report.data:
        words = {True: "changed", False: "the same", None: "-"}
        data = [(row.data, words[row.changed], row.digest) for row in report.data]
        blocks.append(Table("Data", ("data", "since step zero", "digest"), data, {"data": "code", "digest": "code"}))
    if report.action == "compared":
        shared = f", and {byte_size(report.shared_bytes)} shared with the model" if report.shared_bytes else ""
        blocks.append(Facts((("step zero holds", f"{byte_size(report.held_bytes)}{shared}"), ("restore", "`%stepzero --restore`"))))
    return Page("stepzero", _status(report), report.verdict, tuple(blocks))


def _moved(rows: Sequence[ParameterRow]) -> Table:
    cells = [(row.parameter, row.distance, row.relative, row.learning_rates, row.why) for row in rows]
    marked = frozenset(place for place, row in enumerate(rows) if row.why)
    return Table("Moved", ("parameter", *_MOVED, "note"), cells, {"parameter": "code", "note": "prose", **_MOVED}, marked=marked)


def _status(report: StepzeroReport) -> Status:
    if report.action != "compared":
        return "good"
    return "warn" if report.moved_though_frozen or report.unexpected else "info" if not report.moved else "good"
