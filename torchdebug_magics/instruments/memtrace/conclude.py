"""From what was collected to the report: who keeps what, what grows, why memory was refused."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal

from torchdebug_magics.format import byte_size
from torchdebug_magics.instruments.memtrace.findings import Advice, Growth, Oom, Undeleted
from torchdebug_magics.instruments.memtrace.growth.growth_watch import GrowthWatch
from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
from torchdebug_magics.instruments.memtrace.growth.worst import Run, rerun_growth
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers, holders
from torchdebug_magics.instruments.memtrace.held.reference_cycles import CycleWatch, kept_by_cycles
from torchdebug_magics.instruments.memtrace.held.still_held import Deletions, HandledErrors
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger, by_category, by_module, category
from torchdebug_magics.instruments.memtrace.ledger.memory_census import Census
from torchdebug_magics.instruments.memtrace.ledger.memory_snapshot import Snapshot
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import OutOfMemory, Tracer, refused_bytes
from torchdebug_magics.instruments.memtrace.ledger.phases import ACTIVATION, OPTIMIZER_STATE, TEMPORARY, Phases, Span
from torchdebug_magics.instruments.memtrace.ledger.process_memory import Devices, MarkListener, ProcessMemory
from torchdebug_magics.instruments.memtrace.report import HELD_BEFORE, MemtraceReport, Peak, Stretch, Timeline
from torchdebug_magics.instruments.memtrace.words import leading
from torchdebug_magics.machine.interrupts import Interrupt
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.syntax import loops_around, tree_of
from torchdebug_magics.probing.where import excerpt, locate, location, user_frame
from torchdebug_magics.report import Location

_LEAST_UNNAMED, _LARGE_PART = 64 << 10, 0.1
_SEVERAL = 3
"""Times that a line ran: then it is in a loop."""
_POINTS = 400
_STRETCHES = 200
"""More would be a blur."""
_NUMBERED = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")
_WORTH = 0.01
"""Of what is alive: less is not worth the change."""
_MANY_UNUSED = 0.2


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
    where = None if lead is None else lead.fix_at
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
    loops = loops_around(tree_of(place.file), place.line) if place is not None and lines[place] >= _SEVERAL else []
    return location(place.file, loops[-1].lineno, place.function) if place is not None and loops else None


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


def timeline(ledger: Ledger, phases: Phases, marks: Sequence[int] = ()) -> Timeline:
    """At most `_POINTS` points, of each stretch of events the fullest; `marks` are events."""
    first, last = ledger.first_event, max(min(ledger.clock, ledger.counted_until), ledger.first_event + 1)
    levels = dict(_fullest(ledger, first, last))
    if not levels:
        return Timeline()
    clocks, points = zip(*levels.values(), strict=True)
    kinds = {name for point in points for name, size in point.items() if size}
    names = sorted(kinds, key=lambda name: (name != HELD_BEFORE, -sum(point.get(name, 0) for point in points)))
    totals = [sum(point.values()) for point in points]
    return Timeline(
        categories={name: tuple(point.get(name, 0) for point in points) for name in names},
        stretches=tuple(_stretches(phases.spans, clocks)),
        peak=totals.index(max(totals)),
        counted=bisect_left(clocks, ledger.counted_from) if ledger.counted_from else None,
        marks=tuple(max(0, bisect_right(clocks, clock) - 1) for clock in marks),
    )


def _fullest(ledger: Ledger, first: int, last: int) -> Iterator[tuple[int, tuple[int, dict[str, int]]]]:
    """(point, (event, bytes by category)): within each point, the event at which most was alive."""
    level = Counter({HELD_BEFORE: sum(block.bytes for block in ledger.old)})
    total, point, best = sum(level.values()), 0, (first, dict(level))
    best_total = total
    yield 0, best
    for clock, block, change in _changes(ledger):
        now = (clock - first) * (_POINTS - 1) // (last - first) + 1
        if now != point:
            yield point, best
            point, best_total = now, -1
        level[HELD_BEFORE if block.is_old else category(block)] += change
        total += change
        if total > best_total:
            best, best_total = (clock, dict(level)), total
    yield point, best


def _changes(ledger: Ledger) -> list[tuple[int, Block, int]]:
    """(event, block, bytes more or less), in order."""
    found: list[tuple[int, Block, int]] = []
    born: set[int] = set()
    unseen: list[Block] = []
    for block in ledger.events:
        if block.is_old or id(block) in born:
            found.append((block.died, block, -block.bytes))
        elif block.born > ledger.counted_until:
            unseen.append(block)
        else:
            found.append((block.born, block, block.bytes))
        born.add(id(block))
    # What is found only at the end was made in the steps that were counted, one after the other.
    since, until = ledger.counted_from, ledger.counted_until
    found += [(since + (until - since) * at // len(unseen), block, block.bytes) for at, block in enumerate(unseen, 1)]
    return sorted(found, key=lambda one: one[0])


def _stretches(spans: list[Span], clocks: tuple[int, ...]) -> Iterator[Stretch]:
    """Where each phase began, by the points of the picture; what is shorter than a point is not there."""
    at, said = 0, 0
    for span, following in zip(spans, [*spans[1:], None], strict=True):
        while at < len(clocks) and clocks[at] <= span.first:
            at += 1
        end = clocks[-1] + 1 if following is None else following.first
        if at < len(clocks) and clocks[at] <= end and said < _STRETCHES:
            said += 1
            yield Stretch(phase=span.phase, first=at)


def refused_by(error: BaseException | None) -> BaseException | None:
    """The error by which memory was refused, of those that led to this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (RuntimeError, MemoryError)) and refused_bytes(error) is not None:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explained(
    error: BaseException,
    seen: OutOfMemory | None,
    left: Collection[Block],
    growth: Growth | None,
    handled: Undeleted | None,
    *,
    iteration: int,
    unused_bytes: int,
) -> Oom:
    """Why, and what would help.

    `seen` is what was noted when the op raised, where it was followed; `left` is what was alive at the end, `handled` what an error
    holds that was being handled, `unused_bytes` what the caching allocator had reserved and not given out.
    """
    is_seen = seen is not None and seen.error_id == id(error)
    alive = seen.alive if seen is not None and is_seen else left
    sizes = by_category(alive)
    live_bytes = sum(sizes.values())
    asked_bytes = refused_bytes(error) or 0
    return Oom(
        asked_bytes=asked_bytes,
        op=seen.op.removesuffix(".default") if seen is not None and is_seen else "",
        module=seen.module if seen is not None and is_seen else "",
        location=seen.place.location if seen is not None and is_seen and seen.place is not None else _location(error),
        phase=seen.span.phase if seen is not None and is_seen else "other",
        iteration=iteration,
        kind="handled error" if handled is not None else _kind(growth, live_bytes, asked_bytes, unused_bytes),
        live_bytes=live_bytes,
        by_category=sizes,
        by_module=by_module(alive),
        unused_reserved_bytes=unused_bytes,
        advice=(*_advice(alive, sizes, growth, unused_bytes, live_bytes), *_retried(handled)),
    )


