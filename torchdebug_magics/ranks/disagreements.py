"""Finds where ranks differ that should agree, in one pass over the records of all ranks."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchdebug_magics.format import byte_size, number, plural
from torchdebug_magics.ranks.compared import Details, RankRecord, Samples
from torchdebug_magics.ranks.report import RankFinding, RankFindingKind
from torchdebug_magics.report import Location

_UNEVEN = 1.25
"""A rank that uses this many times the median is out of line."""
_LEAST_UNEVEN_BYTES = 16 << 20
_AFTER_START = frozenset({"replicas_part", "buffers_drift"})
Asked = Callable[[RankFindingKind, int | None, Sequence[int]], Mapping[int, Details]]
"""Returns the details of a moment on some ranks: the only data that rank 0 may have to request again."""
_LEAST_SHARE, _LEAST_SHARED = 0.1, 4
"""Equal rows below that may be samples that the dataset holds twice, or that `DistributedSampler` repeats to fill the last batch."""
_MOST_NAMED = 8
FIXES: Mapping[str, str] = {
    "bypassed": "call the model through its wrapper, as `ddp_model(x)`: after a call of `ddp_model.module` no gradient is averaged, "
    "because `DistributedDataParallel.forward` prepares that",
    "unsynced": "run the last backward pass of every step outside `no_sync()`: only that one averages the accumulated gradients",
    "late": "wrap the model in DistributedDataParallel after its last parameter is replaced, added or unfrozen: it averages only the "
    "gradients of parameters that required one when it was made",
    "averaged": "use the same optimizer options and the same GradScaler scale on every rank, and do not change gradients or weights on one "
    "rank alone: DistributedDataParallel has averaged the gradients",
    "own_buffers": "remove `broadcast_buffers=False` from `DistributedDataParallel(...)`: each forward then begins with rank 0's buffers; "
    "or convert the model with `nn.SyncBatchNorm.convert_sync_batchnorm(model)` (on GPUs)",
}
"""Of causes that a rank knows itself."""
SENTENCES: Mapping[RankFindingKind, Callable[[str, str, int | None, str], tuple[str, str]]] = {
    "initial_weights": lambda ranks, others, _, tensor: (
        f"the initial weights of {ranks} differ from {_those_of(others)}{_first(tensor)}",
        "call `torch.manual_seed(seed)` with the same seed on every rank before the model is made, and with `seed + rank` after it",
    ),
    "same_batch": lambda ranks, _, step, __: (
        f"{ranks} drew the same batch at every step" if not step else f"{ranks} drew the same batch from step {step} on",
        "use `DataLoader(..., sampler=DistributedSampler(dataset))`, or draw with a generator seeded with `seed + rank`",
    ),
    "replicas_part": lambda ranks, others, step, tensor: (
        f"the weights of {ranks} part from {_those_of(others)}{_after(step)}{_first(tensor)}",
        f"average the gradient of {f'`{tensor}`' if tensor else 'every parameter'} over the ranks before `optimizer.step()`: "
        "wrap its model in DistributedDataParallel, or call `all_reduce` on the gradient"
        if step != 0
        else "load or change weights on every rank, or before `DistributedDataParallel(model)`, which copies rank 0's to every rank",
    ),
    "buffers_drift": lambda ranks, others, step, tensor: (
        f"the buffers of {ranks} drift from {_those_of(others)}{_after(step)}{_first(tensor)}",
        (
            "call `dist.broadcast(buffer, 0)` for every buffer in `model.buffers()` before buffers are used or saved, or convert the model "
            "with `nn.SyncBatchNorm.convert_sync_batchnorm(model)` (on GPUs)"
        ),
    ),
    "shapes_differ": lambda ranks, others, _, tensor: (
        f"the shapes of {ranks} differ from {_those_of(others)}" + (f", first at {tensor}" if tensor else ""),
        "give every rank batches of the same size: `drop_last=True`, or pad to the longest over all ranks",
    ),
}
"""What differs, and what to change."""


class _Key(NamedTuple):
    kind: RankFindingKind
    step: int | None
    of: int


def disagreements(records: Sequence[RankRecord], details: Asked) -> tuple[RankFinding, ...]:
    """Every finding about the ranks themselves: faults before notes, the earliest first."""
    found = [_overflow(records), *_moments(records, details), _uneven(records)]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.is_harmless))


# The collective -----------------------------------------------------------------------------------------------------------
def _overflow(records: Sequence[RankRecord]) -> RankFinding | None:
    """A sum over ranks that is non-finite although the gradient of every rank is finite."""
    with_findings = [record for record in records if record.compared.found_at is not None]
    sums = [finding.compared.sum for finding in with_findings if finding.compared.is_received and finding.compared.sum is not None]
    if not sums or len(sums) < len(records):
        return None
    largest = max(sums, key=lambda one: one.local_peak)
    if sum(one.local_peak for one in sums) <= largest.limit:
        return None
    what = f" of {largest.tensor}" if largest.tensor else ""
    return RankFinding(
        kind="collective_overflow",
        ranks=tuple(finding.rank.rank for finding in with_findings),
        step=min(finding.compared.found_at[0] for finding in with_findings if finding.compared.found_at is not None),
        tensor=largest.tensor,
        location=largest.location,
        fix="sum the gradients in float32 (no fp16 in `register_comm_hook`), or divide by the world size before the sum",
        sentence=f"the gradients{what} are finite on each of {len(records)} ranks (up to {number(largest.local_peak)}), "
        f"and their sum over the ranks leaves the range of {largest.dtype} ({number(largest.limit)})",
    )


# What must agree, and what must not ----------------------------------------------------------------------------------------
def _moments(records: Sequence[RankRecord], details: Asked) -> list[RankFinding]:
    """The first disagreement of each kind."""
    digests: dict[_Key, dict[int, int]] = defaultdict(dict)
    places: dict[_Key, Location | None] = {}
    causes: dict[_Key, str] = {}
    for record in records:
        for moment in record.compared.moments:
            key = _Key(moment.kind, moment.step, moment.of)
            digests[key][record.rank.rank] = moment.digest
            places.setdefault(key, moment.location)
            causes[key] = causes.get(key) or moment.cause
    rank_findings: dict[RankFindingKind, RankFinding] = {}
    if (same := _same_samples(records, digests, places)) is not None:
        rank_findings["same_batch"] = same
    for key, held in sorted(digests.items(), key=lambda item: -1 if item[0].step is None else item[0].step):
        kind, step, of = key
        if kind == "same_batch" or kind in rank_findings or len(set(held.values())) < 2:  # noqa: PLR2004 - two that differ
            continue
        if kind in _AFTER_START and "initial_weights" in rank_findings and len(set(digests[_Key("replicas_part", 0, of)].values())) > 1:
            continue  # never equal: they do not part
        odd, usual = _odd_ones(held)
        named = details(kind, step, (usual, odd[0])).values()
        names = dict.fromkeys(name for one in named for name in one) if len(named) > 1 else ()
        tensor = next((name for name in names if len({one.get(name) for one in named}) > 1), "")  # the first, in model order
        finding = _finding(kind, odd, step, tensor, [rank for rank in held if rank not in odd], places[key])
        is_replaced = kind == "initial_weights" and len(set(digests[_Key("replicas_part", 0, of)].values())) == 1
        sentence = f"{finding.sentence}: DistributedDataParallel puts rank 0's in their place" if is_replaced else finding.sentence
        rank_findings[kind] = replace(finding, fix=FIXES.get(causes[key], finding.fix), sentence=sentence, is_harmless=is_replaced)
    if "replicas_part" in rank_findings:
        rank_findings.pop("buffers_drift", None)
    order = ("initial_weights", "same_batch", "replicas_part", "buffers_drift", "shapes_differ")
    return [rank_findings[kind] for kind in order if kind in rank_findings]


def _same_samples(
    records: Sequence[RankRecord], digests: Mapping[_Key, Mapping[int, int]], places: Mapping[_Key, Location | None]
) -> RankFinding | None:
    """The settings of samplers tell more than equal batches, and those more than equal rows."""
    found = None
    for of in dict.fromkeys(key.of for key in digests if key.kind == "same_batch"):
        batches = {key.step: held for key, held in digests.items() if key.kind == "same_batch" and key.of == of and len(held) > 1}
        if found is None and (same := _same_batch(batches)) is not None:
            found = _finding("same_batch", *same, "", (), places[_Key("same_batch", same[1], of)])
    shared = shared_samples(records, by_rows=found is None)
    return found if shared is None or (found is not None and shared.is_harmless) else shared


def _same_batch(batches: Mapping[int | None, Mapping[int, int]]) -> tuple[tuple[int, ...], int | None] | None:
    """The ranks that had the same batch at every compared step, and the first such step."""
    steps: dict[tuple[int, ...], list[int | None]] = defaultdict(list)
    for step, held in batches.items():
        for digest in set(held.values()):
            steps[tuple(rank for rank in held if held[rank] == digest)].append(step)
    return next(((ranks, at[0]) for ranks, at in steps.items() if len(ranks) > 1 and len(at) == len(batches)), None)


def _odd_ones(held: Mapping[int, int]) -> tuple[tuple[int, ...], int]:
    """The ranks that differ from the majority, or from the lowest rank where there is none, and one rank of that majority."""
    counted = Counter(held.values()).most_common()
    lowest = held[min(held)]
    usual = lowest if counted[0][1] == dict(counted)[lowest] else counted[0][0]
    return tuple(rank for rank, digest in sorted(held.items()) if digest != usual), min(rank for rank in held if held[rank] == usual)


def _finding(
    kind: RankFindingKind, ranks: tuple[int, ...], step: int | None, tensor: str, others: Sequence[int], location: Location | None
) -> RankFinding:
    sentence, fix = SENTENCES[kind](ranks_named(ranks), others_named(others), step, tensor)
    return RankFinding(kind=kind, ranks=ranks, step=step, tensor=tensor, location=location, fix=fix, sentence=sentence)


# Memory --------------------------------------------------------------------------------------------------------------------
def _uneven(records: Sequence[RankRecord]) -> RankFinding | None:
    """The rank that uses more memory than the others, and the line that makes the difference."""
    sizes = sorted((record.compared.size_bytes, record.rank.rank) for record in records if record.compared.size_bytes is not None)
    if len(sizes) < 2:  # noqa: PLR2004 - nothing to compare
        return None
    usual, most = sizes[(len(sizes) - 1) // 2][0], sizes[-1][0]
    if most < _UNEVEN * usual or most - usual < _LEAST_UNEVEN_BYTES:
        return None
    above = tuple(sorted(rank for size, rank in sizes if size >= _UNEVEN * usual and size - usual >= _LEAST_UNEVEN_BYTES))
    by_rank = {record.rank.rank: record.compared for record in records}
    other = by_rank[next(rank for size, rank in sizes if size == usual)]
    known = {(what, str(where)): size for what, size, where in other.sites}
    more = [(size - known.get((what, str(where)), 0), what, where) for what, size, where in by_rank[sizes[-1][1]].sites]
    extra, what, location = max((one for one in more if one[0] > 0), key=lambda one: one[0], default=(0, "", None))
    where = f": {byte_size(extra)} more in {what}" if what else ""
    others = others_named([rank for _, rank in sizes if rank not in above])
    return RankFinding(
        kind="uneven_memory",
        ranks=above,
        tensor=what,
        location=location,
        fix=f"do the same on every rank at {location}"
        if location is not None
        else "give every rank the same share of the data and of the model",
        sentence=f"{ranks_named(above)} used {byte_size(most)} where {others} used {byte_size(usual)}{where}",
    )


def shared_samples(records: Sequence[RankRecord], *, by_rows: bool) -> RankFinding | None:
    """The first dataset of which ranks draw the same samples, or repeat the order of an epoch; `by_rows`: compare the rows, too."""
    sources: dict[tuple[int, int], dict[int, Samples]] = defaultdict(dict)
    for record in records:
        for place, one in enumerate(record.compared.samples):
            sources[one.of, place][record.rank.rank] = one
    findings = [
        finding for by_rank in sources.values() if len(by_rank) > 1 and (finding := _of_source(by_rank, by_rows=by_rows)) is not None
    ]
    return min(findings, key=lambda finding: finding.is_harmless, default=None)


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
    return _samples_finding(
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
            return _samples_finding(
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
    return _samples_finding(
        by_rank, ranks, f"{ranks_named(ranks)} draw overlapping samples: {len(shared) / len(counts):.0%} of those of the first batches",
        "use `DataLoader(..., sampler=DistributedSampler(dataset))`: without it every rank shuffles the whole dataset",
    )  # fmt: skip


def _same_order(by_rank: Mapping[int, Samples]) -> RankFinding | None:
    if not all(len(one.seeds) > 1 and one.seeds[0] is not None and len(set(one.seeds)) == 1 for one in by_rank.values()):
        return None
    found = _samples_finding(
        by_rank, sorted(by_rank), "the samples come in the same order in every epoch: `DistributedSampler.set_epoch` was not called",
        "call `sampler.set_epoch(epoch)` at the start of every epoch",
    )  # fmt: skip
    return replace(found, is_harmless=True)


def _samples_finding(by_rank: Mapping[int, Samples], ranks: Sequence[int], sentence: str, fix: str) -> RankFinding:
    return RankFinding(kind="same_batch", ranks=tuple(ranks), step=0, location=by_rank[min(ranks)].location, fix=fix, sentence=sentence)


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 2 and 5``."""
    shown = [str(rank) for rank in ranks[:_MOST_NAMED]] + ([f"{len(ranks) - _MOST_NAMED} more"] if len(ranks) > _MOST_NAMED else [])
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def others_named(ranks: Sequence[int]) -> str:
    """``rank 0``, or ``the others``."""
    return ranks_named(ranks) if len(ranks) == 1 else "the others"


def _those_of(others: str) -> str:
    return f"{others}'s" if others.startswith("rank ") else f"{others}'"


def _after(step: int | None) -> str:
    return "" if step is None else f" after {plural(step, 'step')}" if step else " before the first step"


def _first(tensor: str) -> str:
    return f", first {tensor}" if tensor else ""
