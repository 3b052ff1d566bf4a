"""Which steps of a loop are followed op by op: the first ones, and any of which a cheap counter says something new."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from torchdebug_magics.instruments.memtrace.ledger.blocks import Place

FIRST_STEPS = 4
"""Followed of each loop; of these the first makes gradients and optimizer states, and the others tell whether anything grows."""
FEWEST = 3
"""Iterations, or looks, from which one may speak of growth."""
_AGAIN = 4
"""Steps followed after the counter has told something new: as many as tell whether it goes on."""
NOISE_BYTES = 16 << 10
"""By which the heap of a process goes up and down from step to step, without any tensor."""
_UNSEEN_BYTES, _MUCH_BYTES = 128 << 10, 4 << 20
_UNKNOWN = -1
_NUMBERLESS = 1 << 62


@dataclass(frozen=True)
class Series:
    """What one holder had when some steps began: bytes or objects."""

    points: Sequence[tuple[int, int]]
    """(step, size), the earliest first."""

    @property
    def grown(self) -> int:
        """From the first look to the last."""
        return self.points[-1][1] - self.points[0][1]

    def is_steady(self, *, slack: float = 0, noise_part: float = 0, warm_up_part: float = 0) -> bool:
        """Whether there was ever more, and after each look at least half as much a step as before it.

        `slack` is what the last look may miss, `noise_part` the part of the growth by which it may go down in between, and
        `warm_up_part` the part of the steps that may load first what the others use.
        """
        least = (1 - warm_up_part) * (self.points[-1][0] - self.points[0][0])
        starts = range(max(1, len(self.points) - FEWEST) if warm_up_part else 1)
        later = (self.points[at:] for at in starts if self.points[-1][0] - self.points[at][0] >= least)
        return any(_grows(points, slack, noise_part) for points in later)


def _grows(points: Sequence[tuple[int, int]], slack: float, noise_part: float) -> bool:
    (begin, few), (end, many) = points[0], points[-1]
    is_as_fast = all(2 * (many - size + slack) * (at - begin) >= (size - few) * (end - at) for at, size in points[1:-1])
    return many > few and is_as_fast and all(later - earlier >= -noise_part * (many - few) for (_, earlier), (_, later) in pairwise(points))


@dataclass
class Loop:
    """The calls of one model from one place of a line: its steps' numbers, and what a counter told at the beginning of each."""

    place: Place | None
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Of its steps, among those of all loops."""
    heap: array[int] = field(default_factory=lambda: array("q"))
    """Bytes that the process, or the GPU's allocator, had given out; `_UNKNOWN` where the system does not tell."""
    nodes_per_step: int = 0
    """Autograd nodes made in one step, at most."""
    largest: int = 0
    """Elements of the largest input so far."""
    follow: int = FIRST_STEPS
    """How many more steps are followed."""
    usual_bytes: int = 0
    """By how much the heap grows in each step, as the followed ones told."""
    noise_bytes: int = NOISE_BYTES
    unseen_bytes: int = 0
    """By how much the heap grew in steps that were not followed, since some were."""
    most_unseen_bytes: int = _UNSEEN_BYTES
    """Beyond it, steps are followed again; then it is doubled, so that the same is looked at ever more rarely."""
    nodes_before: int = 0
    """Made since the start of the process, at its latest step."""

    @property
    def count(self) -> int:
        """Steps begun."""
        return len(self.numbers)

    def between(self, first: int, last: int) -> array[int]:
        """The numbers of its steps from `first` to the one before `last`."""
        return self.numbers[bisect_left(self.numbers, first) : bisect_left(self.numbers, last)]

    @property
    def is_counted(self) -> bool:
        """Whether the system tells what is given out."""
        return _UNKNOWN not in self.heap[-1:]

    def counted_bytes(self, after: int = 0) -> float:
        """By how much the heap grows in a step that is only counted, usually and on the whole; in others the watch itself takes some.

        Those up to number `after` do not count.
        """
        grown = [later - earlier for earlier, later in pairwise(self.heap) if _UNKNOWN not in {earlier, later}]
        grown = grown[max(FIRST_STEPS, bisect_right(self.numbers, after)) :] or [self.usual_bytes]
        return min(median(grown), fmean(grown))


