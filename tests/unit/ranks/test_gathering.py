"""`gather` inside real gloo ranks: one report on rank 0, nothing on the others."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import torchdebug_magics
from tests import children
from tests.unit.ranks import gathering_ranks
from torchdebug_magics.errors import TorchDebugError


def gathered(kind: str, tmp_path: Path, world_size: int = 2) -> Any:
    store, out = str(tmp_path / "store"), str(tmp_path / "gathered")
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=gathering_ranks.main, args=(kind, rank, world_size, store, out)) for rank in range(world_size)]
    with children.none_outlives():
        for process in ranks:
            process.start()
        children.join(*ranks, limit_s=90)
    assert [process.exitcode for process in ranks] == [0] * world_size
    first, *others = (Path(f"{out}{rank}").read_text() for rank in range(world_size))
    assert set(others) == {"none"}
    return json.loads(first)


def test_rank_0_gets_the_report_of_all(tmp_path: Path) -> None:
    report = gathered("nan", tmp_path)
    assert report["first"] == 1
    assert report["verdict"].startswith("Rank 1 of 2: NaN from log in forward · step 2")
    assert report["found"]
    assert [(record["rank"], record["state"]) for record in report["ranks"]] == [(0, "finished"), (1, "finished")]
    assert report["ranks"][1]["report"]["findings"]
    assert all(0 < record["elapsed_s"] < 90 for record in report["ranks"])


def test_what_differs_is_asked_for_afterwards(tmp_path: Path) -> None:
    report = gathered("shapes", tmp_path, 3)
    (finding,) = report["rank_findings"]
    assert (finding["kind"], finding["ranks"], finding["tensor"]) == ("shapes_differ", [1], "(root)")


def test_without_a_group_it_says_what_to_do() -> None:
    with pytest.raises(TorchDebugError, match=r"needs a process group: call it in each rank between init_process_group\(\) and"):
        torchdebug_magics.gather(object())  # type: ignore[arg-type]
