"""A trace in words, each thing once: the headline, the rows that tell what to change, and the figures."""

from __future__ import annotations

from collections.abc import Mapping

from torchdebug_magics.format import byte_size, capitalised, count, listed, plural, share, signed
from torchdebug_magics.instruments.memtrace.trace import Cycle, DeviceMemory, GraphGrowth, Growth, Leading, Oom, Phase, Trace, Undeleted
from torchdebug_magics.report import short_title

_NODE_BYTES = 500
"""About what an autograd node takes."""
_FAR_MORE = 10
"""Times the live memory: then one tensor is too large, not the step."""
_TOO_LARGE = "shrink this allocation: freeing live tensors would not make room for it"
_WHEN: Mapping[Phase, str] = {
    "forward": " in the forward pass",
    "loss": " in the loss",
    "backward": " in the backward pass",
    "optimizer": " in the optimizer's step",
    "other": "",
}
"""Where in a training step, as the end of a phrase."""
_MANY: Mapping[str, str] = {
    "parameter": "parameters", "gradient": "gradients", "activation": "activations", "buffer": "buffers", "temporary": "temporaries",
    "other": "other tensors",
}  # fmt: skip
_TOLD = frozenset({"guard", "held by", "fix", "kept by", "cycle", "also growing", "but", "after the cell"})
"""Rows that the verdict has, too: what to change, and what remains."""
_WORTH_TRIMMING = 16 << 20
_LONGEST_NAME = 26
_LONGEST = 90
_BETWEEN = " · "


def leading(report: Trace) -> Leading | None:
    """The finding that matters most: the first thing to change."""
    if report.oom is not None:
        return report.oom
    cycle, growth, graph = report.kept_by_cycles, report.growth, report.graph_growth
    kept_bytes = 0 if growth is None else growth.bytes_per_iteration * growth.iterations_count
    if cycle is not None and cycle.freed_bytes >= kept_bytes:
        return cycle
    for one in (growth, report.rerun_growth):
        # The nodes of a graph that somebody else keeps may take more.
        if one is not None and (graph is None or one.keeps_graph or one.bytes_per_iteration >= _NODE_BYTES * graph.nodes_per_iteration):
            return one
    return graph if graph is not None else report.undeleted


def verdict(report: Trace) -> str:
    """The headline, and the rows that tell what to change; where nothing was found, what remains."""
    told = (f"{name}: {text}" for name, text in rows(report, leading(report)) if name in _TOLD)
    return _BETWEEN.join([headline(report), *told])


# The headline --------------------------------------------------------------------------------------------------------------------


def headline(report: Trace) -> str:
    """The finding that matters most and its line, or the peak and what became of it."""
    found = leading(report)
    if found is None:
        if not report.interrupts:
            return _peak(report)
        last = report.interrupts[-1]
        return f"Stopped by guard at {byte_size(last.used_bytes)} of {byte_size(last.limit_bytes)} ({last.whose})"
    short, times = _what(found, _each(report, found))
    guarded = "stopped by guard: " if report.interrupts else ""
    return short_title(capitalised(f"{guarded}{short}{times}"), found.fix_at, shorter=capitalised(short))


def variable(found: Growth | GraphGrowth) -> str:
    """Which variable keeps it, in code; the end of a long one."""
    name = found.variable
    return "" if not name else f"`{name}`" if len(name) <= _LONGEST_NAME else f"`…{name[1 - _LONGEST_NAME :]}`"


def _what(found: Leading, each: str) -> tuple[str, str]:
    """What happened; and how often, which a long headline can do without."""
    match found:
        case Oom():
            asked = f"{byte_size(found.asked_bytes)} refused" if found.asked_bytes else "memory refused"
            return f"out of memory: {asked} {_when_refused(found)}".rstrip(), ""
        case Cycle():
            return f"{byte_size(found.freed_bytes)} stayed in reference cycles until Python's collector ran", ""
        case Growth():
            return _growth(found, each)
        case GraphGrowth():
            return f"{variable(found) or 'a variable'} keeps each iteration's graph (+{plural(found.nodes_per_iteration, 'node')} each)", ""
        case Undeleted():
            size = byte_size(found.live_bytes)
            of_error = f"{size} of the failed call stay allocated while its error is handled"
            return f"`del {found.name}` freed none of its {size}" if found.name else of_error, ""


def _growth(growth: Growth, each: str) -> tuple[str, str]:
    size, times = byte_size(growth.bytes_per_iteration), f" ({growth.iterations_count:,} so far)"
    name = variable(growth)
    if each == "run":
        return f"each run of this cell adds {size} " + (f"to {name}" if name else "that no known variable holds"), ""
    if growth.what == "workers":
        return f"DataLoader workers copy {size} of {name or 'the dataset'} each iteration", ""
    if growth.what == "profiler":
        return f"the profiler keeps {size} of events each iteration", times
    if growth.what == "objects":
        return f"{name or 'the process'} grows by {size} of objects each iteration", times
    if growth.keeps_graph and name:
        return f"{name} keeps each iteration's graph (+{size} each)", ""
    return f"{name or 'memory'} grows by {size} each iteration", times