class Steps:
    """Decides at each call of a model whether the step that begins is followed."""

    def __init__(self, heap: Callable[[], int | None], *, every: bool = False) -> None:
        self.loops: dict[Hashable, Loop] = {}
        self.followed: set[int] = set()
        """Numbers of the steps that were followed."""
        self.count = 0
        """Steps begun, of all loops."""
        self._trained = array("q")
        """Numbers of the steps with a backward pass."""
        self._backward = array("q")
        """Of these the ones in which it gave parameters their gradients."""
        self._clocks = array("q")
        """Events of the ledger before each step."""
        self._nodes = array("Q")
        """Autograd nodes made before each step."""
        self._heap = heap
        self._every = every
        self._first: Loop | None = None
        """The loop by which the step that runs began."""
        self._whole = True
        """Whether the step that runs is followed whole."""

    def step(self, key: Hashable, place: Place | None, size: int, nodes: int, clock: int, *, joins: bool, again: bool = False) -> bool:
        """The loop `key` goes round, with an input of `size` elements, and a step begins; whether that is followed.

        `joins`: it goes round in the step that runs; where it should be followed, the next one is. `again`: because the one before has
        shown something that must be followed to its end.
        """
        if not joins:
            self.count += 1
            self._clocks.append(clock)
            self._nodes.append(nodes)
        loop = self.loops.setdefault(key, Loop(place))
        heap_bytes = self._heap()
        self._learn(loop, heap_bytes)
        if loop.numbers:
            loop.nodes_per_step = max(loop.nodes_per_step, nodes - loop.nodes_before)
        loop.nodes_before = nodes
        loop.numbers.append(self.count)
        loop.heap.append(_UNKNOWN if heap_bytes is None else heap_bytes)
        if size > loop.largest:
            loop.follow, loop.largest = max(loop.follow, 1), size
        if not joins:
            self._first = loop
            self._whole = self._every or again or loop.heap[-1] == _UNKNOWN or loop.follow > 0
        if self._whole:
            loop.follow -= loop.follow > 0
            self.followed.add(self.count)
        elif joins and self._first is not None:
            self._first.follow = max(self._first.follow, loop.follow)
        return self._whole

    def looked(self) -> None:
        """What the watch itself has left on the heap is none of the step's that begins."""
        heap_bytes = self._heap()
        if self._first is not None and heap_bytes is not None:
            self._first.heap[-1] = heap_bytes

    def again(self, count: int) -> None:
        """Follow so many more steps."""
        if self._first is not None:
            self._first.follow = max(self._first.follow, count)

    @property
    def has_risen(self) -> bool:
        """Whether the heap has grown by much since a loop's first steps."""
        return any(loop.count > FIRST_STEPS and loop.heap[-1] - loop.heap[FIRST_STEPS] > _MUCH_BYTES for loop in self.loops.values())

    def trains(self, *, leaves: bool) -> None:
        """A backward pass begins; `leaves`: one that gives parameters their gradients, and is not only asked for some."""
        for numbers in (self._trained, self._backward) if leaves else (self._trained,):
            if not numbers or numbers[-1] != self.count:
                numbers.append(self.count)

    def is_training(self, loop: Loop | None, *, leaves: bool = False) -> bool:
        """Whether there was a backward pass since the first and before the last step of that loop; of any, where it is None."""
        numbers = self._backward if leaves else self._trained
        if loop is None or not loop.count:
            return bool(numbers)
        at = bisect_left(numbers, loop.numbers[0])
        return at < len(numbers) and numbers[at] < max(loop.numbers[-1], loop.numbers[0] + 1)

    def is_trained_in(self, loop: Loop) -> bool:
        """Whether there was a backward pass in a step of that loop, before another model was called."""
        return not set(self._trained).isdisjoint(loop.numbers)

    def accumulates(self, loop: Loop) -> bool:
        """Whether the only backward pass since that loop began came right after its last step: it is for all of them, as of an episode."""
        since = self._trained[bisect_left(self._trained, loop.numbers[0]) :]
        return len(since) == 1 and loop.numbers[-1] <= since[0] <= loop.numbers[-1] + 1

    @property
    def main(self) -> Loop | None:
        """The loop that went round most often."""
        return max(self.loops.values(), key=lambda loop: loop.count, default=None)

    def of(self, numbers: Sequence[int]) -> Loop | None:
        """The loop of those steps, in order; of two that went round in some of them, the one of the most."""
        wanted = set(numbers)
        shares = [(len(wanted.intersection(loop.between(numbers[0], numbers[-1] + 1))), loop) for loop in self.loops.values()]
        return max(shares, key=lambda share: share[0])[1] if any(share for share, _ in shares) else None

    def around(self, first: int, last: int, times: int) -> Loop | None:
        """The loop that goes round with something that happened `times` times, from step `first` to before step `last`.

        Of several, the one that went round least often in that time, and not less often than it happened; of such, the one in whose
        step it began.
        """
        counts = [(len(loop.between(first, last)), loop) for loop in self.loops.values()]
        enough = [count for count in counts if count[0] >= times]
        if not enough:
            return max(counts, key=lambda count: count[0])[1] if counts else None
        return min(enough, key=lambda one: (one[0], not one[1].between(first, first + 1)))[1]

    def clock_of(self, first: int, last: int) -> int:
        """Events before the last step of all loops that went round between step `first` and step `last`: what is there then, was kept."""
        inside = (loop.numbers[-1] for loop in self.loops.values() if len(loop.between(first, last + 1)))
        return self._clocks[max(inside, default=last) - 1]

    def of_node(self, number: int) -> int:
        """The step in which the autograd node with that sequence number was made; 0 before any, and of what has no such number."""
        return bisect_right(self._nodes, number) if number < _NUMBERLESS else 0

    def at(self, clock: int) -> int:
        """The step in which an event of the ledger was."""
        return bisect_left(self._clocks, clock)

    def _learn(self, loop: Loop, heap_bytes: int | None) -> None:
        if not loop.heap or heap_bytes is None or loop.heap[-1] == _UNKNOWN:
            return
        grown = heap_bytes - loop.heap[-1]
        surprise = abs(grown - loop.usual_bytes)
        if loop.count < FIRST_STEPS:
            loop.usual_bytes = grown
        elif surprise > loop.noise_bytes + abs(loop.usual_bytes) // 8:
            if self._whole:  # it was followed: whatever it was is known, and no reason to look again
                loop.usual_bytes, loop.noise_bytes = grown, max(loop.noise_bytes, 2 * surprise)
            else:
                loop.follow = max(loop.follow, _AGAIN)
        if not self._whole and loop.count >= FIRST_STEPS:
            loop.unseen_bytes += grown
            if loop.unseen_bytes > loop.most_unseen_bytes:
                loop.follow = max(loop.follow, _AGAIN)
                loop.unseen_bytes, loop.most_unseen_bytes = 0, 2 * loop.most_unseen_bytes
