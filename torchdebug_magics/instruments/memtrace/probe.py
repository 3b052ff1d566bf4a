"""The memtrace probe: when each part begins and ends; and its report: who keeps what, what grows, why memory was refused."""

from __future__ import annotations

import gc
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Literal

from torchdebug_magics.errors import refuse
from torchdebug_magics.format import byte_size
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.memtrace.growth.course import Course
from torchdebug_magics.instruments.memtrace.growth.growth_watch import GrowthWatch, Run, rerun_growth
from torchdebug_magics.instruments.memtrace.growth.line_growth import leaking
from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
from torchdebug_magics.instruments.memtrace.held.keepers import Deletions, HandledErrors, Keepers, holders
from torchdebug_magics.instruments.memtrace.held.process_growth import device_memory, given_out_bytes, kept_free_bytes
from torchdebug_magics.instruments.memtrace.held.reference_cycles import CycleWatch, kept_by_cycles
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger, Phases, Place, Places, by_category, by_module, category
from torchdebug_magics.instruments.memtrace.ledger.memory_snapshot import Snapshot
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import Census, Tracer, refused_bytes
from torchdebug_magics.instruments.memtrace.report import MemtraceReport
from torchdebug_magics.instruments.memtrace.trace import (
    ACTIVATION,
    HELD_BEFORE,
    OPTIMIZER_STATE,
    TEMPORARY,
    Advice,
    Growth,
    LiveMemory,
    Oom,
    Peak,
    Phase,
    Timeline,
    TraceMark,
    Undeleted,
)
from torchdebug_magics.machine.process import rss_bytes
from torchdebug_magics.memory.gauges import GaugedProbe
from torchdebug_magics.memory.gauges import ledger as marks
from torchdebug_magics.probing.dispatch import others_listen
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import live_modules, parts_of
from torchdebug_magics.probing.source.syntax import loops_around, tree_of
from torchdebug_magics.probing.source.user_code import excerpt, locate, location, user_frame
from torchdebug_magics.probing.storages import shards_note
from torchdebug_magics.report import Location, Mark

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
_HALVES = "call `backward()` on `loss / 2` for each half, and `optimizer.step()` after both: the same gradients"
_BFLOAT16 = "`with torch.autocast(device_type, dtype=torch.bfloat16):` around the forward pass and the loss, if they run in float32 now"
_SEGMENTS = (
    "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before the process starts: {} are reserved in "
    "blocks too small to use. `empty_cache()` releases only whole segments, and the next step reserves them again"
)