def _kind(growth: Growth | None, live_bytes: int, asked_bytes: int, unused_bytes: int) -> Literal["sizing", "leak", "fragmentation"]:
    if unused_bytes > max(asked_bytes, int(_MANY_UNUSED * live_bytes)):
        return "fragmentation"
    return "sizing" if growth is None else "leak"


def _location(error: BaseException) -> Location | None:
    innermost: FrameType | None = None
    trace = error.__traceback__
    while trace is not None:
        innermost, _line = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    frame = user_frame(innermost)
    return None if frame is None else locate(frame)


def _advice(
    alive: Collection[Block], sizes: Mapping[str, int], growth: Growth | None, unused_bytes: int, live_bytes: int
) -> Iterator[Advice]:
    """What is easy and changes nothing first."""
    for one in (*_of_step(alive, sizes), *_of_optimizer(sizes), *_in_half(sizes), *_defragmented(unused_bytes), *_freed(growth)):
        if one.saved_bytes > _WORTH * live_bytes:
            yield one


def _retried(handled: Undeleted | None) -> Iterator[Advice]:
    if handled is not None:
        yield Advice(what="retrying after the `except` block, not in it", saved_bytes=handled.live_bytes, how=handled.fix)


def _freed(growth: Growth | None) -> Iterator[Advice]:
    if growth is not None:
        held_bytes = growth.bytes_per_iteration * growth.iterations_count
        holder = f" `{growth.holder}`" if growth.holder else " the variable that keeps it"
        yield Advice(what=f"freeing the memory that grows, kept by{holder}", saved_bytes=held_bytes, how=growth.fix)


def _of_step(alive: Collection[Block], sizes: Mapping[str, int]) -> Iterator[Advice]:
    step_bytes = sizes.get(ACTIVATION, 0) + sizes.get(TEMPORARY, 0)
    if not step_bytes:
        return
    yield Advice(
        what="half the batch, with gradients accumulated over two",
        saved_bytes=step_bytes // 2,
        how="call `backward()` on `loss / 2` for each half, and `optimizer.step()` after both: the same gradients",
    )
    parent, saved_bytes, blocks_count = _checkpointed(alive)
    if saved_bytes:
        yield Advice(
            what=f"checkpointing each of the {blocks_count} blocks of `{parent}`"
            if parent
            else f"checkpointing each of the {blocks_count} blocks",
            saved_bytes=saved_bytes,
            how="`torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` in place of `block(x)`: about a third slower",
        )


def _checkpointed(alive: Collection[Block]) -> tuple[str, int, int]:
    """(where the blocks are, bytes, how many): one block's activations are made again at a time, the others' are not kept."""
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block in alive:
        found = _NUMBERED.match(block.module)
        if found is not None and category(block) == ACTIVATION:
            sizes[found[1]][found[2]] += block.bytes
    savings = [(sum(each.values()) - max(each.values()), parent, len(each)) for parent, each in sizes.items() if len(each) > 1]
    saved_bytes, parent, count = max(savings, default=(0, "", 0))
    return parent, saved_bytes, count


def _of_optimizer(sizes: Mapping[str, int]) -> Iterator[Advice]:
    state_bytes = sizes.get(OPTIMIZER_STATE, 0)
    if state_bytes:
        yield Advice(
            what="an 8-bit optimizer", saved_bytes=state_bytes * 3 // 4, how="such as `bitsandbytes.optim.AdamW8bit`", changes_training=True
        )
        how = "`torch.optim.SGD` without momentum: training changes"
        yield Advice(what="an optimizer without state", saved_bytes=state_bytes, how=how, changes_training=True)


def _in_half(sizes: Mapping[str, int]) -> Iterator[Advice]:
    yield Advice(
        what="bfloat16 in the forward pass",
        saved_bytes=sizes.get(ACTIVATION, 0) // 2,
        how="`with torch.autocast(device_type, dtype=torch.bfloat16):` around the forward pass and the loss, if they run in float32 now",
        changes_training=True,
    )


def _defragmented(unused_bytes: int) -> Iterator[Advice]:
    if unused_bytes:
        yield Advice(
            what="less fragmentation",
            saved_bytes=unused_bytes,
            how=f"`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before the process starts: {byte_size(unused_bytes)} are reserved in "
            "blocks too small to use. `empty_cache()` releases only whole segments, and the next step reserves them again",
        )
