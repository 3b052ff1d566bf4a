"""What a hunt does inside each rank of a distributed job: its replay never communicates, and gradients that came bad are told as such."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests import rank_job
from tests.unit.instruments.nanhunt import rank_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.nanhunt.report import NanFinding

pytestmark = [pytest.mark.timeout(rank_job.LIMIT_S + 40), pytest.mark.waits]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank and case."""
    (folder,) = rank_job.launch(tmp_path_factory.mktemp("ranks"), ("tests.unit.instruments.nanhunt.rank_cases", 2))
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.fixture
def of(outcomes: list[dict[str, Any]]) -> Callable[[str, int], Any]:
    def of(case: str, rank: int) -> Any:
        assert not isinstance(outcomes[rank][case], str), outcomes[rank][case]
        return outcomes[rank][case]

    return of


def finding_of(result: Any) -> NanFinding:
    assert result["report"].finding is not None, result["report"]
    return result["report"].finding


def is_received(result: Any, rank: int, line: str) -> None:
    finding = finding_of(result)
    assert (finding.diagnosis, finding.phase, finding.op) == ("averaged_from_other_ranks", "backward", None)
    assert finding.location is not None
    assert finding.location.source == line
    assert f"those of this rank (rank {rank}) are finite before it" in finding.explanation
    assert finding.averaging is not None
    assert (finding.averaging.rank, finding.averaging.world_size) == (rank, 2)
    assert result["report"].reproduced is True


@pytest.mark.parametrize("case", ["born_in_backward", "static_graph", "accumulated"])
def test_the_rank_that_has_made_it_tells_where_and_the_other_that_it_came_with_the_averaging(case: str, of: Any) -> None:
    here, there = of(case, 1), of(case, 0)
    finding = finding_of(here)
    assert (finding.phase, finding.op, finding.diagnosis) == ("backward", "sqrt", "sqrt_zero")
    assert "is finite" in finding.fix
    assert finding.averaging is None
    line = "value.backward()" if case != "accumulated" else "sqrt_of_zero(rank, step, model(batch(rank, step + 50))).backward()"
    is_received(there, 0, line)
    for result in (here, there):
        assert result["raised"] == "NonFiniteError"
        assert result["finite"]
        assert not result["left"]
        assert finding_of(result).step == rank_cases.BAD


def test_a_bad_parameter_is_each_ranks_own(of: Any) -> None:
    for rank in range(2):
        finding = finding_of(of("bad_parameter", rank))
        assert (finding.phase, finding.tensor, finding.averaging) == ("parameter", "module.first.weight", None)


@pytest.mark.parametrize(("case", "line"), [("by_hand", "dist.all_reduce(parameter.grad)"), ("by_hand_in_one", "dist.all_reduce(flat)")])
def test_gradients_that_are_averaged_by_hand(case: str, line: str, of: Any) -> None:
    assert finding_of(of(case, 1)).op == "sqrt"
    is_received(of(case, 0), 0, line)
    finding = finding_of(of(case, 0))
    assert finding.averaging is not None
    assert not finding.averaging.may_overflow


def test_a_sum_in_float16_that_overflows_leaves_no_trace_in_a_tensors_version(of: Any) -> None:
    for rank in range(2):
        result = of("in_float16", rank)
        is_received(result, rank, "dist.all_reduce(parameter.grad)")
        assert finding_of(result).averaging.may_overflow
        assert result["finite"]


def test_a_loss_with_what_others_sent_names_no_op_of_this_rank(of: Any) -> None:
    finding = finding_of(of("loss_of_all", 0))
    assert (finding.phase, finding.op) == ("loss", None)
    assert any("depends on data from other ranks (`allreduce`)" in line for line in of("loss_of_all", 0)["report"].problems)
    assert finding_of(of("loss_of_all", 1)).op == "log"


def test_a_healthy_training_is_the_same_to_the_last_bit(of: Any) -> None:
    for rank in range(2):
        assert [name for name, same in of("healthy", rank).items() if not same] == []


def test_a_dry_run_in_one_rank_sends_nothing_either(of: Any) -> None:
    for rank in range(2):
        assert of("shapes_in_one", rank) == {"same": True, "looked": True}


def test_a_model_in_shards_is_not_called_again(of: Any) -> None:
    for rank in range(2):
        assert any("spread over ranks" in line for line in of("sharded", rank)["report"].problems)
    here, there = finding_of(of("sharded", 1)), finding_of(of("sharded", 0))
    assert (here.phase, here.op, here.step) == ("loss", None, rank_cases.BAD)
    assert (there.phase, there.op, there.diagnosis) == ("backward", None, None)


def test_a_bad_input_of_a_model_in_shards_is_named(of: Any) -> None:
    finding = finding_of(of("sharded_with_a_bad_input", 1))
    assert (finding.phase, finding.tensor, finding.rows, finding.step) == ("data", "x", (3,), rank_cases.BAD)
    assert finding.location is not None
    assert finding.location.source == "out = model(x)"


def test_clipping_is_no_second_finding(of: Any) -> None:
    report = of("clipped", 1)["report"]
    assert [(one.phase, one.op) for one in report.findings] == [("backward", "sqrt")]
    assert [one.diagnosis for one in of("clipped", 0)["report"].findings] == ["averaged_from_other_ranks"]
