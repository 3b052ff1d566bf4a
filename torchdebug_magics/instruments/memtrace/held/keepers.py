"""Who keeps what: the variables that hold the blocks which outlived the cell, or which grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.held.fixes import collection, root
from torchdebug_magics.instruments.memtrace.ledger.memory_census import ACTIVATION, OTHER, TEMPORARY
from torchdebug_magics.instruments.memtrace.ledger.sites import category
from torchdebug_magics.instruments.memtrace.report import Holder
from torchdebug_magics.probing.holders import find_holders

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block
    from torchdebug_magics.probing.holders import Owner

__all__ = ["Keepers", "holders"]

_ASKED = 2000
"""Storages asked for at most, the largest: a report shows a few."""
_SHOWN = 20
_MANY, _FAR_MORE = 3, 2


class Keepers:
    """Paths of blocks, found by one walk over the namespace, the running calls and the modules.

    A variable that is `carried` from one iteration into the next is what keeps a history, and not one that is only made of it.
    """

    def __init__(self, blocks: Iterable[Block], extra_roots: Iterable[tuple[str, object]] = (), *, carried: Collection[str] = ()) -> None:
        extra_roots = list(extra_roots)
        self.has_error = bool(extra_roots)
        """Whether an error may be what keeps them, as its traceback holds all that the calls held."""
        wanted = sorted(((block.ref.key, block) for block in blocks if block.ref is not None), key=lambda one: -one[1].bytes)[:_ASKED]
        found = find_holders([key for key, _ in wanted], extra_roots=extra_roots, first=carried) if wanted else None
        self.is_whole = found is None or found.is_whole
        paths: Mapping[int, str] = {} if found is None else found.paths
        self._wanted = [block for _, block in wanted]
        self._paths = {id(block): paths[key] for key, block in wanted if key in paths}
        self._slices = frozenset(id(block) for key, block in wanted if found is not None and key in found.slices)
        self._bounded = frozenset(id(block) for key, block in wanted if found is not None and key in found.bounded)
        self._owners = {id(block): found.owners[key] for key, block in wanted if found is not None and key in found.owners}
        self._shared = frozenset(id(block) for key, block in wanted if found is not None and found.others.get(key))
        self._with_history = frozenset(id(block) for key, block in wanted if found is not None and key in found.with_history)

    def _is_unnamed(self, blocks: Iterable[Block], held: Collection[Block]) -> bool:
        """Whether far more of them are alive without a name: what holds so few is not what keeps them."""
        asked = {id(block) for block in self._wanted}
        unnamed = [block for block in blocks if not block.died and id(block) in asked and id(block) not in self._paths]
        return len(unnamed) >= _MANY and _size(unnamed) > _FAR_MORE * _size(held)

    def path(self, blocks: Collection[Block]) -> str:
        """Of the variable that holds most of them: the path to the first one in it; empty where that is no name for most of it.

        One that holds what a single iteration made has only its last value, however large that is; others hold more and more.
        """
        found: dict[str, list[Block]] = defaultdict(list)
        for block in blocks:
            if id(block) in self._paths:
                found[collection(self._paths[id(block)])].append(block)
        most = max(found.values(), key=lambda held: (len({block.iteration for block in held}) > 1, _size(held)), default=())
        if self.is_whole and self._is_unnamed(blocks, most):
            return ""
        return next((self._paths[id(block)] for block in most), "")

    def owner(self, path: str) -> Owner | None:
        """Whose attribute holds what is at that path; None where it is a variable's."""
        return next((self._owners.get(id(block)) for block in self._wanted if self.of(block) == path), None)

    def by_graph(self, leaks: Iterable[Iterable[Block]]) -> tuple[int, int]:
        """(bytes that are held with a graph or by way of one, bytes of plain tensors): the latter are not freed by cutting a graph off."""
        alive = [block for blocks in leaks for block in blocks if not block.died]
        in_graph = _size(block for block in alive if "grad_fn" in self.of(block) or id(block) in self._with_history)
        return in_graph, _size(alive) - in_graph

    def frees_bytes(self, path: str, *, graphs: bool) -> int:
        """What is gone when the variable at that path lets go of all, or of the graphs alone: what no other root leads to."""
        alone = (block for block in self.beside(path) if id(block) not in self._shared and not block.died)
        return _size(block for block in alone if not graphs or "grad_fn" in self.of(block))

    def unnamed_bytes(self, blocks: Iterable[Block]) -> int:
        """Of what is there without being a part of a model: that to which no name leads, or of which it was not asked."""
        return _size(block for block in blocks if not block.died and not block.role and id(block) not in self._paths)

    def beside(self, path: str) -> list[Block]:
        """All that the variable at that path holds, and what is in the graphs that it keeps."""
        return [block for block in self._wanted if collection(self.of(block)) == collection(path)]

    def holds_most(self, blocks: Iterable[Block], path: str) -> bool:
        """Whether the variable at that path holds the larger part of those that are still there."""
        alive = [block for block in blocks if not block.died]
        held = [block for block in alive if collection(self._paths.get(id(block), "")) == collection(path)]
        return 2 * _size(held) > _size(alive)

    def are_bounded(self, blocks: Iterable[Block]) -> bool:
        """Whether what holds them has a limit."""
        return any(id(block) in self._bounded for block in blocks)

    def are_slices(self, blocks: Iterable[Block]) -> bool:
        """Whether most of them are held only for a part of each."""
        blocks = list(blocks)
        return 2 * _size(block for block in blocks if id(block) in self._slices) > _size(blocks)

    def have_history(self, blocks: Iterable[Block]) -> bool:
        """Whether some are held with the graph that made them."""
        return any(id(block) in self._with_history for block in blocks)

    def have_graph(self, blocks: Iterable[Block]) -> bool:
        """Whether some are held with a graph, or by way of one; also where it is not known who holds one."""
        return any(id(block) in self._with_history or "grad_fn" in (self.of(block) or "grad_fn") for block in blocks if not block.died)

    def of(self, block: Block) -> str:
        """Empty where no name leads to it."""
        return self._paths.get(id(block), "")


def holders(keepers: Keepers, blocks: Iterable[Block]) -> tuple[Holder, ...]:
    """A row for each variable that holds some of the blocks, the most bytes first."""
    by_root: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        path = keepers.of(block)
        if path:
            by_root[root(path)].append(block)
    rows = [_holder(keepers, found) for found in by_root.values()]
    return tuple(sorted(rows, key=lambda row: -row.live_bytes)[:_SHOWN])


def _size(blocks: Iterable[Block]) -> int:
    return sum(block.bytes for block in blocks)


def _holder(keepers: Keepers, blocks: Collection[Block]) -> Holder:
    first = min(blocks, key=lambda block: block.born)
    largest = max(blocks, key=lambda block: block.bytes)
    path = keepers.of(first)
    if len(blocks) > 1 and not any(category(block) in {ACTIVATION, OTHER, TEMPORARY} for block in blocks):
        path = root(path)  # a model or an optimizer, as a whole
    return Holder(
        path=path,
        variable=root(path),
        live_bytes=_size(blocks),
        location=largest.place.location if largest.place is not None else None,
    )