class MemtraceProbe(GaugedProbe):
    """See `memtrace`."""

    def __init__(
        self,
        context: CellContext = SCRIPT,
        *,
        light: bool = False,
        every_step: bool = False,
        guard: str | float | None = None,
        snapshot: str | Path | None = None,
        compare: bool = False,
    ) -> None:
        refuse(compare, "--compare watches no cell: write `%memtrace --compare a b` on a line of its own, for two reports kept with -o")
        super().__init__(guard)
        self.is_light = light
        runs = context.earlier_runs()
        self.runs: deque[Run] = deque() if runs is None else runs
        """What the earlier runs of the same cell have left."""
        self.snapshot = None if snapshot is None else Snapshot(snapshot, self.guard)
        self._hooks = Hooks(self.guard)
        self.phases = Phases()
        self.ledger = Ledger(self.phases.now)
        self.marks: list[tuple[TraceMark, int]] = []
        """Each with the clock of the ledger."""
        self.start_free_bytes = 0
        self._places = Places(Place)
        self.steps = Steps(given_out_bytes, every=every_step)
        self.cycles = CycleWatch(self.ledger, self._places)
        self.handled = HandledErrors(self.ledger)
        self.growth = GrowthWatch(self.ledger, self.steps, self._places, self.cycles, partial(others_listen, self._hooks))
        risen = partial(self.guard.run, "the look for cycles", self.cycles.look)
        self.tracer = Tracer(self.ledger, self._places, self._hooks, self.guard, risen)
        self._course = Course(self.tracer, self.phases, self.growth, self.handled, self.guard, is_light=light)
        self.deletions = Deletions(None)
        self._report: MemtraceReport | None = None

    def attach(self, stack: ExitStack) -> None:
        """Take the census, and follow what comes."""
        if not self.is_light:  # it visits every object of the process
            gc.collect()
        census = Census()
        parts = parts_of(census.modules)
        self.tracer.begins([module for module in census.modules if id(module) not in parts])
        self.tracer.adopt_all(census)
        self.deletions = Deletions(self._places.user_frame(sys._getframe()))
        self.ledger.begin()
        self.cycles.begins()
        if self.snapshot is not None:
            self.snapshot.attach(stack)
        stack.push(self._ended)
        self.begin(stack)
        self._opened.enter_context(marks().told_to(self._marked))
        self.start_free_bytes = kept_free_bytes()
        self._course.attach(stack, census.modules)
        if self.memory_guard is not None:
            stack.enter_context(self.memory_guard.watching())

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self.tracer.off()
        self.stop()
        if self.snapshot is not None:
            self.snapshot.stop()
        self._hooks.sweep(self._course.modules())

    def report(self) -> MemtraceReport:
        """What was found."""
        if self._report is None:
            self._report = self.guard.run("the report on what was seen", self._concluded, None)
        if self._report is None:
            raise AssertionError(self.guard.problems)
        return self._report

    def shown(self) -> LiveMemory:
        """The gauges and the ledger now."""
        total, now = self.ledger.total, self.phases.now
        return LiveMemory(total.now_bytes, total.peak_bytes, now.phase, self.steps.count, self.gauges.read())

    def _marked(self, mark: Mark) -> None:
        clock = self.ledger.clock
        self.marks.append((TraceMark(**vars(mark), torch_bytes=self.ledger.total.now_bytes, phase=self.ledger.span.phase), clock))

    def _ended(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._report = self.guard.run("the end of the trace", self._concluded, error)
        self.ledger.close()

    def _concluded(self, error: BaseException | None) -> MemtraceReport:
        self._course.end()
        self.growth.ends()
        if note := shards_note(  # of a generator, as a list would hold what is waiting for the collector
            (parameter for module in live_modules() for parameter in module._parameters.values() if parameter is not None), "sizes are"
        ):
            self.guard.note(note)
        return concluded(self, error)


watch = MemtraceProbe


def concluded(probe: MemtraceProbe, error: BaseException | None) -> MemtraceReport:
    """The report; the ledger is complete then, and may be closed."""
    ledger, tracer, steps, guard = probe.ledger, probe.tracer, probe.steps, probe.guard
    cycles = guard.run("the look for cycles", probe.cycles.end) or ()
    ledger.counted_until = ledger.clock
    tracer.adopt_all(Census())
    alive, made = _alive(ledger)
    if probe.is_light:  # to collect, and to find out who holds what, visits every object of the process
        is_much = sum(block.bytes for block in made) >= _LEAST_UNNAMED
        if leaking(made, steps) if steps.count else is_much:
            gc.collect()
            ledger.settle()
            alive, made = _alive(ledger)
        elif not is_much:
            made = []
    keepers = Keepers(made, [] if error is None else [("the error", error)], carried=probe.growth.carried)
    found = guard.run("the look for growth", probe.growth.found, made, keepers, ledger.total.peak_bytes)
    growth, graph_growth = found or (None, None)
    handled = probe.handled.found(ledger.total.peak_bytes)
    oom = guard.run("explaining the refusal", _out_of_memory, probe, error, alive, growth, handled)
    limit, allocators = probe.gauges.limit(), probe.gauges.allocators()
    net_bytes = rss_bytes() - probe.start_bytes
    sites, total, last, at_peak = ledger.sites, ledger.total, ledger.peak_block, ledger.at_peak()
    # Of what is there without being a part of a model: that to which no name leads, or of which it was not asked.
    unnamed_bytes = sum(block.bytes for block in made if not block.died and not block.role and not keepers.of(block).path)
    sites.fold([*ledger.gone, *alive])
    report = MemtraceReport(
        net_bytes=total.now_bytes - total.start_bytes,
        start_bytes=total.start_bytes,
        peak_bytes=total.peak_bytes,
        peak=Peak(
            phase=ledger.span.phase if last is None else last.span.phase,
            op=ledger.peak_op.removesuffix(".default"),
            location=None if last is None or last.place is None else last.place.location,
            by_category=by_category(at_peak),
            by_module=by_module(at_peak),
        ),
        devices=device_memory(ledger, probe.allocators_before.values(), allocators),
        untraced_bytes=sites.fold_unseen([*ledger.gone, *alive]),
        sites=sites.rows(),
        growth=growth,
        graph_growth=graph_growth,
        collects=probe.growth.collects,
        rerun_growth=guard.run("the look at earlier runs", rerun_growth, probe.runs, made, keepers, alive, trains=probe.phases.trains),
        holders=holders(keepers, made),
        cycles=cycles,
        kept_by_cycles=kept_by_cycles(cycles, total.peak_bytes),
        oom=oom,
        undeleted=handled or guard.run("the look at what was deleted", probe.deletions.found, made, keepers, total.peak_bytes),
        unnamed_bytes=unnamed_bytes if unnamed_bytes >= max(_LEAST_UNNAMED, _LARGE_PART * (total.now_bytes - total.start_bytes)) else 0,
        unseen_loop=_unseen_loop(ledger) if steps.count <= 1 else None,
        freed_before_bytes=sites.freed_before_bytes,
        rss_peak_bytes=probe.peak.peak().size_bytes,
        rss_net_bytes=net_bytes,
        process_grown_bytes=0 if growth is not None else probe.growth.process.grown_bytes(steps.count + 1),
        heap_kept_bytes=max(0, min(net_bytes, kept_free_bytes() - probe.start_free_bytes)),
        limit_bytes=None if limit is None else limit.limit_bytes,
        limit="" if limit is None else limit.whose,
        borrowed_bytes=tracer.borrowed_bytes,
        mapped_bytes=tracer.mapped_bytes,
        marks=tuple(mark for mark, _ in probe.marks),
        interrupts=probe.interrupts,
        snapshot="" if probe.snapshot is None else guard.run("writing the snapshot", probe.snapshot.write, ledger) or "",
        timeline=timeline(ledger, probe.phases, [clock for _, clock in probe.marks]),
        ops_count=tracer.ops_count,
        steps_count=steps.count,
        followed_count=0 if probe.is_light else len(steps.followed),
        is_light=probe.is_light,
    )
    lead = report.main_finding()
    where = None if lead is None else lead.fix_at
    lines = guard.run("reading the line", excerpt, where) if where is not None else None
    return replace(report, excerpt=lines or (), problems=tuple(guard.problems))


def _alive(ledger: Ledger) -> tuple[list[Block], list[Block]]:
    """All blocks, and those of the cell."""
    alive = list(ledger.live.values())
    return alive, [block for block in alive if not block.is_old]


def _unseen_loop(ledger: Ledger) -> Location | None:
    """Around the line that allocated most often, where it did so again and again."""
    lines = Counter(block.place for block in ledger.events if block.place is not None and not block.died)
    place = max(lines, key=lambda line: lines[line], default=None)
    loops = loops_around(tree_of(place.file), place.line) if place is not None and lines[place] >= _SEVERAL else []
    return location(place.file, loops[-1].lineno, place.function) if place is not None and loops else None


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
        stretches=tuple(_stretches(phases, clocks)),
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


def _stretches(phases: Phases, clocks: tuple[int, ...]) -> Iterator[tuple[Phase, int]]:
    """Where each phase began, by the points of the picture; what is shorter than a point is not there."""
    at, said = 0, 0
    for span, following in zip(phases.spans, [*phases.spans[1:], None], strict=True):
        while at < len(clocks) and clocks[at] <= span.first:
            at += 1
        end = clocks[-1] + 1 if following is None else following.first
        if at < len(clocks) and clocks[at] <= end and said < _STRETCHES:
            said += 1
            yield span.phase, at


def _out_of_memory(
    probe: MemtraceProbe, error: BaseException | None, left: Collection[Block], growth: Growth | None, handled: Undeleted | None
) -> Oom | None:
    """Why memory was refused, and what would help; `left` is what was alive at the end, `handled` what an error that was handled holds."""
    refused = refused_by(error)
    if refused is None:
        return None
    noted = probe.tracer.out_of_memory  # as the op raised, where it was followed
    noted = noted if noted is not None and noted.error_id == id(refused) else None
    frame = next((user_frame(frame) for frame, _ in reversed(list(walk_tb(refused.__traceback__)))), None)
    where = locate(frame) if frame is not None else None
    alive = left if noted is None else noted.alive
    sizes = by_category(alive)
    live_bytes, asked_bytes = sum(sizes.values()), refused_bytes(refused) or 0
    unused_bytes = sum(one.reserved_bytes - one.allocated_bytes for one in probe.gauges.allocators())
    kind: Literal["sizing", "leak", "fragmentation", "handled error"] = "sizing" if growth is None else "leak"
    if unused_bytes > max(asked_bytes, int(_MANY_UNUSED * live_bytes)):
        kind = "fragmentation"
    return Oom(
        asked_bytes=asked_bytes,
        op="" if noted is None else noted.op.removesuffix(".default"),
        module="" if noted is None else noted.module,
        location=where if noted is None or noted.place is None else noted.place.location,
        phase="other" if noted is None else noted.span.phase,
        iteration=probe.steps.count,
        kind="handled error" if handled is not None else kind,
        live_bytes=live_bytes,
        by_category=sizes,
        by_module=by_module(alive),
        unused_reserved_bytes=unused_bytes,
        advice=tuple(one for one in _advice(alive, sizes, growth, unused_bytes, handled) if one.saved_bytes > _WORTH * live_bytes),
    )


def refused_by(error: BaseException | None) -> BaseException | None:
    """The error by which memory was refused, of those that led to this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (RuntimeError, MemoryError)) and refused_bytes(error) is not None:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _advice(
    alive: Collection[Block], sizes: Mapping[str, int], growth: Growth | None, unused_bytes: int, handled: Undeleted | None
) -> Iterator[Advice]:
    """What is easy and changes nothing first; the cause last."""
    activation_bytes, state_bytes = sizes.get(ACTIVATION, 0), sizes.get(OPTIMIZER_STATE, 0)
    blocks, checkpointed_bytes = _checkpointed(alive)
    halved_bytes = (activation_bytes + sizes.get(TEMPORARY, 0)) // 2
    how = "`torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` in place of `block(x)`: about a third slower"
    yield Advice("half the batch, with gradients accumulated over two", halved_bytes, _HALVES)
    yield Advice(blocks, checkpointed_bytes, how)
    yield Advice("an 8-bit optimizer", state_bytes * 3 // 4, "such as `bitsandbytes.optim.AdamW8bit`", changes_training=True)
    how = "`torch.optim.SGD` without momentum: training changes"
    yield Advice("an optimizer without state", state_bytes, how, changes_training=True)
    yield Advice("bfloat16 in the forward pass", activation_bytes // 2, _BFLOAT16, changes_training=True)
    yield Advice("less fragmentation", unused_bytes, _SEGMENTS.format(byte_size(unused_bytes)))
    if growth is not None:
        holder = f"`{growth.holder}`" if growth.holder else "the variable that keeps it"
        held_bytes = growth.bytes_per_iteration * growth.iterations_count
        yield Advice(f"freeing the memory that grows, kept by {holder}", held_bytes, growth.fix)
    if handled is not None:
        yield Advice("retrying after the `except` block, not in it", handled.live_bytes, handled.fix)


def _checkpointed(alive: Collection[Block]) -> tuple[str, int]:
    """(which blocks, bytes saved): one block's activations are made again at a time, the others' are not kept."""
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block in alive:
        found = _NUMBERED.match(block.module)
        if found is not None and category(block) == ACTIVATION:
            sizes[found[1]][found[2]] += block.bytes
    savings = [(sum(each.values()) - max(each.values()), parent, len(each)) for parent, each in sizes.items() if len(each) > 1]
    saved_bytes, parent, count = max(savings, default=(0, "", 0))
    return f"checkpointing each of the {count} blocks{f' of `{parent}`' if parent else ''}", saved_bytes
