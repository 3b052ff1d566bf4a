"""Live bytes by category over the cell, at few enough points for a picture."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.ledger.sites import category
from torchdebug_magics.instruments.memtrace.report import HELD_BEFORE, Stretch, Timeline

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger
    from torchdebug_magics.instruments.memtrace.ledger.phases import Phases, Span

__all__ = ["timeline"]

_POINTS = 400
_STRETCHES = 200
"""More would be a blur."""


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
