"""From what was collected to the report: who keeps what, what grows, why memory was refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.growth.rerun_growth import rerun_growth
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers, holders
from torchdebug_magics.instruments.memtrace.held.out_of_memory import explained, refused_by
from torchdebug_magics.instruments.memtrace.held.reference_cycles import kept_by_cycles
from torchdebug_magics.instruments.memtrace.ledger.memory_census import Census
from torchdebug_magics.instruments.memtrace.ledger.sites import by_category, by_module
from torchdebug_magics.instruments.memtrace.ledger.timeline import timeline
from torchdebug_magics.instruments.memtrace.report import MemtraceReport, Peak
from torchdebug_magics.instruments.memtrace.verdict import leading, line_to_change
from torchdebug_magics.probing.source.call_sites import loops_around
from torchdebug_magics.probing.where import excerpt, location

if TYPE_CHECKING:
    from collections import deque

    from torchdebug_magics.instruments.memtrace.findings import Growth, Oom, Undeleted
    from torchdebug_magics.instruments.memtrace.growth.growth_watch import GrowthWatch
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
    from torchdebug_magics.instruments.memtrace.growth.rerun_growth import Run
    from torchdebug_magics.instruments.memtrace.held.deleted import Deletions
    from torchdebug_magics.instruments.memtrace.held.handled_error import HandledErrors
    from torchdebug_magics.instruments.memtrace.held.reference_cycles import CycleWatch
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger
    from torchdebug_magics.instruments.memtrace.ledger.devices import Devices
    from torchdebug_magics.instruments.memtrace.ledger.memory_snapshot import Snapshot
    from torchdebug_magics.instruments.memtrace.ledger.op_tracer import Tracer
    from torchdebug_magics.instruments.memtrace.ledger.phases import Phases
    from torchdebug_magics.instruments.memtrace.ledger.process_memory import ProcessMemory
    from torchdebug_magics.instruments.memtrace.ledger.trace_marks import MarkListener
    from torchdebug_magics.machine.interrupts import Interrupt
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.report import Location

__all__ = ["Seen", "concluded"]

_LEAST_UNNAMED, _LARGE_PART = 64 << 10, 0.1
_SEVERAL = 3
"""Times that a line ran: then it is in a loop."""


@dataclass(frozen=True)
class Seen:
    """All that the probe collected."""

    ledger: Ledger
    tracer: Tracer
    phases: Phases
    steps: Steps
    watch: GrowthWatch
    process: ProcessMemory
    devices: Devices
    marks: MarkListener
    snapshot: Snapshot | None
    cycles: CycleWatch
    handled: HandledErrors
    deletions: Deletions
    runs: deque[Run]
    """What the earlier runs of the same cell have left."""
    interrupts: tuple[Interrupt, ...]
    guard: Guard
    is_light: bool


def concluded(seen: Seen, error: BaseException | None) -> MemtraceReport:
    """The report; the ledger is complete then, and may be closed."""
    ledger, tracer, steps, process, guard = seen.ledger, seen.tracer, seen.steps, seen.process, seen.guard
    cycles = guard.run("the look for cycles", seen.cycles.end, seen.watch.lines) or ()
    ledger.counted_until = ledger.clock
    tracer.adopt_all(Census())
    alive = list(ledger.live.values())
    made = [block for block in alive if not block.is_old]
    keepers = Keepers(made, [] if error is None else [("the error", error)], carried=seen.watch.carried)
    found = guard.run("the look for growth", seen.watch.found, made, keepers, ledger.total.peak_bytes)
    growth, graph_growth = found or (None, None)
    handled = seen.handled.found(ledger.total.peak_bytes)
    oom = guard.run("explaining the refusal", _out_of_memory, seen, error, alive, growth, handled)
    limit_bytes, limit = process.limit()
    sites, total = ledger.sites, ledger.total
    sites.fold([*ledger.gone, *alive])
    report = MemtraceReport(
        net_bytes=total.now_bytes - total.start_bytes,
        start_bytes=total.start_bytes,
        peak_bytes=total.peak_bytes,
        peak=_peak(ledger, ledger.at_peak()),
        devices=seen.devices.memory(ledger.devices),
        untraced_bytes=sites.fold_unseen([*ledger.gone, *alive]),
        sites=sites.rows(),
        growth=growth,
        graph_growth=graph_growth,
        collects=seen.watch.collects,
        rerun_growth=guard.run("the look at earlier runs", rerun_growth, seen.runs, made, keepers, alive, trains=seen.phases.trains),
        holders=holders(keepers, made),
        cycles=cycles,
        kept_by_cycles=kept_by_cycles(cycles, total.peak_bytes),
        oom=oom,
        undeleted=handled or guard.run("the look at what was deleted", seen.deletions.found, made, keepers, total.peak_bytes),
        unnamed_bytes=_unnamed_bytes(keepers, made, total.now_bytes - total.start_bytes),
        unseen_loop=_unseen_loop(ledger) if steps.count <= 1 else None,
        freed_before_bytes=sites.freed_before_bytes,
        rss_peak_bytes=process.peak_bytes(),
        rss_net_bytes=process.net_bytes(),
        process_grown_bytes=0 if growth is not None else seen.watch.process_grown_bytes(),
        heap_kept_bytes=process.heap_kept_bytes(),
        limit_bytes=limit_bytes,
        limit=limit,
        borrowed_bytes=tracer.borrowed_bytes,
        mapped_bytes=tracer.mapped_bytes,
        marks=tuple(one.mark for one in seen.marks.marks),
        interrupts=seen.interrupts,
        snapshot="" if seen.snapshot is None else guard.run("writing the snapshot", seen.snapshot.write, ledger) or "",
        timeline=timeline(ledger, seen.phases, [one.clock for one in seen.marks.marks]),
        ops_count=tracer.ops_count,
        steps_count=steps.count,
        followed_count=0 if seen.is_light else len(steps.followed),
        is_light=seen.is_light,
    )
    lead = leading(report)
    where = None if lead is None else line_to_change(lead)
    lines = guard.run("reading the line", excerpt, where) if where is not None else None
    return replace(report, excerpt=lines or (), problems=tuple(guard.problems))


def _unnamed_bytes(keepers: Keepers, made: list[Block], net_bytes: int) -> int:
    """Of what is left, if it is much of it."""
    unnamed_bytes = keepers.unnamed_bytes(made)
    return unnamed_bytes if unnamed_bytes >= max(_LEAST_UNNAMED, _LARGE_PART * net_bytes) else 0


def _unseen_loop(ledger: Ledger) -> Location | None:
    """Around the line that allocated most often, where it did so again and again."""
    lines = Counter(block.place for block in ledger.events if block.place is not None and not block.died)
    place = max(lines, key=lambda one: lines[one], default=None)
    loops = loops_around(place.file, place.line) if place is not None and lines[place] >= _SEVERAL else []
    return location(place.file, loops[-1][0], place.function) if place is not None and loops else None


def _out_of_memory(
    seen: Seen, error: BaseException | None, alive: list[Block], growth: Growth | None, handled: Undeleted | None
) -> Oom | None:
    refused = refused_by(error)
    if refused is None:
        return None
    unused_bytes = sum(one.reserved_bytes - one.allocated_bytes for one in seen.process.allocators())
    noted = seen.tracer.out_of_memory
    return explained(refused, noted, alive, growth, handled, iteration=seen.steps.count, unused_bytes=unused_bytes)


def _peak(ledger: Ledger, blocks: list[Block]) -> Peak:
    return Peak(
        phase=(ledger.peak_span or ledger.span).phase,
        op=ledger.peak_op.removesuffix(".default"),
        location=ledger.peak_place.location if ledger.peak_place is not None else None,
        by_category=by_category(blocks),
        by_module=by_module(blocks),
    )
