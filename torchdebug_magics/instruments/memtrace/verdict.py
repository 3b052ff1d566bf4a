"""The verdict of a trace: one full sentence on what to change, or on the peak and what remains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, capitalised, count, plural, share
from torchdebug_magics.instruments.memtrace.findings import Cycle, GraphGrowth, Growth, Oom, Undeleted
from torchdebug_magics.instruments.memtrace.held.leak_fixes import as_code, collection
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.findings import Leading, Phase
    from torchdebug_magics.instruments.memtrace.report import MemtraceReport


_NODE_BYTES = 500
"""About what an autograd node takes."""
FAR_MORE = 10
"""Times the live memory: then one tensor is too large, not the step."""
TOO_LARGE = "shrink this allocation: freeing live tensors would not make room for it"
_BEYOND: Mapping[str, str] = {
    "objects": "Python objects",
    "workers": "pages that DataLoader workers copied",
    "profiler": "profiler events",
}
WHEN: Mapping[Phase, str] = {
    "forward": " in the forward pass",
    "loss": " in the loss",
    "backward": " in the backward pass",
    "optimizer": " in the optimizer's step",
    "other": "",
}
"""Where in a training step, as the end of a phrase."""
_LONGEST_NAME = 26
_LONGEST = 90
_BETWEEN = " · "
_TIMES = re.compile(r" \([\d,]+ so far\)$")
"""What a long headline can do without: the facts have it, too."""


def finding(report: MemtraceReport) -> str:
    """The finding that matters most, in full; the peak and what remains where nothing was found."""
    found = leading(report)
    if found is None:
        return f"{_peaked_light(report) if report.is_light else _peaked(report)}; {_left(report)}"
    if found is report.rerun_growth:
        return _grows_by_run(report.rerun_growth)
    return _sentence(found)


def leading(report: MemtraceReport) -> Leading | None:
    """The finding that matters most: the first thing to change."""
    if report.oom is not None:
        return report.oom
    cycle = report.kept_by_cycles
    if cycle is not None and cycle.freed_bytes >= _kept_bytes(report.growth):
        return cycle
    for growth in (report.growth, report.rerun_growth):
        if growth is not None and not _is_outgrown(growth, report.graph_growth):
            return growth
    return report.graph_growth if report.graph_growth is not None else report.undeleted


def _sentence(found: Leading) -> str:
    match found:
        case Oom():
            return _refused(found)
        case Cycle():
            return _held_in_cycles(found)
        case Growth():
            return _grows(found)
        case GraphGrowth():
            return _graph_grows(found)
        case Undeleted():
            return _undeleted(found)


def _is_outgrown(growth: Growth, graph: GraphGrowth | None) -> bool:
    """Whether the nodes of a graph that somebody else keeps take more."""
    return graph is not None and not growth.keeps_graph and growth.bytes_per_iteration < _NODE_BYTES * graph.nodes_per_iteration


def _kept_bytes(growth: Growth | None) -> int:
    return 0 if growth is None else growth.bytes_per_iteration * growth.iterations_count


def _held_in_cycles(cycle: Cycle) -> str:
    kept = f"{byte_size(cycle.freed_bytes)} stayed in reference cycles until Python's collector ran"
    return f"{kept}{_at(cycle.location)} · cycle: `{cycle.path}` · fix: {cycle.fix}"


def _undeleted(found: Undeleted) -> str:
    kept = f"{byte_size(found.live_bytes)} of the failed call stay allocated while its error is handled"
    if found.name:
        kept = f"`del {found.name}` freed none of its {byte_size(found.live_bytes)}"
    return f"{kept}{_at(found.location)} · still held by `{found.holder}` · fix: {found.fix}"


def _refused(oom: Oom) -> str:
    asked = f"{byte_size(oom.asked_bytes)} were" if oom.asked_bytes else "memory was"
    where = f" · {oom.location}: `{oom.location.source}`" if oom.location is not None else ""
    first = max(oom.by_category, key=lambda name: oom.by_category[name], default="")
    most = f", {byte_size(oom.by_category[first])} of them {many(first)}" if first else ""
    help_ = f" · best remedy: {oom.best.what} (saves {byte_size(oom.best.saved_bytes)})" if oom.best is not None else ""
    if oom.asked_bytes > FAR_MORE * oom.live_bytes:
        help_ = f" · {TOO_LARGE}"
    return f"out of memory: {asked} refused {_reason(oom)}{where} · {byte_size(oom.live_bytes)} were alive{most}{help_}"


def _reason(oom: Oom) -> str:
    if oom.kind == "fragmentation":
        return f"though {byte_size(oom.unused_reserved_bytes)} are reserved and unused"
    if oom.kind == "handled error":
        return "while an error is handled that holds the tensors of the failed call"
    if oom.kind == "leak":
        return f"in iteration {oom.iteration:,}, after memory grew in every iteration"
    if oom.iteration > 1:
        return f"in iteration {oom.iteration:,}, though nothing grew: this step needs more than the earlier ones"
    return "in the first iteration: the step itself is too large" if oom.iteration else "in a single allocation, which is too large"


def _grows(growth: Growth) -> str:
    grows = f"grows by {byte_size(growth.bytes_per_iteration)} each iteration"
    times = f"({growth.iterations_count:,} so far)"
    if growth.what == "tensors":
        return f"memory {grows} {times}{_why(growth)}"
    outside = f"outside its tensors: {_BEYOND[growth.what]}, {share(growth.share_ratio)} of its growth"
    return f"the process {grows} {outside} {times}{_why(growth)}"


def _grows_by_run(growth: Growth) -> str:
    return f"each run of this cell leaves {byte_size(growth.bytes_per_iteration)} more{_why(growth)}"


def _why(growth: Growth) -> str:
    where = _at(growth.fix_at)
    made, put = growth.location, growth.kept_at
    if made is not None and put is not None and (made.file, made.line) != (put.file, put.line):
        where += f" · allocated at {made}"
    unheld = " · no variable was found that keeps the memory" if growth.what == "tensors" else ""
    kept = f" · kept by `{growth.holder}`" if growth.holder else unheld
    fix = f" · fix: {growth.fix}" if growth.fix else ""
    fix += f" · also growing: {', '.join(f'`{one}`' for one in growth.others)}" if growth.others else ""
    return f"{where}{kept}{fix}"


def _at(location: Location | None) -> str:
    return f" · {location}: `{location.source}`" if location is not None else ""


def _graph_grows(growth: GraphGrowth) -> str:
    kept = _at(growth.location)
    kept += f" · kept by `{growth.holder}`" if growth.holder else ""
    return f"the graph grows by {plural(growth.nodes_per_iteration, 'node')} each iteration{kept} · fix: {growth.fix}"


def _peaked(report: MemtraceReport) -> str:
    peak = report.peak
    shares = sorted(((size, name) for name, size in peak.by_category.items() if size), reverse=True)
    most = ", ".join(f"{many(name)} {byte_size(size)}" for size, name in shares[:3])
    where = f" · {peak.location}" if peak.location is not None else ""
    when = WHEN[peak.phase] if report.peak_bytes > report.start_bytes else " at the start of the cell"
    return f"peak {byte_size(report.peak_bytes)}{when}{where}" + (f" ({most})" if most else "")


def _peaked_light(report: MemtraceReport) -> str:
    return "the peak is not known" if report.rss_peak_bytes is None else f"process peak {byte_size(report.rss_peak_bytes)}"


def _left(report: MemtraceReport) -> str:
    if report.process_grown_bytes:
        return f"the process grew by {byte_size(report.process_grown_bytes)} over {count(report.steps_count)} steps, beside its tensors"
    if report.net_bytes == 0:
        return "all memory was released: no growth"
    change = f"{byte_size(abs(report.net_bytes))} {'more' if report.net_bytes > 0 else 'less'} than before the cell"
    held = report.holders[0].variable if report.holders and report.net_bytes > 0 else ""
    growth = f"only `{report.collects}` grows" if report.collects else "no growth"
    if report.unnamed_bytes:
        growth = f"no growth was found, but no variable leads to {byte_size(report.unnamed_bytes)} of the memory that remains"
    steps = f"; {growth} over {count(report.steps_count)} steps" if report.steps_count > 1 else ""
    if report.unseen_loop is not None:
        steps = f"; growth was not checked in the loop at {report.unseen_loop}: no training step was recognized there"
    return f"{change}{f', most of it in `{held}`' if held else ''}{steps}"


def many(category: str) -> str:
    """The plural name of a category, such as ``activations``."""
    return {
        "parameter": "parameters", "gradient": "gradients", "optimizer state": "optimizer state", "activation": "activations",
        "buffer": "buffers", "temporary": "temporaries", "other": "other tensors",
    }.get(category, category)  # fmt: skip


def headline(report: MemtraceReport) -> str:
    """The finding that matters most, or the peak and what became of it."""
    found = leading(report)
    if found is None:
        return _stopped(report) if report.interrupts else _peak(report)
    what = f"each run of this cell adds {_more(found)}" if found is report.rerun_growth else _what(found)
    where = found.fix_at
    place = "" if where is None else str(where).partition(" in ")[0]
    short = _TIMES.sub("", what)
    guarded = [f"stopped by guard: {text}" for text in (what, short)] if report.interrupts else []
    fitting = (text for text in (*guarded, what, short) if len(text) + len(place) + len(_BETWEEN) <= _LONGEST)
    return capitalised(next(fitting, short)) + _in_line(where, place)


def variable(path: str) -> str:
    """The collection or variable at the start of a path, as it is written in code; the end of a long one."""
    name = as_code(collection(path))
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _what(found: Leading) -> str:
    match found:
        case Oom():
            asked = f"{byte_size(found.asked_bytes)} refused" if found.asked_bytes else "memory refused"
            return f"out of memory: {asked} {_when_refused(found)}"
        case Cycle():
            return f"{byte_size(found.freed_bytes)} stayed in reference cycles until Python's collector ran"
        case Growth():
            return _growth_words(found)
        case GraphGrowth():
            nodes = plural(found.nodes_per_iteration, "node")
            name = f"`{variable(found.holder)}`" if found.holder else "a variable"
            return f"{name} keeps each iteration's graph (+{nodes} each)"
        case Undeleted():
            size = byte_size(found.live_bytes)
            of_error = f"{size} of the failed call stay allocated while its error is handled"
            return f"`del {found.name}` freed none of its {size}" if found.name else of_error


def _growth_words(growth: Growth) -> str:
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


def _in_line(location: Location | None, place: str) -> str:
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
