"""What a memclean report shows: the verdict, what was freed, and what is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size
from torchdebug_magics.html.page import Facts, Note, Page, Table

if TYPE_CHECKING:
    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.memclean.report import MemcleanReport

__all__ = ["page"]

_HELD: dict[str, Format] = {"holds": "bytes", "frees alone": "bytes", "what": "prose", "costs": "prose", "also held by": "prose"}
_FREED: dict[str, Format] = {"freed": "bytes", "process became smaller by": "bytes"}


def page(report: MemcleanReport) -> Page:
    """The whole report."""
    blocks: list[Block] = [Note(problem) for problem in report.problems]
    if report.freed:
        rows = tuple((one.name, one.freed_bytes, one.rss_bytes) for one in report.freed)
        blocks.append(Table("Freed", ("what", *_FREED), rows, _FREED, is_sequence=True))
    if report.holdings:
        caption = "Still held" if report.asked else "Held by the notebook"
        rows_held = tuple(
            (one.name, one.what, ", ".join(one.devices), one.held_bytes, one.alone_bytes, one.cost, ", ".join(one.others))
            for one in report.holdings
        )
        blocks.append(Table(caption, ("name", "what", "device", *_ordered()), rows_held, _HELD))
    facts = [("all of it together", byte_size(report.together_bytes))] if len(report.holdings) > 1 else []
    facts += [(f"`--free {part}`", byte_size(size)) for part, size in report.by_part.items() if size and len(report.holdings) > 1]
    cycle = f" (`{report.cycle}`)" if report.cycle else ""
    facts += [("`--free cycles`", f"{byte_size(report.cycles_bytes)}{cycle}")] if report.cycles_bytes else []
    facts += [("`--free heap`", f"{byte_size(report.heap_bytes)}, of this process")] if report.heap_bytes else []
    if report.cache_bytes:
        kept = "kept by PyTorch to reuse, and not lost: the next tensor takes it; `--free cache` helps other processes alone"
        facts.append(("GPU cache", f"{byte_size(report.cache_bytes)}, {kept}"))
    blocks.append(Facts((*facts, ("the process (RSS)", byte_size(report.rss_bytes)))))
    status: Status = "good" if report.asked or not report.together_bytes else "info"
    return Page("memclean", status, report.verdict, tuple(blocks))


def _ordered() -> tuple[str, ...]:
    return ("holds", "frees alone", "costs", "also held by")
