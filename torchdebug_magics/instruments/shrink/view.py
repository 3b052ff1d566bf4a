"""The page of a shrink report: what was saved, or why the model was not shrunk; the stacks and the proof are folded."""

from __future__ import annotations

from torchdebug_magics.format import byte_size, count, duration, listed, plural, share
from torchdebug_magics.html.page import Block, Facts, Fold, Note, Page, Status, Table
from torchdebug_magics.instruments.shrink.report import ShrinkReport

_UNDO = ("undo", "`%shrink MODEL --undo`")
_STACKS = ("stack", "layer", "layers before", "kept", "kinds")


def page(report: ShrinkReport) -> Page:
    """Lay out the report: why the model was not shrunk, or what was saved; the stacks and the proof are folded."""
    blocks: list[Block] = [Facts(rows)] if (rows := _summary(report)) else []
    blocks += [Note(problem, "warn") for problem in report.problems]
    if not report.undone:
        blocks.append(Table("Size and cost", ("what", "before", "after", "remaining"), _savings(report), {}, is_sequence=True))
    details: list[Block] = []
    if report.stacks:
        stacks = [
            (stack.path, stack.type, stack.layers_before, "all" if report.undone else ", ".join(map(str, stack.kept)), stack.kinds)
            for stack in report.stacks
        ]
        details.append(Table("Stacks of layers", _STACKS, stacks, {"stack": "code", "layers before": "count", "kinds": "count"}))
    if report.proof:
        details.append(Facts((("proof", f"a forward before and after, on {report.proof}: {report.input}"),)))
    if details:
        title = f"Details: {plural(len(report.stacks), 'stack')} of layers{', the forward that proves it' if report.proof else ''}"
        blocks.append(Fold(title, tuple(details)))
    status: Status = "warn" if report.undone and not report.restored else "good"
    return Page("shrink", status, report.title, tuple(blocks))


def _summary(report: ShrinkReport) -> tuple[tuple[str, str], ...]:
    if report.restored:
        return (("layers", listed([f"`{stack.path}`" for stack in report.stacks])),)
    if report.undone:
        facts = [("why", report.reason), ("error", report.error), ("at", report.location)]
        return tuple((name, text) for name, text in facts if text)
    also = [("also", " · ".join(report.further))] if report.further else []
    return (*also, ("forward", f"runs on {report.proof}"), _UNDO)


def _savings(report: ShrinkReport) -> list[tuple[str, str, str, str]]:
    before, after = report.before, report.after
    sizes = [("parameters", before.parameters, after.parameters, count), ("bytes", before.bytes, after.bytes, byte_size)]
    if before.flops is not None and after.flops is not None:
        sizes.append(("FLOPs of a forward", before.flops, after.flops, count))
    rows = [(what, write(large), write(small), share(small / large) if large else "-") for what, large, small, write in sizes]
    if before.seconds_s and after.seconds_s is not None:
        rows.append(("time of a forward", duration(before.seconds_s), duration(after.seconds_s), share(after.seconds_s / before.seconds_s)))
    return rows
