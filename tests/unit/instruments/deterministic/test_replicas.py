"""Ranks whose replicas are compared: what is wrong between them is named, what is healthy is not, and neither is changed."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests import rank_job
from tests.unit.instruments.deterministic import replica_cases as cases
from torchdebug_magics.instruments.deterministic.replicas.replica import Checkpoints
from torchdebug_magics.ranks.compared import HEALTHY_BYTES
from torchdebug_magics.ranks.merging import held_details, merged
from torchdebug_magics.ranks.report import RanksReport

if TYPE_CHECKING:
    from pathlib import Path

    from torchdebug_magics.ranks.compared import RankRecord

pytestmark = [pytest.mark.timeout(rank_job.LIMIT_S + 40), pytest.mark.waits]
_HERE = "tests.unit.instruments.deterministic"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of what the pair and the launches have written."""
    return rank_job.launch(tmp_path_factory.mktemp("replicas"), (f"{_HERE}.replica_pair", 2), (f"{_HERE}.replica_launches", 1))


@pytest.fixture(scope="module")
def pair(written: list[Path]) -> list[dict[str, Any]]:
    """Of each rank: (record, what was trained in a plain run, and under us), by case."""
    return [pickle.loads((written[0] / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.fixture(scope="module")
def launches(written: list[Path]) -> dict[str, Any]:
    """The reports of launches, by what was launched."""
    reports: dict[str, Any] = pickle.loads((written[1] / "reports.pickle").read_bytes())
    return reports


def _report(pair: list[dict[str, Any]], name: str) -> RanksReport:
    records: list[RankRecord] = [one[name][0] for one in pair]
    return merged("deterministic", records, held_details(records))


@pytest.mark.parametrize("name", cases.PLANTED)
def test_planted(pair: list[dict[str, Any]], name: str) -> None:
    report, (_, expected) = _report(pair, name), cases.PLANTED[name]
    assert [one.kind for one in report.rank_findings] == [expected.kind]
    finding = report.rank_findings[0]
    assert (finding.step, finding.tensor) == (expected.step, expected.tensor)
    assert finding.ranks == ((0, 1) if expected.kind == "same_batch" else (1,))
    assert finding.location is not None
    assert expected.source in finding.location.source
    assert finding.location.file.endswith("replica_cases.py")
    assert finding.sentence[1:] in report.verdict
    assert expected.fix in finding.fix
    if expected.kind != "initial_weights":
        assert finding.is_harmless == (name == "sampler_without_set_epoch")
    assert not report.problems


@pytest.mark.parametrize("name", [*cases.HEALTHY, *cases.OWN_SEED])
def test_healthy(pair: list[dict[str, Any]], name: str) -> None:
    report = _report(pair, name)
    assert report.rank_findings == ()
    assert report.problems == ()


@pytest.mark.parametrize("name", cases.HEALTHY)
def test_unharmed(pair: list[dict[str, Any]], name: str) -> None:
    for _, plain, trained in (one[name] for one in pair):
        assert trained == plain


def test_a_healthy_rank_travels_whole(pair: list[dict[str, Any]]) -> None:
    sizes = [len(pickle.dumps(one[name][0].without_details(), pickle.HIGHEST_PROTOCOL)) for one in pair for name in cases.HEALTHY]
    assert max(sizes) < HEALTHY_BYTES


def test_weights_that_ddp_puts_right_are_said_to_be(pair: list[dict[str, Any]]) -> None:
    assert "DistributedDataParallel puts rank 0's in their place" in _report(pair, "seed_by_rank_before_ddp").verdict
    assert "DistributedDataParallel" not in _report(pair, "seed_by_rank_without_broadcast").verdict


def test_a_fork_has_its_parents_generator(launches: dict[str, Any]) -> None:
    assert [one.kind for one in launches["unseeded"].rank_findings] == ["same_batch"]


def test_what_runs_the_cell_again_is_left_out_in_ranks(launches: dict[str, Any]) -> None:
    report = launches["saved"]
    assert isinstance(report, RanksReport)
    assert report.problems == ("--verify, --save and --against cover the process that launches the ranks, not the ranks",)


def test_nothing_is_left_in_place(pair: list[dict[str, Any]]) -> None:
    assert [one["left behind"] for one in pair] == [[], []]


def test_a_process_without_torch_is_no_rank(launches: dict[str, Any]) -> None:
    assert not isinstance(launches["helper"], RanksReport)


def test_nothing_is_watched_outside_of_ranks(launches: dict[str, Any]) -> None:
    assert launches["alone"].replica is None


@pytest.mark.parametrize("every", [False, True])
def test_checkpoints_are_few_and_dense_at_first(every: bool) -> None:
    steps = Checkpoints(4, every=every)
    for step in range(100_000):
        if steps.is_due(step):
            steps.note(step, (), ())
    held = list(steps.held)
    assert held[:8] == list(range(8))
    assert len(held) <= 256
    assert held[-1] > 75_000
