"""``%memtrace --compare a b``: two reports side by side; and, after a cell to which memory was refused, what holds it now."""

from __future__ import annotations

import gc
from dataclasses import replace

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import Census
from torchdebug_magics.instruments.memtrace.probe import MemtraceProbe, concluded, refused_by
from torchdebug_magics.instruments.memtrace.report import Comparison, MemtraceReport
from torchdebug_magics.instruments.memtrace.trace import Timeline


def examine(context: CellContext, *values: object, compare: bool = False, **_of_a_session: object) -> Comparison | MemtraceReport | None:
    """Compare two reports; without values, explain the previous cell's error, if memory was refused to it."""
    if not compare:
        if not values:
            return None if refused_by(context.last_error) is None else _after_refusal(context)
        msg = "memtrace takes values only with --compare: write `%memtrace --compare a b`"
        raise TorchDebugError(msg)
    reports = [value for value in values if isinstance(value, MemtraceReport)]
    if len(reports) != len(values) or len(reports) != 2:  # noqa: PLR2004 - two are compared
        given = ", ".join(type(value).__name__ for value in values) or "nothing"
        msg = f"--compare takes two reports of %%memtrace, kept with `-o a` and `-o b`, not {given}: write `%memtrace --compare a b`"
        raise TorchDebugError(msg)
    names = context.names
    first, second = names if len(names) == len(reports) and names[0] != names[1] else ("a", "b")
    return Comparison(names=(first, second), reports=(reports[0], reports[1]))


def _after_refusal(context: CellContext) -> MemtraceReport:
    """The error's frames still hold what its call had made: that is alive, and counted as the cell's."""
    gc.collect()
    probe = MemtraceProbe(context)
    probe.ledger.begin()
    try:
        probe.tracer.adopt_all(Census())
        report = concluded(probe, context.last_error)
    finally:
        probe.ledger.close()
    oom = report.oom and replace(report.oom, iteration=None)
    now_bytes, peak = report.net_bytes, replace(report.peak, by_category={})
    nothing_seen = replace(report, start_bytes=now_bytes, net_bytes=0, peak=peak, timeline=Timeline(), sites=(), untraced_bytes=0)
    return replace(nothing_seen, oom=oom, rss_net_bytes=None)
