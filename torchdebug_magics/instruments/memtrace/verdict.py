"""The verdict of a trace: one sentence on what to change, or on how much was held and by what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, count, plural, share

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.findings import Cycle, GraphGrowth, Growth, Oom, Phase, Undeleted
    from torchdebug_magics.instruments.memtrace.report import MemtraceReport
    from torchdebug_magics.report import Location

__all__ = ["finding", "many"]

_NODE_BYTES = 500
"""About what an autograd node takes."""
_FAR_MORE = 10
"""Times what is alive: then it is no step that is too large, but one tensor."""
_BEYOND: Mapping[str, str] = {
    "objects": "Python objects",
    "workers": "pages that its DataLoader workers copied",
    "profiler": "events of the profiler",
}
_WHEN: Mapping[Phase, str] = {
    "forward": " in the forward pass",
    "loss": " in the loss",
    "backward": " in the backward pass",
    "optimizer": " in the optimizer's step",
    "other": "",
}


def finding(report: MemtraceReport) -> str:
    """What is worst first."""
    if report.oom is not None:
        return _refused(report.oom)
    cycle = report.kept_by_cycles
    if cycle is not None and cycle.freed_bytes >= _kept_bytes(report.growth):
        return _held_in_cycles(cycle)
    for growth, said in ((report.growth, _grows), (report.rerun_growth, _grows_by_run)):
        if growth is not None and not _is_outgrown(growth, report.graph_growth):
            return said(growth)
    if report.graph_growth is not None:
        return _graph_grows(report.graph_growth)
    if report.undeleted is not None:
        return _undeleted(report.undeleted)
    return f"{_peaked_light(report) if report.is_light else _peaked(report)}; {_left(report)}"


def _is_outgrown(growth: Growth, graph: GraphGrowth | None) -> bool:
    """Whether the nodes of a graph that somebody else keeps take more."""
    return graph is not None and not growth.keeps_graph and growth.bytes_per_iteration < _NODE_BYTES * graph.nodes_per_iteration


def _kept_bytes(growth: Growth | None) -> int:
    return 0 if growth is None else growth.bytes_per_iteration * growth.iterations_count


def _held_in_cycles(cycle: Cycle) -> str:
    kept = f"{byte_size(cycle.freed_bytes)} stayed in reference cycles until Python's collector ran"
    return f"{kept}{_at(cycle.location)} · cycle: `{cycle.path}` · fix: {cycle.fix}"


def _undeleted(found: Undeleted) -> str:
    kept = f"{byte_size(found.live_bytes)} of the call that failed are held while its error is handled"
    if found.name:
        kept = f"`del {found.name}` freed nothing of {byte_size(found.live_bytes)}"
    return f"{kept}{_at(found.location)} · still held by `{found.holder}` · fix: {found.fix}"


def _refused(oom: Oom) -> str:
    asked = f"{byte_size(oom.asked_bytes)} were" if oom.asked_bytes else "memory was"
    where = f" · {oom.location}: `{oom.location.source}`" if oom.location is not None else ""
    first = max(oom.by_category, key=lambda name: oom.by_category[name], default="")
    most = f", {byte_size(oom.by_category[first])} of them {many(first)}" if first else ""
    help_ = f" · helps most: {oom.best.what} (saves {byte_size(oom.best.saved_bytes)})" if oom.best is not None else ""
    if oom.asked_bytes > _FAR_MORE * oom.live_bytes:
        help_ = " · ask for less at once: nothing that is alive would make room for it"
    return f"out of memory: {asked} refused {_reason(oom)}{where} · {byte_size(oom.live_bytes)} were alive{most}{help_}"


def _reason(oom: Oom) -> str:
    if oom.kind == "fragmentation":
        return f"though {byte_size(oom.unused_reserved_bytes)} are reserved and unused"
    if oom.kind == "handled error":
        return "while an error is handled that holds what the failed call had made"
    if oom.kind == "leak":
        return f"in iteration {oom.iteration:,}, as memory has grown until then"
    if oom.iteration > 1:
        return f"in iteration {oom.iteration:,}, though nothing grew: this step asks for more than those before"
    return "in the first iteration: the step itself is too large" if oom.iteration else "at once: this is too large"


def _grows(growth: Growth) -> str:
    grows = f"grows by {byte_size(growth.bytes_per_iteration)} each iteration"
    times = f"({growth.iterations_count:,} so far)"
    if growth.what == "tensors":
        return f"memory {grows} {times}{_why(growth)}"
    beyond = f"beyond its tensors, by {_BEYOND[growth.what]}: {share(growth.share_ratio)} of its growth"
    return f"the process {grows} {beyond} {times}{_why(growth)}"


def _grows_by_run(growth: Growth) -> str:
    return f"each run of this cell leaves {byte_size(growth.bytes_per_iteration)} more{_why(growth)}"


def _why(growth: Growth) -> str:
    where = _at(growth.kept_at or growth.location)
    made, put = growth.location, growth.kept_at
    if made is not None and put is not None and (made.file, made.line) != (put.file, put.line):
        where += f" · allocated at {made}"
    unheld = " · no variable was found that keeps it" if growth.what == "tensors" else ""
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
    when = _WHEN[peak.phase] if report.peak_bytes > report.start_bytes else " at the start of the cell"
    return f"peak {byte_size(report.peak_bytes)}{when}{where}" + (f" ({most})" if most else "")


def _peaked_light(report: MemtraceReport) -> str:
    return "the peak is not known" if report.rss_peak_bytes is None else f"the process held at most {byte_size(report.rss_peak_bytes)}"


def _left(report: MemtraceReport) -> str:
    if report.net_bytes == 0:
        return "nothing is left of it: no growth"
    change = f"{byte_size(abs(report.net_bytes))} {'more' if report.net_bytes > 0 else 'less'} than before the cell"
    held = report.holders[0].variable if report.holders and report.net_bytes > 0 else ""
    growth = f"nothing but `{report.collects}` grows" if report.collects else "no growth"
    if report.unnamed_bytes:
        growth = f"no growth was found, but no variable leads to {byte_size(report.unnamed_bytes)} of it"
    steps = f"; {growth} over {count(report.steps_count)} steps" if report.steps_count > 1 else ""
    if report.unseen_loop is not None:
        steps = f"; no step was recognized in the loop at {report.unseen_loop}: growth was not followed there"
    return f"{change}{f', most of it in `{held}`' if held else ''}{steps}"


def many(category: str) -> str:
    """The category in words, as of many tensors."""
    return {
        "parameter": "parameters", "gradient": "gradients", "optimizer state": "optimizer state", "activation": "activations",
        "buffer": "buffers", "temporary": "temporaries", "other": "other tensors",
    }.get(category, category)  # fmt: skip
