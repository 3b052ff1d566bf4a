"""What a memclean report shows: what is held, the command that frees it, or what was freed."""

from __future__ import annotations

from torchdebug_magics.format import Format, byte_size, plural
from torchdebug_magics.html.page import Block, Facts, Fold, Note, Page, Status, Table
from torchdebug_magics.instruments.memclean.report import MemcleanReport

_HELD: dict[str, Format] = {"holds": "bytes", "frees alone": "bytes", "what": "prose", "costs": "prose", "also held by": "prose"}
_FEW = 5
_FREED: dict[str, Format] = {"freed": "bytes", "process shrank by": "bytes"}


def page(report: MemcleanReport) -> Page:
    """What is held or was freed, the command and its cost, the table; sizes by part fold."""
    freed = tuple((part.name, part.freed_bytes, part.rss_bytes) for part in report.freed if part.freed_bytes or part.rss_bytes > 0)
    blocks: list[Block] = [
        *([Facts(rows)] if (rows := report.rows()) else []),
        *([Table("Freed", ("what", *_FREED), freed, _FREED, is_sequence=True)] if freed else []),
        *[Note(problem, "warn") for problem in report.problems],
    ]
    table = _held(report)
    if table is not None:
        few = report.command and len(table.rows) <= _FEW
        blocks.append(table if few else Fold(f"{table.caption}: {plural(len(table.rows), 'row')}", (table,)))
    blocks.append(Fold("Details: what each command frees, this process", (Facts(tuple(_details(report))),)))
    status: Status = "good" if report.asked or not report.together_bytes else "info"
    return Page("memclean", status, report.title, tuple(blocks))


def _held(report: MemcleanReport) -> Table | None:
    if not report.holdings:
        return None
    rows = tuple(
        (
            holding.name,
            holding.what,
            ", ".join(holding.devices),
            holding.held_bytes,
            holding.alone_bytes,
            holding.cost,
            ", ".join(holding.others),
        )
        for holding in report.holdings
    )
    caption = "Still held by the notebook" if report.asked else "Held by the notebook"
    return Table(caption, ("name", "what", "device", "holds", "frees alone", "costs", "also held by"), rows, _HELD)


def _details(report: MemcleanReport) -> list[tuple[str, str]]:
    rows = [("everything together", byte_size(report.together_bytes))] if len(report.holdings) > 1 else []
    rows += [(f"--free {part}", byte_size(size)) for part, size in report.by_part.items() if size and len(report.holdings) > 1]
    rows += [("--free heap", f"{byte_size(report.heap_bytes)} of this process")] if report.heap_bytes else []
    if report.cache_bytes:
        kept = "kept by PyTorch for reuse, not lost: the next tensor takes it; `--free cache` helps only other processes"
        rows.append(("GPU cache", f"{byte_size(report.cache_bytes)}, {kept}"))
    return [*rows, ("this process (RSS)", byte_size(report.rss_bytes))]
