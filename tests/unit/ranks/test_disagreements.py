"""Where ranks differ that should agree, from records built by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.ranks.built import LINE, record, with_moments
from torchdebug_magics.ranks.compared import Moment, RankRecord, Samples, Sum
from torchdebug_magics.ranks.disagreements import disagreements, ranks_named
from torchdebug_magics.ranks.merging import held_details

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.ranks.report import RankFinding, RankFindingKind

MIB = 1 << 20


def found(records: Sequence[RankRecord]) -> list[RankFinding]:
    return list(disagreements(records, held_details(records)))


def test_nothing_differs() -> None:
    assert found([with_moments(rank, "replicas_part", {0: 1, 1: 2}) for rank in range(4)]) == []
    assert found([record(0)]) == []


@pytest.mark.parametrize(("number", "odd"), [(2, 1), (64, 17), (64, 0)])
def test_the_rank_that_differs_is_named(number: int, odd: int) -> None:
    records = [
        with_moments(rank, "replicas_part", {0: 1, 3: 9 if rank == odd else 2}, step_3={"a.weight": 1, "b.weight": 5 + (rank == odd)})
        for rank in range(number)
    ]
    (finding,) = found(records)
    assert (finding.kind, finding.ranks, finding.step, finding.tensor) == ("replicas_part", (odd,), 3, "b.weight")
    assert finding.location == LINE
    others = "rank 0's" if number == 2 else "the others'"
    assert finding.sentence == f"the weights of rank {odd} part from {others} after 3 steps, first b.weight"


def test_of_two_ranks_the_second_is_held_against_the_first() -> None:
    records = [with_moments(0, "initial_weights", {None: 5}), with_moments(1, "initial_weights", {None: 4})]
    assert found(records)[0].ranks == (1,)


def test_only_the_first_disagreement_of_a_kind_is_a_finding() -> None:
    records = [with_moments(rank, "buffers_drift", {step: step * rank for step in range(5)}) for rank in range(2)]
    (finding,) = found(records)
    assert finding.step == 1


def test_replicas_that_were_never_equal_do_not_part() -> None:
    moments = [(Moment("initial_weights", None, rank), Moment("replicas_part", 0, rank)) for rank in range(2)]
    records = [record(rank, moments=one) for rank, one in enumerate(moments)]
    assert [one.kind for one in found(records)] == ["initial_weights"]


def test_only_two_ranks_are_asked_for_the_details() -> None:
    asked: list[tuple[RankFindingKind, int | None, tuple[int, ...]]] = []

    def details(kind: RankFindingKind, step: int | None, ranks: Sequence[int]) -> dict[int, dict[str, int]]:
        asked.append((kind, step, tuple(ranks)))
        return {rank: {"weight": rank} for rank in ranks}

    (finding,) = disagreements([with_moments(rank, "replicas_part", {2: rank % 3 == 1}) for rank in range(7)], details)
    assert asked == [("replicas_part", 2, (0, 1))]
    assert (finding.ranks, finding.tensor) == ((1, 4), "weight")


# The same batch ----------------------------------------------------------------------------------------------------------


def batches(*of_ranks: Sequence[int]) -> list[RankFinding]:
    return found([with_moments(rank, "same_batch", dict(enumerate(digests))) for rank, digests in enumerate(of_ranks)])


def test_ranks_that_draw_the_same_batches_are_named() -> None:
    (finding,) = batches([1, 2, 3], [4, 5, 6], [1, 2, 3])
    assert (finding.kind, finding.ranks, finding.step) == ("same_batch", (0, 2), 0)
    assert finding.sentence == "ranks 0 and 2 drew the same batch at every step"
    assert "DistributedSampler" in finding.fix


def test_one_coincidence_is_no_finding() -> None:
    assert batches([1, 2, 3], [4, 2, 6]) == []
    assert batches([1, 2, 3], [4, 5, 3]) == []


def test_a_rank_that_takes_more_steps_is_no_reason_for_doubt() -> None:
    (finding,) = batches([1, 2, 3, 4, 5], [1, 2, 3])
    assert finding.ranks == (0, 1)


def test_one_rank_has_nobody_to_share_with() -> None:
    assert batches([1, 1, 1]) == []


# The collective -----------------------------------------------------------------------------------------------------------


def summed(rank: int, peak: float) -> RankRecord:
    one = Sum(dtype="float16", local_peak=peak, limit=65504.0, tensor="head.weight", location=LINE)
    return record(rank, found_at=(4, 4), is_received=True, sum=one)


def test_a_sum_that_leaves_the_range_is_a_finding_of_its_own() -> None:
    (finding,) = found([summed(0, 40_000.0), summed(1, 50_000.0)])
    assert (finding.kind, finding.ranks, finding.step, finding.tensor) == ("collective_overflow", (0, 1), 4, "head.weight")
    assert "float16" in finding.sentence


def test_a_sum_that_should_have_had_room_is_not_blamed() -> None:
    assert found([summed(0, 40.0), summed(1, 50.0)]) == []


def test_one_rank_whose_own_gradient_was_bad_is_the_cause() -> None:
    assert found([summed(0, 60_000.0), summed(1, 60_000.0), record(2, found_at=(4, 4))]) == []


# Memory -------------------------------------------------------------------------------------------------------------------


def test_the_rank_that_takes_more_and_its_line() -> None:
    usual = [record(rank, size_bytes=100 * MIB, sites=(("activation", 60 * MIB, LINE),)) for rank in range(7)]
    other = record(7, size_bytes=200 * MIB, sites=(("activation", 60 * MIB, LINE), ("cache", 100 * MIB, replace(LINE, line=40))))
    (finding,) = found([*usual, other])
    assert (finding.kind, finding.ranks, finding.tensor) == ("uneven_memory", (7,), "cache")
    assert finding.location is not None
    assert finding.location.line == 40
    assert finding.sentence == "rank 7 used 200.0 MiB where the others used 100.0 MiB: 100.0 MiB more in cache"


@pytest.mark.parametrize("sizes", [(100, 110, 120), (1, 2, 4), (100,), ()])
def test_a_little_more_is_not_out_of_line(sizes: tuple[int, ...]) -> None:
    assert found([record(rank, size_bytes=size * MIB) for rank, size in enumerate(sizes)]) == []


def test_many_ranks_are_counted() -> None:
    assert ranks_named([3]) == "rank 3"
    assert ranks_named([0, 2, 5]) == "ranks 0, 2 and 5"
    assert ranks_named(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


USUAL = Samples(of=1, dataset_count=64, replicas_count=2, replica=0, seeds=(0, 1), rows=b"", location=LINE)


def among(*samples: Samples) -> tuple[RankFinding, ...]:
    records: list[RankRecord] = [record(rank, samples=(one,)) for rank, one in enumerate(samples)]
    return disagreements(records, held_details(records))


def rows(*numbers: int) -> bytes:
    return array("I", sorted(numbers)).tobytes()


def test_one_shuffle_for_all_ranks_is_as_it_should_be() -> None:
    assert among(USUAL, replace(USUAL, replica=1)) == ()
    assert among(USUAL) == ()


@pytest.mark.parametrize(
    ("other", "said", "fix"),
    [
        (replace(USUAL, replica=1, seeds=(1, 2)), "overlapping samples:", "the same `seed`"),
        (replace(USUAL, replica=1, seeds=(0, 2)), "overlapping samples from epoch 1 on:", "set_epoch(epoch)"),
        (USUAL, "the same samples: `DistributedSampler` has rank=0", "remove `rank=`"),
    ],
)
def test_settings_of_a_sampler_that_make_ranks_share_samples(other: Samples, said: str, fix: str) -> None:
    (finding,) = among(USUAL, other)
    assert (finding.kind, finding.ranks, finding.location, finding.is_harmless) == ("same_batch", (0, 1), LINE, False)
    assert finding.sentence.startswith(f"ranks 0 and 1 draw {said}")
    assert fix in finding.fix


def test_ranks_that_share_one_replica_draw_for_it() -> None:
    """As two ranks of each tensor-parallel group do."""
    assert among(*(replace(USUAL, replica=rank // 2) for rank in range(4))) == ()


def test_an_order_that_comes_again_in_every_epoch_is_a_note() -> None:
    (finding,) = among(*(replace(USUAL, replica=rank, seeds=(0, 0, 0)) for rank in range(2)))
    assert finding.is_harmless
    assert "set_epoch" in finding.fix
    assert among(*(replace(USUAL, replica=rank, seeds=(None, None)) for rank in range(2))) == ()  # it does not shuffle


def test_equal_rows_tell_of_ranks_that_shuffle_the_whole_dataset() -> None:
    own = replace(USUAL, replicas_count=0, seeds=())
    (finding,) = among(replace(own, rows=rows(*range(0, 60, 2))), replace(own, rows=rows(*range(0, 60, 3))))
    assert finding.sentence == "ranks 0 and 1 draw overlapping samples: 26% of those of the first batches"
    assert among(replace(own, rows=rows(*range(0, 60, 2))), replace(own, rows=rows(*range(1, 60, 2)))) == ()
    few = among(replace(own, rows=rows(*range(0, 60, 2))), replace(own, rows=rows(0, 2, *range(1, 60, 2))))
    assert few == ()  # the sampler repeats some to fill the last batch


def test_datasets_of_different_length_are_the_ranks_own() -> None:
    own = replace(USUAL, replicas_count=0, rows=rows(*range(20)))
    assert among(own, replace(own, dataset_count=63)) == ()
