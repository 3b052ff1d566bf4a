"""Ranks that train on the same samples, from records built by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.ranks.built import LINE, record
from torchdebug_magics.ranks.compared import RankRecord, Samples
from torchdebug_magics.ranks.disagreements import disagreements
from torchdebug_magics.ranks.merging import held_details

if TYPE_CHECKING:
    from torchdebug_magics.ranks.report import RankFinding

USUAL = Samples(of=1, dataset_count=64, replicas_count=2, replica=0, seeds=(0, 1), rows=b"", location=LINE)


def found(*samples: Samples) -> tuple[RankFinding, ...]:
    records: list[RankRecord] = [record(rank, samples=(one,)) for rank, one in enumerate(samples)]
    return disagreements(records, held_details(records))


def rows(*numbers: int) -> bytes:
    return array("I", sorted(numbers)).tobytes()


def test_one_shuffle_for_all_ranks_is_as_it_should_be() -> None:
    assert found(USUAL, replace(USUAL, replica=1)) == ()
    assert found(USUAL) == ()


@pytest.mark.parametrize(
    ("other", "said", "fix"),
    [
        (replace(USUAL, replica=1, seeds=(1, 2)), "overlapping samples:", "the same `seed`"),
        (replace(USUAL, replica=1, seeds=(0, 2)), "overlapping samples from epoch 1 on:", "set_epoch(epoch)"),
        (USUAL, "the same samples: `DistributedSampler` has rank=0", "remove `rank=`"),
    ],
)
def test_settings_of_a_sampler_that_make_ranks_share_samples(other: Samples, said: str, fix: str) -> None:
    (finding,) = found(USUAL, other)
    assert (finding.kind, finding.ranks, finding.location, finding.is_harmless) == ("same_batch", (0, 1), LINE, False)
    assert finding.sentence.startswith(f"ranks 0 and 1 draw {said}")
    assert fix in finding.fix


def test_ranks_that_share_one_replica_draw_for_it() -> None:
    """As two ranks of each tensor-parallel group do."""
    assert found(*(replace(USUAL, replica=rank // 2) for rank in range(4))) == ()


def test_an_order_that_comes_again_in_every_epoch_is_a_note() -> None:
    (finding,) = found(*(replace(USUAL, replica=rank, seeds=(0, 0, 0)) for rank in range(2)))
    assert finding.is_harmless
    assert "set_epoch" in finding.fix
    assert found(*(replace(USUAL, replica=rank, seeds=(None, None)) for rank in range(2))) == ()  # it does not shuffle


def test_equal_rows_tell_of_ranks_that_shuffle_the_whole_dataset() -> None:
    own = replace(USUAL, replicas_count=0, seeds=())
    (finding,) = found(replace(own, rows=rows(*range(0, 60, 2))), replace(own, rows=rows(*range(0, 60, 3))))
    assert finding.sentence == "ranks 0 and 1 draw overlapping samples: 26% of those of the first batches"
    assert found(replace(own, rows=rows(*range(0, 60, 2))), replace(own, rows=rows(*range(1, 60, 2)))) == ()
    few = found(replace(own, rows=rows(*range(0, 60, 2))), replace(own, rows=rows(0, 2, *range(1, 60, 2))))
    assert few == ()  # the sampler repeats some to fill the last batch


def test_datasets_of_different_length_are_the_ranks_own() -> None:
    own = replace(USUAL, replicas_count=0, rows=rows(*range(20)))
    assert found(own, replace(own, dataset_count=63)) == ()
