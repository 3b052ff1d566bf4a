"""Finds ranks that train on the same samples: by the settings of their `DistributedSampler`, or by equal rows in the first epoch."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.ranks.rank_sentences import ranks_named
from torchdebug_magics.ranks.report import RankFinding

if TYPE_CHECKING:
    from torchdebug_magics.ranks.compared import RankRecord, Samples

__all__ = ["shared_samples"]

_LEAST_SHARE, _LEAST_SHARED = 0.1, 4
"""Equal rows below that may be samples that the dataset holds twice, or that `DistributedSampler` repeats to fill the last batch."""


def shared_samples(records: Sequence[RankRecord], *, by_rows: bool) -> RankFinding | None:
    """The first dataset of which ranks draw the same samples, or repeat the order of an epoch; `by_rows`: compare the rows, too."""
    sources: dict[tuple[int, int], dict[int, Samples]] = defaultdict(dict)
    for record in records:
        for place, one in enumerate(record.compared.samples):
            sources[one.of, place][record.rank.rank] = one
    found = [finding for by_rank in sources.values() if len(by_rank) > 1 and (finding := _of_source(by_rank, by_rows=by_rows)) is not None]
    return min(found, key=lambda one: one.is_harmless, default=None)


def _of_source(by_rank: Mapping[int, Samples], *, by_rows: bool) -> RankFinding | None:
    if len({one.dataset_count for one in by_rank.values()}) > 1:
        return None  # each rank has a dataset of its own
    rows = _same_rows(by_rank) if by_rows else None
    counts = {one.replicas_count for one in by_rank.values()}
    if len(counts) == 1 and counts.pop() > 1:
        return _same_replica(by_rank) or _other_seed(by_rank) or rows or _same_order(by_rank)
    return rows


def _same_replica(by_rank: Mapping[int, Samples]) -> RankFinding | None:
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank, one in by_rank.items():
        ranks_of[one.replica].append(rank)
    replica, ranks = max(ranks_of.items(), key=lambda item: len(item[1]))
    if len(ranks) == 1 or next(iter(by_rank.values())).replicas_count != len(by_rank):
        return None  # ranks that share the work of one replica, as in tensor parallelism, draw for the same one
    return _finding(
        by_rank, ranks, f"{ranks_named(ranks)} draw the same samples: `DistributedSampler` has rank={replica} on each of them",
        "remove `rank=` from `DistributedSampler(dataset)`: by default it is `dist.get_rank()`",
    )  # fmt: skip


def _other_seed(by_rank: Mapping[int, Samples]) -> RankFinding | None:
    for epoch in range(min(len(one.seeds) for one in by_rank.values())):
        seeds = {rank: one.seeds[epoch] for rank, one in by_rank.items()}
        if len(set(seeds.values())) > 1:
            odd = [rank for rank in seeds if seeds[rank] != seeds[min(seeds)]]
            ranks = sorted({min(seeds), *odd})
            when = f" from epoch {epoch} on" if epoch else ""
            return _finding(
                by_rank, ranks,
                f"{ranks_named(ranks)} draw overlapping samples{when}: the seed or epoch of their `DistributedSampler` differs",
                "pass the same `seed` to `DistributedSampler` on every rank, and the same epoch to `set_epoch(epoch)`",
            )  # fmt: skip
    return None


def _same_rows(by_rank: Mapping[int, Samples]) -> RankFinding | None:
    if not all(one.rows for one in by_rank.values()):
        return None
    sketches = {rank: array("I", one.rows) for rank, one in by_rank.items()}
    last = min(map(max, sketches.values()))  # up to here the sketch of every rank is complete
    held = {rank: {row for row in rows if row <= last} for rank, rows in sketches.items()}
    counts = Counter(row for rows in held.values() for row in rows)
    shared = {row for row, count in counts.items() if count > 1}
    if len(shared) < max(_LEAST_SHARED, _LEAST_SHARE * len(counts)):
        return None
    ranks = [rank for rank, rows in held.items() if rows & shared]
    return _finding(
        by_rank, ranks, f"{ranks_named(ranks)} draw overlapping samples: {len(shared) / len(counts):.0%} of those of the first batches",
        "use `DataLoader(..., sampler=DistributedSampler(dataset))`: without it every rank shuffles the whole dataset",
    )  # fmt: skip


def _same_order(by_rank: Mapping[int, Samples]) -> RankFinding | None:
    if not all(len(one.seeds) > 1 and one.seeds[0] is not None and len(set(one.seeds)) == 1 for one in by_rank.values()):
        return None
    return _finding(
        by_rank, sorted(by_rank), "the samples come in the same order in every epoch: `DistributedSampler.set_epoch` was not called",
        "call `sampler.set_epoch(epoch)` at the start of every epoch", is_harmless=True,
    )  # fmt: skip


def _finding(by_rank: Mapping[int, Samples], ranks: Sequence[int], sentence: str, fix: str, *, is_harmless: bool = False) -> RankFinding:
    location = by_rank[min(ranks)].location
    return RankFinding(
        kind="same_batch", ranks=tuple(ranks), step=0, tensor="", location=location, fix=fix, sentence=sentence, is_harmless=is_harmless
    )
