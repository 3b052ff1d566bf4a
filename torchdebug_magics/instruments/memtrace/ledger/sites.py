"""What each line allocated, summed up block by block when a block is gone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.memtrace.ledger.memory_census import ACTIVATION, OTHER, TEMPORARY
from torchdebug_magics.instruments.memtrace.report import Site

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.findings import Phase
    from torchdebug_magics.instruments.memtrace.ledger.allocation_lines import Place
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block

__all__ = ["Sites", "by_category", "by_module", "category"]

_MADE_FOR_GRAPH = frozenset({"forward", "loss"})


class _Key(NamedTuple):
    place: Place | None
    module: str
    category: str
    phase: Phase


@dataclass
class _Row:
    allocated_bytes: int = 0
    live_bytes: int = 0
    count: int = 0


@dataclass
class Sites:
    """The rows so far."""

    freed_before_bytes: int = 0
    """Of blocks from before the watch."""
    _rows: dict[_Key, _Row] = field(default_factory=lambda: defaultdict(_Row))
    _twins: dict[tuple[int, str], _Key] = field(default_factory=dict)
    """By size and role: which site made one like it."""

    def fold(self, blocks: Iterable[Block]) -> None:
        """Sum up blocks of which nothing more will be learnt."""
        for block in blocks:
            if block.is_old:
                self.freed_before_bytes += block.bytes if block.died else 0
            elif block.place is not None:
                self._add(_Key(block.place, block.module, category(block), block.span.phase), block)

    def fold_unseen(self, blocks: Sequence[Block]) -> int:
        """Sum up blocks that no op was seen to make; how many bytes are of no known line.

        In a step that was only counted, memory was made as in the steps before it: by the line that made a block of the same size and
        role, and of several such lines, by one whose block is still there, too.
        """
        alone_bytes = 0
        stayed: dict[int, list[_Key]] = defaultdict(list)
        for block in blocks:
            if not block.is_old and not block.died and block.place is not None and not block.role:
                stayed[block.bytes].append(_Key(block.place, block.module, category(block), block.span.phase))
        for at, block in enumerate(one for one in blocks if not one.is_old and one.place is None):
            like = stayed[block.bytes] if block.role in {"", ACTIVATION} else []
            twin = like[at % len(like)] if like else self._twins.get((block.bytes, block.role or ACTIVATION))
            alone_bytes += 0 if twin is not None or block.died else block.bytes
            self._add(twin or _Key(None, block.module, category(block), block.span.phase), block)
        return alone_bytes

    def rows(self) -> tuple[Site, ...]:
        """The most live bytes first, then the most allocated."""
        sites = [
            Site(
                location=key.place.location if key.place is not None else None,
                module=key.module,
                category=key.category,
                phase=key.phase,
                allocated_bytes=row.allocated_bytes,
                live_bytes=row.live_bytes,
                count=row.count,
            )
            for key, row in self._rows.items()
        ]
        return tuple(sorted(sites, key=lambda site: (-site.live_bytes, -site.allocated_bytes)))

    def _add(self, key: _Key, block: Block) -> None:
        row = self._rows[key]
        row.allocated_bytes += block.bytes
        row.live_bytes += 0 if block.died else block.bytes
        row.count += 1
        if block.place is not None:
            self._twins[block.bytes, key.category] = key


def category(block: Block) -> str:
    """What a block is, by its role, or by the phase that made it and whether it outlived that phase."""
    if block.role:
        return block.role
    stays = block.outlived or not block.died
    if block.span.phase in _MADE_FOR_GRAPH and stays:
        return ACTIVATION if block.span.keeps_graph else OTHER
    return OTHER if stays or block.is_old else TEMPORARY


def by_category(blocks: Iterable[Block]) -> dict[str, int]:
    """Bytes of each category, the most first."""
    found: Counter[str] = Counter()
    for block in blocks:
        found[category(block)] += block.bytes
    return dict(found.most_common())


def by_module(blocks: Iterable[Block]) -> dict[str, int]:
    """Bytes that each module made, the most first."""
    found: Counter[str] = Counter()
    for block in blocks:
        if block.module:
            found[block.module] += block.bytes
    return dict(found.most_common())
