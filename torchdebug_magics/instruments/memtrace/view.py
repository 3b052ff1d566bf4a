"""What a trace of memory shows: the headline, what to change, the line, one picture; all figures and tables fold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torchdebug_magics.format import Format, byte_size, listed, plural, signed
from torchdebug_magics.html.page import Areas, Bars, Block, Code, Facts, Fold, Measure, Meters, Note, Page, Table, Verbatim
from torchdebug_magics.instruments.memtrace.report import Comparison, MemtraceReport, many
from torchdebug_magics.instruments.memtrace.trace import (
    HELD_BEFORE,
    Growth,
    Leading,
    LiveMemory,
    Oom,
    Timeline,
    TraceMark,
    in_code,
    start_of,
)

_SITES: dict[str, Format] = {
    "line": "text", "code": "code", "module": "code", "kind": "text", "phase": "text",
    "still held": "bytes", "allocated": "bytes", "times": "count",
}  # fmt: skip
_HOLDERS: dict[str, Format] = {"variable": "code", "holds": "bytes", "allocated at": "text", "path": "code"}
_ADVICE: dict[str, Format] = {"remedy": "prose", "saves": "bytes", "how": "prose"}
_MARKED: Mapping[str, Callable[[TraceMark], int | None]] = {
    "MA": lambda mark: mark.allocated_bytes,
    "CA": lambda mark: mark.reserved_bytes,
    "NV": lambda mark: mark.driver_bytes,
    "RSS": lambda mark: mark.rss_bytes,
}
_MOST_BARS = 12
_MOST_KINDS = 5
"""In a picture; smaller ones are drawn together."""
_LARGE_BASE = 0.25
"""Of what lies above it: memory from before the cell that would flatten the rest."""
_SEEN_BASE = 0.12
"""How much of that memory is still drawn, as a share of the rest."""
_FEW = 3


def page(report: MemtraceReport | Comparison) -> Page:
    """The headline, the fix, the line and the picture; then everything else, folded."""
    if isinstance(report, Comparison):
        return Page("memtrace", "info", report.title, tuple(_compared(report)))
    found = report.main_finding()
    refused = found if isinstance(found, Oom) and found.kind != "leak" else None
    base = _base(report.timeline)
    scale = f"; the scale begins at {byte_size(base)}" if base else ""
    timeline = _picture(report, f"Torch memory by kind, peak of {byte_size(report.peak_bytes)} marked{scale}")
    others = [Facts(tuple((name, text) for name, text in rows if text)) for rows in report.also_found()]
    blocks: list[Block] = [
        *([Facts(tuple(rows))] if (rows := report.rows()) else []),
        *_excerpt(report, found),
        *(timeline if refused is None else [_bars("Live tensors when the allocation was refused, by kind", refused.by_category)]),
        *[Note(problem, "warn") for problem in report.problems],
        *_path(found),
        *_remedies(report.oom),
        *([Fold("Memory over the cell", tuple(timeline))] if refused is not None and timeline else []),
        *([Fold(f"Also found: {len(others)} more", tuple(others))] if others else []),
        *_marks(report.marks),
        *_holders(report),
        *_peak(report),
        *_sites(report),
        Fold("Details: memory before and after, this process, what was traced", (Facts(report.figures()),)),
    ]
    return Page("memtrace", report.status, report.title, tuple(blocks))


def live_page(snapshot: LiveMemory) -> Page:
    """The gauges as they move."""
    where = "" if snapshot.phase == "other" else f" in the {snapshot.phase}"
    steps = f", step {snapshot.steps_count:,}" if snapshot.steps_count else ""
    said = f"torch tensors {byte_size(snapshot.now_bytes)}{where}{steps}; peak so far {byte_size(snapshot.peak_bytes)}"
    return Page("memtrace", "busy", said, (Meters("", snapshot.gauges),))


def _compared(both: Comparison) -> list[Block]:
    """The same numbers of both, and the pictures on one scale."""
    columns = ("", *both.names, "difference")
    rows = [(name, *sizes, signed(sizes[1] - sizes[0])) for name, sizes in _sizes(both) if any(sizes)]
    drawn = _largest_kinds([report.timeline for report in both.reports])
    top = max(report.peak_bytes for report in both.reports)
    pictures = [
        block
        for name, report in zip(both.names, both.reports, strict=True)
        for block in _picture(report, f"{name}: torch memory, peak {byte_size(report.peak_bytes)}", kinds=drawn, top=top, from_zero=True)
    ]
    verdicts = Facts(tuple((name, report.verdict) for name, report in zip(both.names, both.reports, strict=True)))
    return [
        Table("Side by side", columns, rows, dict.fromkeys(both.names, "bytes"), is_sequence=True),
        *([Fold("Memory over each cell, on one scale", tuple(pictures))] if pictures else []),
        Fold("What each trace found", (verdicts,)),
    ]


def _sizes(both: Comparison) -> Iterator[tuple[str, tuple[int, int]]]:
    first, second = both.reports
    yield "peak", (first.peak_bytes, second.peak_bytes)
    for name in both.categories():
        yield f"at the peak: {many(name)}", (first.peak.by_category.get(name, 0), second.peak.by_category.get(name, 0))
    yield "before the cell", (first.start_bytes, second.start_bytes)
    yield "left by the cell", (first.net_bytes, second.net_bytes)
    growths = [report.growth or report.rerun_growth for report in both.reports]
    grown_bytes = [0 if growth is None else growth.bytes_per_iteration for growth in growths]
    yield "growth each time", (grown_bytes[0], grown_bytes[1])
    yield "peak of the process", (first.rss_peak_bytes or 0, second.rss_peak_bytes or 0)


def _excerpt(report: MemtraceReport, found: Leading | None) -> list[Block]:
    where = None if found is None else found.fix_at
    if where is None or not (report.excerpt or where.source):
        return []
    return [Code(report.excerpt or ((where.line, where.source),), where.line, str(where))]


def _path(found: object) -> list[Block]:
    """The autograd nodes, or the frames, by which a variable leads to the memory."""
    if not isinstance(found, Growth) or start_of(found.holder) == found.holder:
        return []
    steps = found.holder.split(" -> ")
    return [Fold(f"Path from {in_code(found.variable)} to the memory: {plural(len(steps), 'step')}", (Verbatim("\n-> ".join(steps)),))]


def _remedies(oom: Oom | None) -> list[Block]:
    rows = [(one.what, one.saved_bytes, one.how) for one in oom.advice] if oom is not None else []
    table = Table("Remedies here, with what each would save", tuple(_ADVICE), rows, _ADVICE, is_sequence=True)
    return _folded(f"All remedies: {plural(len(rows), 'row')}", table)


def _folded(title: str, table: Table) -> list[Block]:
    """A table of which there is something to show."""
    return [Fold(title, (table,))] if table.rows else []


# What was held -------------------------------------------------------------------------------------------------------------------


def _base(timeline: Timeline) -> int:
    """Where the scale begins: just below what was held throughout from before the cell, where that would flatten the rest."""
    before = min(timeline.categories.get(HELD_BEFORE, (0,)))
    above = max((sum(sizes) for sizes in zip(*timeline.categories.values(), strict=True)), default=0) - before
    return max(0, before - int(_SEEN_BASE * above)) if before > _LARGE_BASE * above else 0


def _largest_kinds(timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """The kinds that are drawn, in their order; where there are many, the small ones are summed up as ``other``."""
    sizes: dict[str, int] = {}
    for timeline in timelines:
        for name, values in timeline.categories.items():
            sizes[name] = max(sizes.get(name, 0), *values)
    if len(sizes) <= _MOST_KINDS:
        return tuple(sizes)
    largest = sorted((name for name in sizes if name != "other"), key=lambda name: -sizes[name])[: _MOST_KINDS - 1]
    return (*(name for name in sizes if name in largest), "other")


def _picture(
    report: MemtraceReport, title: str, *, kinds: tuple[str, ...] = (), top: int | None = None, from_zero: bool = False
) -> list[Block]:
    """`kinds`, `top` and `from_zero` are those of another picture, with which it is compared."""
    timeline = report.timeline
    if not timeline.categories:
        return []
    counted = timeline.counted
    stretches = tuple(
        ("steps only counted" if phase == "other" and counted is not None and first >= counted else phase, first)
        for phase, first in timeline.stretches
    )
    names = kinds or _largest_kinds([timeline])
    nothing = (0,) * len(next(iter(timeline.categories.values())))
    series = {name: timeline.categories.get(name, nothing) for name in names}
    small = [values for name, values in timeline.categories.items() if name not in names]
    if small:
        series["other"] = tuple(map(sum, zip(series["other"], *small, strict=True)))
    marks = tuple(zip((mark.label for mark in report.marks), timeline.marks, strict=True))
    bottom = 0 if from_zero else _base(timeline)
    return [Areas(title, tuple(series.items()), "bytes", "allocations and frees in order", stretches, timeline.peak, marks, top, bottom)]


def _marks(marks: tuple[TraceMark, ...]) -> list[Block]:
    """What each mark saw; of the process's own and the devices', the columns in which there is a number."""
    known = {title: size for title, size in _MARKED.items() if any(size(mark) is not None for mark in marks)}
    before = [None, *(mark.torch_bytes for mark in marks)]
    rows = [
        (
            mark.label,
            mark.phase,
            mark.torch_bytes,
            None if earlier is None else signed(mark.torch_bytes - earlier),
            *(size(mark) for size in known.values()),
        )
        for mark, earlier in zip(marks, before, strict=False)
    ]
    columns = ("mark", "phase", "torch", "change", *known)
    table = Table("Marks", columns, rows, {"torch": "bytes", **dict.fromkeys(known, "bytes")}, is_sequence=True)
    return _folded(f"Marks: {len(rows)}", table)


def _peak(report: MemtraceReport) -> list[Block]:
    peak = report.peak
    if not peak.by_category:
        return []
    where = f", at {peak.location}" if peak.location is not None else ""
    most = ", ".join(f"{many(name)} {byte_size(size)}" for name, size in list(peak.by_category.items())[:_FEW])
    blocks: list[Block] = [_bars(f"By kind, memory from before the cell included{where}", peak.by_category)]
    if peak.by_module:
        blocks.append(_bars("By the module that allocated it, in this cell", peak.by_module))
    return [Fold(f"Held at the peak: {most}", tuple(blocks))]


def _bars(title: str, sizes: Mapping[str, int]) -> Bars:
    sizes = dict(list(sizes.items())[:_MOST_BARS])
    return Bars(title, tuple(sizes), (Measure("bytes", tuple(map(float, sizes.values())), "bytes"),))


def _holders(report: MemtraceReport) -> list[Block]:
    rows = [
        (holder.variable, holder.live_bytes, None if holder.location is None else str(holder.location), holder.path)
        for holder in report.holders
    ]
    table = Table("Memory that is still held, by variable", tuple(_HOLDERS), rows, _HOLDERS)
    most = listed([f"`{holder.variable}` {byte_size(holder.live_bytes)}" for holder in report.holders])
    return _folded(f"Held after the cell: {most}", table)


def _sites(report: MemtraceReport) -> list[Block]:
    rows = [
        (
            None if site.location is None else str(site.location),
            "not traced: compiled code, another thread, or a step that was only counted" if site.location is None else site.location.source,
            site.module or None,
            site.category,
            site.phase,
            site.live_bytes or None,
            site.allocated_bytes,
            site.count,
        )
        for site in report.sites
    ]
    table = Table("Lines that allocated memory, the most still held first", tuple(_SITES), rows, _SITES)
    return _folded(f"Lines that allocated memory: {plural(len(rows), 'row')}", table)
