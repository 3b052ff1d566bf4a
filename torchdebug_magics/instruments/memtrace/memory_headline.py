"""The headline of a trace: what happened and where, in at most 90 characters before the line of code that it quotes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, capitalised, count, plural
from torchdebug_magics.instruments.memtrace.findings import Cycle, GraphGrowth, Growth, Oom, Undeleted
from torchdebug_magics.instruments.memtrace.held.fixes import as_code, collection
from torchdebug_magics.instruments.memtrace.verdict import WHEN, leading, line_to_change

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.findings import Finding
    from torchdebug_magics.instruments.memtrace.report import MemtraceReport
    from torchdebug_magics.report import Location

__all__ = ["headline", "variable"]

_LONGEST_NAME = 26
_LONGEST = 90
_BETWEEN = " · "
_TIMES = re.compile(r" \([\d,]+ so far\)$")
"""What a long headline can do without: the facts have it, too."""


def headline(report: MemtraceReport) -> str:
    """The finding that matters most, or the peak and what became of it."""
    found = leading(report)
    if found is None:
        return _stopped(report) if report.interrupts else _peak(report)
    what = f"each run of this cell adds {_more(found)}" if found is report.rerun_growth else _what(found)
    where = line_to_change(found)
    place = "" if where is None else str(where).partition(" in ")[0]
    short = _TIMES.sub("", what)
    guarded = [f"stopped by guard: {text}" for text in (what, short)] if report.interrupts else []
    fitting = (text for text in (*guarded, what, short) if len(text) + len(place) + len(_BETWEEN) <= _LONGEST)
    return capitalised(next(fitting, short)) + _at(where, place)


def variable(path: str) -> str:
    """The collection or variable at the start of a path, as it is written in code; the end of a long one."""
    name = as_code(collection(path))
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _what(found: Finding) -> str:
    match found:
        case Oom():
            asked = f"{byte_size(found.asked_bytes)} refused" if found.asked_bytes else "memory refused"
            return f"out of memory: {asked} {_when_refused(found)}"
        case Cycle():
            return f"{byte_size(found.freed_bytes)} stayed in reference cycles until Python's collector ran"
        case Growth():
            return _grows(found)
        case GraphGrowth():
            nodes = plural(found.nodes_per_iteration, "node")
            name = f"`{variable(found.holder)}`" if found.holder else "a variable"
            return f"{name} keeps each iteration's graph (+{nodes} each)"
        case Undeleted():
            size = byte_size(found.live_bytes)
            of_error = f"{size} of the failed call stay allocated while its error is handled"
            return f"`del {found.name}` freed none of its {size}" if found.name else of_error


def _grows(growth: Growth) -> str:
    size, times = byte_size(growth.bytes_per_iteration), f"({growth.iterations_count:,} so far)"
    name = f"`{variable(growth.holder)}`" if growth.holder else ""
    if growth.what == "workers":
        return f"DataLoader workers copy {size} of {name or 'the dataset'} each iteration"
    if growth.what == "profiler":
        return f"the profiler keeps {size} of events each iteration {times}"
    if growth.what == "objects":
        return f"{name or 'the process'} grows by {size} of objects each iteration {times}"
    if growth.keeps_graph and name:
        return f"{name} keeps each iteration's graph (+{size} each)"
    return f"{name or 'memory'} grows by {size} each iteration {times}"


def _when_refused(oom: Oom) -> str:
    if oom.kind == "fragmentation":
        return f"though {byte_size(oom.unused_reserved_bytes)} are reserved and unused"
    if oom.kind == "handled error":
        return "while an error is handled"
    if oom.kind == "leak":
        return f"in iteration {oom.iteration:,}, after steady growth"
    if oom.iteration > 1:
        return f"in iteration {oom.iteration:,}"
    return "in the first iteration" if oom.iteration else "in a single allocation"


def _more(growth: Growth) -> str:
    size = byte_size(growth.bytes_per_iteration)
    return f"{size} to `{variable(growth.holder)}`" if growth.holder else f"{size} that no known variable holds"


def _at(location: Location | None, place: str) -> str:
    if location is None:
        return ""
    return f"{_BETWEEN}{place}" + (f": `{location.source}`" if location.source else "")


def _stopped(report: MemtraceReport) -> str:
    last = report.interrupts[-1]
    return f"Stopped by guard at {byte_size(last.used_bytes)} of {byte_size(last.limit_bytes)} ({last.whose})"


def _peak(report: MemtraceReport) -> str:
    what = _outcome(report)
    if report.is_light:
        peak = "Peak not known" if report.rss_peak_bytes is None else f"Process peak {byte_size(report.rss_peak_bytes)}"
        return f"{peak}; {what}"
    is_old = report.peak_bytes <= report.start_bytes
    peak = f"Peak {byte_size(report.peak_bytes)}{' at the start of the cell' if is_old else WHEN[report.peak.phase]}"
    where = None if is_old else report.peak.location
    place = "" if where is None else f"{_BETWEEN}{str(where).partition(' in ')[0]}"
    fits = len(f"{peak}{place}; {what}") <= _LONGEST  # the verdict, and the table of the peak, have the place, too
    return f"{peak}{place if fits else ''}; {what}"


def _outcome(report: MemtraceReport) -> str:
    if report.unnamed_bytes:
        return f"{byte_size(report.unnamed_bytes)} left that no variable leads to"
    if report.unseen_loop is not None:
        return "growth not checked: no steps"
    if report.process_grown_bytes:
        return f"the process grew by {byte_size(report.process_grown_bytes)}"
    if report.steps_count > 1 or report.collects:
        return f"only `{report.collects}` grows" if report.collects else f"no growth over {count(report.steps_count)} steps"
    if report.net_bytes == 0:
        return "all memory was released"
    return f"{byte_size(abs(report.net_bytes))} {'still held' if report.net_bytes > 0 else 'less than before'}"