def _when_refused(oom: Oom) -> str:
    if oom.iteration is None:
        return ""
    if oom.kind == "fragmentation":
        return f"though {byte_size(oom.unused_reserved_bytes)} are reserved and unused"
    if oom.kind == "handled error":
        return "while an error is handled"
    if oom.kind == "leak":
        return f"in iteration {oom.iteration:,}, after steady growth"
    if oom.iteration > 1:
        return f"in iteration {oom.iteration:,}, though nothing grew"
    return "in the first iteration" if oom.iteration else "in a single allocation"


def _peak(report: Trace) -> str:
    what = _outcome(report)
    if report.is_light:
        peak = "Peak not known" if report.rss_peak_bytes is None else f"Process peak {byte_size(report.rss_peak_bytes)}"
        return f"{peak}; {what}"
    is_old = report.peak_bytes <= report.start_bytes
    peak = f"Peak {byte_size(report.peak_bytes)}{' at the start of the cell' if is_old else _WHEN[report.peak.phase]}"
    where = None if is_old else report.peak.location
    place = "" if where is None else _BETWEEN + where.place
    return f"{peak}{place if len(f'{peak}{place}; {what}') <= _LONGEST else ''}; {what}"


def _outcome(report: Trace) -> str:
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


# The rows ------------------------------------------------------------------------------------------------------------------------


def rows(report: Trace, found: Leading | None) -> list[tuple[str, str]]:
    """What to change, who keeps the memory, and what the guard did; where nothing was found, what remains."""
    known = [*_guarded(report, found), *(_remaining(report) if found is None else rows_of(found, _each(report, found)))]
    return [(name, text) for name, text in known if text]


def also_found(report: Trace) -> list[list[tuple[str, str]]]:
    """The rows of each further finding, with its line."""
    lead, growth = leading(report), report.growth
    graph = None if growth is not None and growth.keeps_graph else report.graph_growth
    found = (growth, report.rerun_growth, graph, report.kept_by_cycles, report.undeleted)
    return [
        [("line", "" if one.fix_at is None else f"{one.fix_at}: `{one.fix_at.source}`"), *rows_of(one, _each(report, one))]
        for one in found
        if one is not None and one is not lead
    ]


def rows_of(found: Leading, each: str) -> list[tuple[str, str]]:
    """Of one finding; `each` is what makes it grow, an iteration or a run."""
    match found:
        case Growth():
            return _growth_rows(found, each)
        case GraphGrowth():
            nodes = plural(found.nodes_per_iteration, "autograd node")
            return [
                ("fix", found.fix),
                ("kept by", f"`{found.holder}`" if found.holder else ""),
                ("growth", f"{nodes} each iteration, {plural(found.iterations_count, 'iteration')} so far"),
            ]
        case Cycle():
            return [("fix", found.fix), ("cycle", f"`{found.path}`"), ("made", f"{plural(found.count, 'time')} in this cell")]
        case Undeleted():
            return [("fix", found.fix), ("kept by", f"`{found.holder}`")]
        case Oom():
            return [
                ("fix", _best(found)),
                ("allocated", f"{byte_size(found.live_bytes)} in live tensors when it was refused"),
                ("operation", " in ".join(f"`{text}`" for text in (found.op, found.module) if text)),
            ]


def start_of(path: str) -> str:
    """A path up to the autograd graph, whose nodes have a fold of their own."""
    return path.partition(".grad_fn")[0].partition(" -> ")[0]


def _each(report: Trace, found: object) -> str:
    return "run" if found is report.rerun_growth else "iteration"


def _guarded(report: Trace, found: object) -> list[tuple[str, str]]:
    """What the guard did, and who holds the memory that it stopped at."""
    if not report.interrupts:
        return []
    last = report.interrupts[-1]
    used = "" if found is None else f" at {byte_size(last.used_bytes)} of {byte_size(last.limit_bytes)} ({last.whose})"
    holders = "" if found is not None else listed([f"`{holder.variable}` {byte_size(holder.live_bytes)}" for holder in report.holders])
    return [
        ("guard", f"interrupted the cell{used}, as `--guard {share(last.guard_ratio)}` asks; your variables are intact"),
        ("held by", holders),
    ]


def _growth_rows(found: Growth, each: str) -> list[tuple[str, str]]:
    frees = f" (frees {byte_size(found.frees_bytes)})" if found.fix and found.frees_bytes else ""
    total = f"{byte_size(found.bytes_per_iteration * found.iterations_count)} in {plural(found.iterations_count, each)}"
    kept = f"`{start_of(found.holder)}`" if found.holder else "no variable that could be found"
    put, made = found.kept_at, found.location
    if made is not None and put is not None and (made.file, made.line) != (put.file, put.line):
        kept += f", allocated at {made}: `{made.source}`"
    outside = "" if found.what == "tensors" else f"; {share(found.share_ratio)} of the growth of the process"
    return [
        ("fix", f"{found.fix}{frees}" if found.fix else ""),
        ("kept by", kept),
        ("growth", f"{byte_size(found.bytes_per_iteration)} each {each}, {total}{outside}"),
        ("also growing", ", ".join(f"`{other}`" for other in found.others)),
    ]


