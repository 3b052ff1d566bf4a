"""The ledger: what the cell is doing, every torch storage that is alive, the bytes over time, and what was alive at the peak."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchdebug_magics.instruments.memtrace.trace import ACTIVATION, OTHER, TEMPORARY, Phase, Site
from torchdebug_magics.probing.source.lines import Line, Lines

_MOST_SPANS = 1 << 13
"""Remembered for the picture."""
_MOST_GONE = 1 << 14
_MOST_EVENTS = 1 << 18
"""Births and deaths that are remembered for the picture; beyond them, old blocks that came and went are forgotten."""


@dataclass(eq=False)
class Span:
    """One stretch of one phase."""

    phase: Phase
    first: int = 0
    """Events of the ledger before it."""
    keeps_graph: bool = False
    """Whether gradients were enabled when it began."""
    is_between: bool = False
    """Whether it is none that a call, a backward pass or an update opened, whatever its name is: ops are then seen in every step."""
    model: int = 0
    """The id of the model whose call it is; 0 for none. Two models may have parts of the same path, and be called from one line."""


@dataclass
class Phases:
    """The spans so far. What precedes a backward pass is the loss, or without a model the forward: that is known when it begins."""

    spans: list[Span] = field(default_factory=lambda: [Span("other", is_between=True)])
    trains: bool = False
    """Whether there was a backward pass."""
    _forward_seen: bool = False
    """Whether a model was called since the last backward pass or update."""

    @property
    def now(self) -> Span:
        """The one that runs."""
        return self.spans[-1]

    def enter(self, phase: Phase, *, at: int, keeps_graph: bool) -> Span:
        """A phase begins; the one before it is over."""
        if phase == "backward" and self.now.phase == "other" and self.now.keeps_graph:
            self.now.phase = "loss" if self._forward_seen else "forward"
        self.trains |= phase == "backward"
        if phase in {"backward", "optimizer"}:
            self._forward_seen = False
        elif phase == "forward":
            self._forward_seen = True
        span = Span(phase, at, keeps_graph, is_between=phase == "other")
        if self.now.first == at:
            self.spans.pop()  # nothing happened in it
        self.spans.append(span)
        if len(self.spans) > _MOST_SPANS:
            del self.spans[: _MOST_SPANS // 2]
        return span


class Place(Line):
    """A line that allocates."""

    def __init__(self, file: str, line: int, function: str) -> None:
        super().__init__(file, line, function)
        self.steps: dict[Hashable, set[int]] = defaultdict(set)
        """By who asked, as `Block.source` has it: the steps in which it was seen to allocate."""
        self.count = 0
        """Allocations."""


Places = Lines[Place]
_AFTER_FORWARD = frozenset({"backward", "optimizer"})
_MADE_FOR_GRAPH = frozenset({"forward", "loss"})


class _Key(NamedTuple):
    place: Place | None
    module: str
    category: str
    phase: Phase


@dataclass
class Sites:
    """The rows so far."""

    freed_before_bytes: int = 0
    """Of blocks from before the watch."""
    _rows: dict[_Key, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    """Bytes that were allocated, those of them that are live, and how often."""
    _twins: dict[tuple[int, str], _Key] = field(default_factory=dict)
    """By size and role: which site made one like it."""

    def fold(self, blocks: Iterable[Block]) -> None:
        """Sum up blocks of which nothing more will be learnt."""
        for block in blocks:
            if block.is_old:
                self.freed_before_bytes += block.bytes if block.died else 0
            elif block.place is not None:
                self._add(_key(block), block)

    def fold_unseen(self, blocks: Sequence[Block]) -> int:
        """Sum up blocks that no op was seen to make; how many bytes are of no known line.

        In a step that was only counted, memory was made as in the steps before it: by the line that made a block of the same size and
        role, and of several such lines, by one whose block is still there, too.
        """
        alone_bytes = 0
        stayed: dict[int, list[_Key]] = defaultdict(list)
        for block in blocks:
            if not block.is_old and not block.died and block.place is not None and not block.role:
                stayed[block.bytes].append(_key(block))
        for at, block in enumerate(block for block in blocks if not block.is_old and block.place is None):
            like = stayed[block.bytes] if block.role in {"", ACTIVATION} else []
            twin = like[at % len(like)] if like else self._twins.get((block.bytes, block.role or ACTIVATION))
            alone_bytes += 0 if twin is not None or block.died else block.bytes
            self._add(twin or _key(block), block)
        return alone_bytes

    def rows(self) -> tuple[Site, ...]:
        """The most live bytes first, then the most allocated."""
        sites = [
            Site(
                location=None if key.place is None else key.place.location,
                module=key.module,
                category=key.category,
                phase=key.phase,
                allocated_bytes=allocated_bytes,
                live_bytes=live_bytes,
                count=count,
            )
            for key, (allocated_bytes, live_bytes, count) in self._rows.items()
        ]
        return tuple(sorted(sites, key=lambda site: (-site.live_bytes, -site.allocated_bytes)))

    def _add(self, key: _Key, block: Block) -> None:
        live_bytes = 0 if block.died else block.bytes
        self._rows[key] = [before + more for before, more in zip(self._rows[key], (block.bytes, live_bytes, 1), strict=True)]
        if block.place is not None:
            self._twins[block.bytes, key.category] = key


def _key(block: Block) -> _Key:
    return _Key(block.place, block.module, category(block), block.span.phase)


def category(block: Block) -> str:
    """What a block is, by its role, or by the phase that made it and whether it outlived that phase."""
    if block.role:
        return block.role
    stays = block.outlived or not block.died
    if block.span.phase in _MADE_FOR_GRAPH and stays:
        return ACTIVATION if block.span.keeps_graph else OTHER
    return OTHER if stays or block.is_old else TEMPORARY


def size_of(blocks: Iterable[Block]) -> int:
    """Bytes of all of them."""
    return sum(block.bytes for block in blocks)


def by_category(blocks: Iterable[Block]) -> dict[str, int]:
    """Bytes of each category, the most first."""
    return _summed((category(block), block.bytes) for block in blocks)


def by_module(blocks: Iterable[Block]) -> dict[str, int]:
    """Bytes that each module made, the most first."""
    return _summed((block.module, block.bytes) for block in blocks if block.module)


def _summed(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, size_bytes in sizes:
        found[name] += size_bytes
    return dict(found.most_common())


@dataclass
class Chain:
    """Tensors of which each was made of the one before, and more: ``hist = torch.cat([hist, x])``."""

    first_bytes: int
    first: int
    """The iteration of the first one."""
    dim: int | None = None
    """Along which it grows; None where it is not one."""
    latest: int = 0
    """The iteration in which it grew last."""
    count: int = 1
    """Iterations in which it grew, the first one included."""

    def grew(self, iteration: int) -> None:
        """Once more."""
        self.count += iteration not in {self.first, self.latest}
        self.latest = iteration


@dataclass(slots=True, eq=False)
class Block:
    """One storage, from its birth to its death."""

    bytes: int
    device: str
    span: Span
    place: Place | None
    module: str
    role: str = ""
    """What it was found to be: a parameter, a gradient, ...; empty where only its phase tells."""
    is_old: bool = False
    """Whether it was there before the watch."""
    is_called: bool = False
    """Whether it is a parameter of a model that was called."""
    is_returned: bool = False
    """Whether the call of a model gave it back, so that whoever called it may keep it."""
    iteration: int = 0
    nth: int = 0
    """Of those that its line made."""
    born: int = 0
    died: int = 0
    """Events before its death; 0 while it is alive."""
    outlived: bool = False
    """Whether it was still there when the phase of its birth was over."""
    used_up: bool = False
    """Whether a backward pass let it go, as it needed it no more."""
    ref: _Ref | None = None
    chain: Chain | None = None

    @property
    def source(self) -> tuple[str, bool, int]:
        """Which of those who allocate at one line asked for it: (module, whether in a backward pass or an update, model)."""
        return self.module, self.span.phase in _AFTER_FORWARD, self.span.model


class _Ref(weakref.ref["torch.UntypedStorage"]):
    __slots__ = ("block", "key")
    block: Block
    key: int


@dataclass
class Book:
    """The bytes of one device, or of all."""

    start_bytes: int = 0
    now_bytes: int = 0
    peak_bytes: int = 0

    def add(self, change_bytes: int) -> bool:
        """Whether this is the most so far."""
        self.now_bytes += change_bytes
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes = self.now_bytes
            return True
        return False


@dataclass
class Ledger:
    """Follows storages by weak references: a block dies when the last tensor and the last graph node let go of it."""

    span: Span
    """The phase that runs."""
    live: dict[int, Block] = field(default_factory=dict)
    """By the address of the C++ storage."""
    total: Book = field(default_factory=Book)
    devices: dict[str, Book] = field(default_factory=lambda: defaultdict(Book))
    peak_at: int = 0
    peak_block: Block | None = None
    """By which it was reached; None where that was at the start."""
    peak_op: str = ""
    first_event: int = 0
    """The clock when the watch began."""
    events: list[Block] = field(default_factory=list)
    """Each block at its birth and at its death; of those from before the watch, the death alone."""
    old: list[Block] = field(default_factory=list)
    """All that was there before the watch."""
    gone: list[Block] = field(default_factory=list)
    """Blocks that died, and are not yet summed up."""
    sites: Sites = field(default_factory=Sites)
    op: str = ""
    """The op that runs."""
    rises_at_bytes: int = sys.maxsize
    """When as much is alive, whoever looks at what is alive wants to be told."""
    counted_from: int = 0
    """The clock when for the first time a step was only counted."""
    counted_until: int = sys.maxsize
    """The clock at the end, before what was made in such steps is looked for."""
    _since_peak: list[Block] = field(default_factory=list)
    _clock: int = 0
    _dead: deque[_Ref] = field(default_factory=deque)
    """Of storages that died since the last look. No code of ours runs when one dies: an interrupt that came in it would be swallowed."""
    _most_events: int = _MOST_EVENTS

    @property
    def clock(self) -> int:
        """Births and deaths until now."""
        self.settle()
        return self._clock

    def settle(self) -> None:
        """Book the deaths since the last look; what follows, a birth or another phase, comes after them."""
        while self._dead:
            ref = self._dead.popleft()
            if self.live.get(ref.key) is ref.block:
                self._bury(ref.key, ref.block)

    def known(self, storage: torch.UntypedStorage) -> Block | None:
        """The block of a storage; one whose size has changed dies, and its remainder is born anew, by the hand that made it."""
        if self._dead:
            self.settle()
        block = self.live.get(storage._cdata)
        if block is None or block.bytes == (size_bytes := storage.nbytes()):
            return block
        self._bury(storage._cdata, block)
        again = Block(size_bytes, block.device, self.span, block.place, block.module)
        again.role, again.is_old, again.iteration = block.role, block.is_old, block.iteration
        return self.add(storage, again)

    def add(self, storage: torch.UntypedStorage, block: Block) -> Block:
        """A storage is born."""
        self.settle()
        ref = _Ref(storage, self._dead.append)
        ref.block, ref.key, block.ref = block, storage._cdata, ref
        self.live[ref.key] = block
        self._clock += 1
        block.born = self._clock
        self.events.append(block)
        self.devices[block.device].add(block.bytes)
        if self.total.add(block.bytes):
            self.peak_at, self.peak_block, self.peak_op = self._clock, block, self.op
            if self._since_peak:
                self._since_peak.clear()
        return block

    def begin(self) -> None:
        """All that is alive now was there before."""
        self.settle()
        for book in (self.total, *self.devices.values()):
            book.start_bytes = book.peak_bytes = book.now_bytes
        self.old = list(self.live.values())
        for block in self.old:
            block.is_old = True
        self.events.clear()
        self.first_event = self.peak_at = self._clock
        self.peak_block, self.peak_op = None, ""

    def at_peak(self) -> list[Block]:
        """What was alive when there was most."""
        self.settle()
        alive = [block for block in self.live.values() if block.born <= self.peak_at]
        return alive + self._since_peak

    def close(self) -> None:
        """Follow nothing any more: the references are dropped, with what they would call."""
        for block in [*self.live.values(), *self.gone]:
            block.ref = None
        self._dead.clear()

    def _bury(self, key: int, block: Block) -> None:
        del self.live[key]
        self._clock += 1
        block.died, block.ref = self._clock, None
        block.outlived = block.span is not self.span
        block.used_up = self.span.phase == "backward"
        self.events.append(block)
        self.total.now_bytes -= block.bytes
        self.devices[block.device].now_bytes -= block.bytes
        if block.born <= self.peak_at:
            self._since_peak.append(block)
        self.gone.append(block)
        if len(self.gone) > _MOST_GONE:
            self._thin_out()
        if len(self.events) > self._most_events:
            self._forget()

    def _thin_out(self) -> None:
        """Sum up the blocks that are gone and whose phase is over; where the phase is long, also those of which it could learn its name."""
        over = [block for block in self.gone if block.span is not self.span]
        rest = [block for block in self.gone if block.span is self.span]
        is_long = len(rest) > _MOST_GONE // 2
        self.sites.fold([*over, *rest] if is_long else over)
        self.gone = [] if is_long else rest

    def _forget(self) -> None:
        """Of the older half, leave out what was born and died in it, and was not alive at the peak."""
        middle = self._clock - len(self.events) // 2
        self.events[:] = [
            event for event in self.events if not event.died or event.died > middle or event.born <= self.peak_at < event.died
        ]
        self._most_events = max(_MOST_EVENTS, 2 * len(self.events))
