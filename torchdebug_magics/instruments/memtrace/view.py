"""What a trace of memory shows: the verdict; what to change; what was held at the peak; which lines and variables hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, plural, share
from torchdebug_magics.html.page import Areas, Bars, Code, Facts, Fold, Measure, Meters, Note, Page, Table
from torchdebug_magics.instruments.memtrace.comparison import Comparison, growth
from torchdebug_magics.instruments.memtrace.figures import change, figures
from torchdebug_magics.instruments.memtrace.verdict import many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.memtrace.findings import Cycle, GraphGrowth, Growth, Oom, Undeleted
    from torchdebug_magics.instruments.memtrace.report import LiveMemory, MemtraceReport, Stretch, Timeline, TraceMark
    from torchdebug_magics.report import Location

__all__ = ["live_page", "page"]

_SITES: dict[str, Format] = {
    "line": "text", "code": "code", "module": "code", "what": "text", "phase": "text",
    "still held": "bytes", "allocated": "bytes", "times": "count",
}  # fmt: skip
_HOLDERS: dict[str, Format] = {"variable": "code", "holds": "bytes", "made at": "text", "path": "code"}
_ADVICE: dict[str, Format] = {"what": "text", "saves": "bytes", "how": "prose"}
_MARKED: Mapping[str, Callable[[TraceMark], int | None]] = {
    "MA": lambda mark: mark.allocated_bytes,
    "CA": lambda mark: mark.reserved_bytes,
    "NV": lambda mark: mark.driver_bytes,
    "RSS": lambda mark: mark.rss_bytes,
}
_MODULES = 12
_BIG_TABLE = 40


def page(report: MemtraceReport | Comparison) -> Page:
    """The whole report."""
    if isinstance(report, Comparison):
        return Page("memtrace", "info", report.verdict, tuple(_compared(report)))
    blocks: list[Block] = [
        *_out_of_memory(report.oom),
        *_cycle(report.kept_by_cycles),
        *_undeleted(report.undeleted),
        *_growth(report.growth, "iteration"),
        *_growth(report.rerun_growth, "run"),
        *_graph_growth(None if report.growth is not None and report.growth.keeps_graph else report.graph_growth),
        *[Note(problem) for problem in report.problems],
        *_picture(report, f"Live torch memory over the cell, by what it is; the peak of {byte_size(report.peak_bytes)} is marked"),
        *_marks(report.marks),
        *_peak(report),
        *_holders(report),
        Facts(figures(report)),
        *_sites(report),
    ]
    return Page("memtrace", _status(report), report.verdict, tuple(blocks))


def live_page(snapshot: LiveMemory) -> Page:
    """The gauges as they move."""
    where = "" if snapshot.phase == "other" else f" in the {snapshot.phase}"
    steps = f", step {snapshot.steps_count:,}" if snapshot.steps_count else ""
    said = f"torch tensors {byte_size(snapshot.now_bytes)}{where}{steps}; peak so far {byte_size(snapshot.peak_bytes)}"
    return Page("memtrace", "busy", said, (Meters("", snapshot.gauges),))


def _compared(both: Comparison) -> list[Block]:
    """The same numbers of both, and the pictures on one scale."""
    columns = ("", *both.names, "difference")
    rows = [(name, *sizes, change(sizes[1] - sizes[0])) for name, sizes in _sizes(both) if any(sizes)]
    drawn = tuple(dict.fromkeys(name for report in both.reports for name in report.timeline.categories))
    top = max(report.peak_bytes for report in both.reports)
    pictures = (
        _picture(report, f"{name}: live torch memory, at most {byte_size(report.peak_bytes)}", categories=drawn, top=top)
        for name, report in zip(both.names, both.reports, strict=True)
    )
    verdicts = Facts(tuple((name, report.verdict) for name, report in zip(both.names, both.reports, strict=True)))
    table = Table("Side by side", columns, rows, dict.fromkeys(both.names, "bytes"), is_sequence=True)
    return [table, *(block for picture in pictures for block in picture), verdicts]


def _sizes(both: Comparison) -> Iterator[tuple[str, tuple[int, int]]]:
    first, second = both.reports
    yield "peak", (first.peak_bytes, second.peak_bytes)
    for name in both.categories():
        yield f"at the peak: {many(name)}", (first.peak.by_category.get(name, 0), second.peak.by_category.get(name, 0))
    yield "before the cell", (first.start_bytes, second.start_bytes)
    yield "left by the cell", (first.net_bytes, second.net_bytes)
    yield "growth each time", (_grown(growth(first)), _grown(growth(second)))
    yield "peak of the process", (first.rss_peak_bytes or 0, second.rss_peak_bytes or 0)


def _grown(found: Growth | None) -> int:
    return 0 if found is None else found.bytes_per_iteration


def _status(report: MemtraceReport) -> Status:
    if report.oom is not None or any(one is not None and one.keeps_graph for one in (report.growth, report.rerun_growth)):
        return "bad"
    if any(one is not None for one in (report.growth, report.rerun_growth, report.graph_growth, report.kept_by_cycles, report.undeleted)):
        return "warn"
    return "good" if report.steps_count > 1 else "info"


# What to change ------------------------------------------------------------------------------------------------------------------


def _growth(growth: Growth | None, each: str) -> list[Block]:
    if growth is None:
        return []
    frees = f" (frees {byte_size(growth.frees_bytes)})" if growth.fix and growth.frees_bytes else ""
    rows = [
        ("fix", f"{growth.fix}{frees}"),
        ("kept by", f"`{growth.holder}`" if growth.holder else "no variable that could be found"),
        ("share", f"{share(growth.share_ratio)} of what the process grew by" if growth.what != "tensors" else ""),
        ("each " + each, byte_size(growth.bytes_per_iteration)),
        ("so far", f"{byte_size(growth.bytes_per_iteration * growth.iterations_count)} in {plural(growth.iterations_count, each)}"),
    ]
    return _facts(rows, growth.kept_at or growth.location)


def _cycle(cycle: Cycle | None) -> list[Block]:
    if cycle is None:
        return []
    rows = (("fix", cycle.fix), ("cycle", f"`{cycle.path}`"), ("made", plural(cycle.count, "time")), ("held", byte_size(cycle.freed_bytes)))
    return _facts(rows, cycle.location)


def _undeleted(found: Undeleted | None) -> list[Block]:
    if found is None:
        return []
    rows = (("fix", found.fix), ("still held by", f"`{found.holder}`"), ("not freed", byte_size(found.live_bytes)))
    return _facts(rows, found.location)


def _graph_growth(growth: GraphGrowth | None) -> list[Block]:
    if growth is None:
        return []
    said = f"{plural(growth.nodes_per_iteration, 'node')}, for {plural(growth.iterations_count, 'iteration')}"
    rows = (("fix", growth.fix), ("graph kept by", f"`{growth.holder}`" if growth.holder else ""), ("each iteration", said))
    return _facts(rows, growth.location)


def _out_of_memory(oom: Oom | None) -> list[Block]:
    if oom is None:
        return []
    rows = [(one.what, one.saved_bytes, one.how) for one in oom.advice]
    return [
        Table("What would help here, and by how much", tuple(_ADVICE), rows, _ADVICE, is_sequence=True),
        *_code(oom.location),
        *_facts([(name, f"`{text}`") for name, text in (("operation", oom.op), ("module", oom.module)) if text], None),
        _bars("What was alive when it was refused", oom.by_category),
    ]


def _facts(rows: Iterable[tuple[str, str]], location: Location | None) -> list[Block]:
    return [Facts(tuple((name, text) for name, text in rows if text)), *_code(location)]


def _code(location: Location | None) -> list[Block]:
    if location is None or not location.source:
        return []
    return [Code(((location.line, location.source),), location.line, str(location))]


# What was held -------------------------------------------------------------------------------------------------------------------


def _picture(report: MemtraceReport, title: str, *, categories: tuple[str, ...] = (), top: int | None = None) -> list[Block]:
    """`categories` and `top` are those of another picture, with which it is compared."""
    timeline = report.timeline
    if not timeline.categories:
        return []
    stretches = tuple((_what_ran(one, timeline), one.first) for one in timeline.stretches)
    nothing = (0,) * len(next(iter(timeline.categories.values())))
    series = tuple((name, timeline.categories.get(name, nothing)) for name in categories or timeline.categories)
    marks = tuple(zip((one.label for one in report.marks), timeline.marks, strict=True))
    return [Areas(title, series, "bytes", "allocations and frees, in their order", stretches, timeline.peak, marks, top)]


def _what_ran(stretch: Stretch, timeline: Timeline) -> str:
    is_counted = timeline.counted is not None and stretch.first >= timeline.counted
    return "steps only counted" if is_counted and stretch.phase == "other" else stretch.phase


def _marks(marks: tuple[TraceMark, ...]) -> list[Block]:
    """What each mark saw; of the process's own and the devices', the columns in which there is a number."""
    if not marks:
        return []
    known = {title: size for title, size in _MARKED.items() if any(size(mark) is not None for mark in marks)}
    before = [None, *(mark.torch_bytes for mark in marks)]
    rows = [
        (
            mark.label,
            mark.phase,
            mark.torch_bytes,
            None if earlier is None else change(mark.torch_bytes - earlier),
            *(size(mark) for size in known.values()),
        )
        for mark, earlier in zip(marks, before, strict=False)
    ]
    columns = ("mark", "phase", "torch", "change", *known)
    return [Table("Marks", columns, rows, {"torch": "bytes", **dict.fromkeys(known, "bytes")}, is_sequence=True)]


def _peak(report: MemtraceReport) -> list[Block]:
    peak = report.peak
    where = f", at {peak.location}" if peak.location is not None else ""
    blocks: list[Block] = [_bars(f"Held at the peak{where}", peak.by_category)] if peak.by_category else []
    if peak.by_module:
        largest = dict(list(peak.by_module.items())[:_MODULES])
        blocks.append(Fold("By the module that made it", (_bars("Of what was made in the cell", largest),)))
    return blocks


def _bars(title: str, sizes: Mapping[str, int]) -> Bars:
    return Bars(title, tuple(sizes), (Measure("bytes", tuple(map(float, sizes.values())), "bytes"),))


def _holders(report: MemtraceReport) -> list[Block]:
    if not report.holders:
        return []
    rows = [(one.variable, one.live_bytes, None if one.location is None else str(one.location), one.path) for one in report.holders]
    return [Table("What outlived the cell, by the variable that holds it", tuple(_HOLDERS), rows, _HOLDERS)]


def _sites(report: MemtraceReport) -> list[Block]:
    rows = [
        (
            None if site.location is None else str(site.location),
            "not seen: compiled, in another thread, or in a step only counted" if site.location is None else site.location.source,
            site.module or None,
            site.category,
            site.phase,
            site.live_bytes or None,
            site.allocated_bytes,
            site.count,
        )
        for site in report.sites
    ]
    table = Table("Lines that allocated: what is still held first", tuple(_SITES), rows, _SITES)
    if len(rows) > _BIG_TABLE:
        return [Fold(f"{plural(len(rows), 'line')} and modules that allocated", (table,))]
    return [table] if rows else []