def _best(oom: Oom) -> str:
    if oom.asked_bytes > _FAR_MORE * oom.live_bytes:
        return _TOO_LARGE
    best = oom.best
    return "" if best is None else f"{best.what} (saves {byte_size(best.saved_bytes)}): {best.how}"


def _remaining(report: Trace) -> list[tuple[str, str]]:
    """What the process kept, what the cell left, and which variable holds most of it."""
    if report.is_light and not report.net_bytes and not report.process_grown_bytes:
        return []
    before, after = report.start_bytes, report.start_bytes + report.net_bytes
    held = f"; most of it in `{report.holders[0].variable}`" if report.holders and report.net_bytes > 0 else ""
    loop = ""
    if report.unseen_loop is not None:
        loop = f"; growth was not checked in the loop at {report.unseen_loop}: no training step was recognized there"
    grown = f"{signed(report.process_grown_bytes)} of this process, outside of tensors: the variable that keeps it was not found"
    return [
        ("but", grown if report.process_grown_bytes else ""),
        ("after the cell", f"{signed(report.net_bytes)}: torch held {byte_size(before)} before, {byte_size(after)} after{held}{loop}"),
    ]


# The figures ---------------------------------------------------------------------------------------------------------------------


def figures(report: Trace) -> tuple[tuple[str, str], ...]:
    """Names and values of all figures that are known."""
    kept_bytes = report.heap_kept_bytes if report.heap_kept_bytes >= _WORTH_TRIMMING else 0
    sizes = (report.freed_before_bytes, report.borrowed_bytes, report.mapped_bytes, report.untraced_bytes, kept_bytes)
    freed, borrowed, mapped, untraced, kept = (byte_size(size) if size else "" for size in sizes)
    known = [
        ("torch memory", f"{byte_size(report.start_bytes)} before the cell, {signed(report.net_bytes)} after it"),
        ("held from before, freed", freed),
        *[(device.device, _device(device)) for device in report.devices if len(report.devices) > 1 or device.reserved_bytes is not None],
        ("this process", _process(report)),
        ("kept by the C library", kept and f"{kept} of freed memory; `%memclean --free heap` returns it to the system"),
        ("borrowed", borrowed and f"{borrowed} that other libraries own, such as NumPy (`from_numpy`)"),
        ("memory-mapped", mapped and f"{mapped} of files"),
        ("not traced", untraced),
        *[("reference cycles", f"{byte_size(cycle.freed_bytes)}: `{cycle.path}`") for cycle in report.cycles],
        ("traced", _followed(report)),
        ("snapshot", report.snapshot and f"`{report.snapshot}`; open it at pytorch.org/memory_viz"),
    ]
    return tuple((name, text) for name, text in known if text)


def many(category: str) -> str:
    """The plural name of a category, such as ``activations``."""
    return _MANY.get(category, category)


def _process(report: Trace) -> str:
    if report.rss_peak_bytes is None:
        return ""
    net = "" if report.rss_net_bytes is None else f", {signed(report.rss_net_bytes)} at the end"
    limit = "" if report.limit_bytes is None else f"; the limit is {byte_size(report.limit_bytes)} ({report.limit})"
    return f"peak {byte_size(report.rss_peak_bytes)}{net}{limit}"


def _followed(report: Trace) -> str:
    """How many steps were traced op by op, and what was done with the others."""
    ops = f"{count(report.ops_count)} operation{'' if report.ops_count == 1 else 's'}"
    if not report.steps_count:
        return ops
    steps = "all" if report.followed_count == report.steps_count else f"{report.followed_count:,}"
    is_part = 0 < report.followed_count < report.steps_count
    rest = "; only the memory of the others was counted, and the picture shows them in sequence" if is_part else ""
    return f"{ops}; {steps} of {plural(report.steps_count, 'step')} op by op{rest}"


def _device(one: DeviceMemory) -> str:
    text = f"peak {byte_size(one.peak_bytes)}, {signed(one.net_bytes)} at the end"
    if one.allocated_bytes is None or one.reserved_bytes is None:
        return text
    allocated = _counted("MA", one.allocated_bytes, one.allocated_peak_bytes)
    return f"{text}; its allocator: {allocated}, {_counted('CA', one.reserved_bytes, one.reserved_peak_bytes)}"


def _counted(name: str, now_bytes: int, peak_bytes: int | None) -> str:
    peak = "the peak is from before the cell" if peak_bytes is None else f"peak {byte_size(peak_bytes)}"
    return f"{name} {byte_size(now_bytes)} ({peak})"
