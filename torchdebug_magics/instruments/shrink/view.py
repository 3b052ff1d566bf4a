"""What a shrink report shows: the verdict, what it saves, and the stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, count, duration, share
from torchdebug_magics.html.page import Facts, Note, Page, Table

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.shrink.report import ShrinkReport

__all__ = ["page"]

_STACKS = ("stack", "layer", "layers before", "kept", "kinds")


def page(report: ShrinkReport) -> Page:
    """The whole report."""
    blocks: list[Block] = [Note(problem) for problem in report.problems]
    if not report.undone:
        blocks.append(Table("Size and cost", ("what", "before", "after", "remaining"), _savings(report), {}, is_sequence=True))
    if report.stacks:
        rows = [
            (stack.path, stack.type, stack.layers_before, "all" if report.undone else ", ".join(map(str, stack.kept)), stack.kinds)
            for stack in report.stacks
        ]
        blocks.append(Table("Stacks of layers", _STACKS, rows, {"stack": "code", "layers before": "count", "kinds": "count"}))
    facts = [("proof", f"a forward before and after, on {report.proof}: {report.input}")] if report.proof else []
    facts += [("error", report.error)] if report.error else []
    facts += [("at", report.location)] if report.location else []
    facts += [] if report.undone else [("undo", "`%shrink MODEL --undo`")]
    blocks += [Facts(tuple(facts))] if facts else []
    status: Status = "warn" if report.undone and not report.restored else "good"
    return Page("shrink", status, report.verdict, tuple(blocks))


def _savings(report: ShrinkReport) -> list[tuple[str, str, str, str]]:
    before, after = report.before, report.after
    sizes = [("parameters", before.parameters, after.parameters, count), ("bytes", before.bytes, after.bytes, byte_size)]
    if before.flops is not None and after.flops is not None:
        sizes.append(("FLOPs of a forward", before.flops, after.flops, count))
    rows = [(what, write(large), write(small), share(small / large) if large else "-") for what, large, small, write in sizes]
    if before.seconds_s and after.seconds_s is not None:
        rows.append(("time of a forward", duration(before.seconds_s), duration(after.seconds_s), share(after.seconds_s / before.seconds_s)))
    return rows
