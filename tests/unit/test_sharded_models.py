"""Every instrument on two real gloo ranks that share a model: the same numbers and collectives, and no part that passes for the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import torchdebug_magics
from tests import rank_job
from tests.unit.sharded_cases import KINDS, WATCHED, Transformer

pytestmark = [pytest.mark.timeout(rank_job.LIMIT_S + 40), pytest.mark.waits]
_OF_SHARDS = {
    "memtrace": "sizes are of the shards in this process",
    "gradwatch": "norms, ratios and zeros are of the shards in this process",
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By the size of the job, then by rank and the name of the case."""
    sizes = (2, 1)
    folders = rank_job.launch(tmp_path_factory.mktemp("sharded"), *(("tests.unit.sharded_cases", size) for size in sizes))
    return {
        size: [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
        for size, folder in zip(sizes, folders, strict=True)
    }


@pytest.fixture(scope="module")
def facts(jobs: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each of two ranks computed, by the name of the case."""
    return jobs[2]


def of(facts: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    found = [one[case] for one in facts]
    assert not any("raised" in one for one in found), found
    return found


@pytest.mark.parametrize(("instrument", "kind"), WATCHED)
def test_under_an_instrument_each_rank_computes_and_communicates_as_without(facts, instrument, kind):
    for plain, under in zip(of(facts, f"plain {kind}"), of(facts, f"{instrument} {kind}"), strict=True):
        assert (under["state"], under["collectives"]) == (plain["state"], plain["collectives"])
        unsaid = [one for one in under["problems"] if _OF_SHARDS.get(instrument, " times; the first call") not in one]
        assert [one for one in unsaid if not one.startswith("1 gradient not measured: laid out")] == []
        assert any(_OF_SHARDS.get(instrument, "") in one for one in (*under["problems"], ""))


@pytest.mark.parametrize("kind", KINDS)
def test_what_looks_at_once_needs_no_other_rank_and_leaves_no_trace(facts, kind):
    for plain, alone in zip(of(facts, f"plain {kind}"), of(facts, f"alone {kind}"), strict=True):
        assert (alone["state"], alone["collectives"]) == (plain["state"], plain["collectives"])


def test_shapes_name_the_whole_and_the_part_of_each_parameter(facts):
    report = of(facts, "alone tensor parallel")[0]["shapes"]["report"]
    rows = {row["path"]: row for row in report["rows"]}
    assert rows["up"]["shards"]["weight"] == {"shape": [64, 32], "local_shape": [32, 32], "placements": ["Shard(0)"]}
    assert rows["up"]["shards"]["bias"]["local_shape"] == [32]
    assert rows["down"]["shards"]["weight"] == {"shape": [32, 64], "local_shape": [32, 32], "placements": ["Shard(1)"]}
    assert rows["down"]["shards"]["bias"]["placements"] == ["Replicate()"]
    assert (report["param_bytes"], report["local_param_bytes"], report["sharded_over"]) == (16768, 4 * (2 * 32 * 32 + 32 + 32), 2)
    assert report["has_shared_flops"]
    assert "sharded over 2 ranks: 8.2 KiB here), x 8 x 32 float32 → 8 x 32, 65.5K FLOPs of all ranks together" in report["verdict"]


def test_shapes_of_outputs_that_are_dtensors(facts):
    rows = {row["path"]: row for row in of(facts, "shapes dtensors")[1]["report"]["rows"]}
    assert rows["up"]["output_shapes"] == [[8, 64]]
    assert rows["up"]["shards"]["output"] == {"shape": [8, 64], "local_shape": [8, 32], "placements": ["Shard(1)"]}


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_without_and_with_computing_agree(facts, kind):
    without, computed = of(facts, f"alone {kind}")[0]["shapes"]["report"], of(facts, f"shapes {kind}")[0]["report"]
    for name in ("total_params", "local_param_bytes", "total_flops", "activation_bytes", "has_shared_flops"):
        assert without[name] == computed[name]


def test_what_fsdp_gathers_is_no_activation(facts):
    report = of(facts, "alone fsdp")[0]["shapes"]["report"]
    assert not report["has_shared_flops"]  # each rank computes whole layers of its own batch
    whole = torchdebug_magics.shapes(Transformer(), torch.zeros(4, 8, dtype=torch.int64))
    assert report["activation_bytes"] == whole.activation_bytes


def test_what_needs_data_is_not_run_on_one_rank_alone(facts):
    alone, _ = of(facts, "needs_data")
    assert alone["error"].startswith("TorchDebugError: the forward needs data")
    assert "sharded over 2 ranks: run `%shapes --real` on all of them" in alone["error"]
    assert alone["collectives"] == 0


def test_a_wrapper_that_communicates_is_looked_behind_or_refused(facts):
    alone, other = of(facts, "wrapped")
    assert alone["shapes"].startswith("Normed: 28 parameters")
    assert alone["refused"].startswith("TorchDebugError: `FullyShardedDataParallel` communicates in each forward")
    assert alone["collectives"] == other["collectives"] == 0


def test_memory_is_what_this_process_holds(facts):
    report = of(facts, "memtrace tensor parallel")[1]["report"]
    assert report["peak"]["by_category"]["parameter"] == 4 * (2 * 32 * 32 + 32 + 32)
    for one in of(facts, "held_memory"):
        (held,) = one["report"]["holdings"]
        assert held["held_bytes"] == pytest.approx(2 << 20, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_step_zero_is_kept_compared_and_restored_by_shards(facts, kind):
    for one in of(facts, f"restored {kind}"):
        assert one["first"] == one["second"]
        assert one["file"].startswith("TorchDebugError: --file writes what one process holds, and the model is sharded")
        assert not one["is_written"]
    kept, moved = (of(facts, f"alone {kind}")[0][name] for name in ("stepzero", "moved"))
    report = kept["report"]
    assert report["held_bytes"] + report["shared_bytes"] == 4 * report["local_elements_count"] < 4 * report["elements_count"]
    assert f"{moved['report']['parameters_count']} parameters moved" in moved["verdict"]
    assert moved["problems"][0].endswith("are sharded: distances are of the shards in this process")


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_of_a_loss_reaches_parameters_and_not_what_is_gathered_for_them(facts, kind):
    report = of(facts, f"reached {kind}")[0]
    count = len(report["report"]["reaches"])
    assert count == of(facts, f"alone {kind}")[0]["stepzero"]["report"]["parameters_count"]
    assert report["verdict"].startswith(f"The loss reaches {count} of {count} trainable tensors")
    assert report["problems"] == [f"{count} of {count} parameters are sharded: gradient norms are of the shards in this process"]
    assert report["collectives"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_autograd_are_found_in_a_sharded_model_too(facts, kind):
    for one in of(facts, f"faulty {kind}"):
        assert "are never zeroed" in one["without_zeroing"]
        assert "gets gradients, but no optimizer updates it" in one["one_missing"]
        assert "updates tensors that are no longer the model's" in one["too_early"] or "ran without gradients" in one["too_early"]


def test_zeros_in_one_shard_are_no_dead_module(facts):
    for one in of(facts, "one_shard_of_zeros"):
        assert one["verdict"].startswith("Gradients and updates look healthy: 20 steps of 1 module")


@pytest.mark.parametrize("kind", KINDS)
def test_no_second_run_waits_for_ranks_that_do_not_run_again(facts, kind):
    for plain, one in zip(of(facts, f"plain {kind}"), of(facts, f"verified {kind}"), strict=True):
        assert f"{plain['collectives']} collective calls" in one["verdict"]
        assert one["state"] == plain["state"]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_compared_rank_by_rank_and_no_op_is_blamed_for_what_another_rank_has_sent(facts, kind):
    for one in of(facts, f"compared {kind}"):
        assert one["same"].startswith("Same numbers as print")
        assert one["changed"].startswith("Different from print")
        assert "received" in one["changed"]
        assert "equal inputs" not in one["changed"]


def test_what_cannot_work_on_a_sharded_model_says_what_to_do_first(facts):
    for kind in KINDS:
        alone = of(facts, f"alone {kind}")[0]
        assert alone["shrink"]["verdict"].endswith("shrink the model first, then wrap it or shard it")
        assert alone["overfit"].startswith("TorchDebugError: the model is sharded over ranks: overfit it before `fully_shard`")
    for one in of(facts, "overfitted fsdp"):
        assert one["error"] == of(facts, "alone fsdp")[0]["overfit"]
        assert one["is_same"]


def test_one_rank_alone_is_run_twice_as_any_process(jobs):
    for kind in KINDS[:2]:
        (verified,) = of(jobs[1], f"verified {kind}")
        assert verified["verdict"].startswith("Same numbers twice")
        assert verified["state"] == of(jobs[1], f"plain {kind}")[0]["state"]
