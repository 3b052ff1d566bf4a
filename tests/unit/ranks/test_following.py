"""What a session launches comes back in its report, whatever becomes of it, and nothing is left of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import multiprocessing as torch_multiprocessing

import torchdebug_magics
from tests import children
from tests.unit.ranks import late_program, programs
from torchdebug_magics import catalog
from torchdebug_magics.html import plain
from torchdebug_magics.instruments.nanhunt.report import NanReport
from torchdebug_magics.ranks.rank_session import ATTRIBUTE
from torchdebug_magics.ranks.report import RanksReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = "tests/unit/ranks/programs.py"


@contextmanager
def nothing_is_left(folder: Path) -> Iterator[None]:
    """No folder, no other `start` and no process of ours."""
    start = BaseProcess.start
    with pytest.MonkeyPatch.context() as patch, children.none_outlives():
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    assert BaseProcess.start is start
    assert list(folder.glob("tdm*")) == []


@pytest.fixture(autouse=True)
def nothing_is_left_of_a_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with nothing_is_left(tmp_path_factory.mktemp("job")):
        yield


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def launched(target: Callable[..., object], *args: tuple[Any, ...], method: str = "fork") -> list[Any]:
    """One process for each tuple of arguments, joined."""
    processes = started(target, *args, method=method)
    children.join(*processes, limit_s=60)
    assert all(ATTRIBUTE not in vars(process) for process in processes)
    return processes


def started(target: Callable[..., object], *args: tuple[Any, ...], method: str = "fork") -> list[Any]:
    processes = [multiprocessing.get_context(method).Process(target=target, args=arguments) for arguments in args]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    return processes


def hunted(target: Callable[..., object], *args: tuple[Any, ...], method: str = "fork", **options: Any) -> Any:
    with torchdebug_magics.nanhunt(**options) as session:
        launched(target, *args, method=method)
    return session.report


@pytest.fixture(scope="module")
def nan_on_rank_1(tmp_path_factory: pytest.TempPathFactory) -> RanksReport:
    """Of two forked ranks."""
    folder = tmp_path_factory.mktemp("nan")
    with nothing_is_left(folder):
        return cast(RanksReport, hunted(programs.train, *((rank, 2, f"{folder}/store", "nan") for rank in range(2))))


def is_of_the_rank_in_which_it_was_born(report: Any) -> None:
    assert isinstance(report, RanksReport)
    assert (report.first, [record.rank for record in report.ranks]) == (1, [0, 1])
    assert report.verdict.startswith("Rank 1 of 2: NaN from log in forward · step 3")
    assert report.finding.op == "log"  # every field of that rank's own report
    assert report.finding.location.file.endswith(HERE)
    assert report.rank(1).report.finding == report.finding
    assert (report.rank(1).state, report.rank(1).error.partition(":")[0]) == ("raised", "NonFiniteError")


def test_the_rank_in_which_it_was_born(nan_on_rank_1: RanksReport) -> None:
    is_of_the_rank_in_which_it_was_born(nan_on_rank_1)
    assert nan_on_rank_1.rank(1).exit_code == 1
    peer = nan_on_rank_1.rank(0)
    assert peer.state == "raised", "its peer was gone"
    assert peer.report.finding is None
    with pytest.raises(KeyError):
        nan_on_rank_1.rank(2)


def test_ranks_of_a_fork_server(store: str) -> None:
    """Which imports torch once, for both."""
    server: Any = forkserver._forkserver
    server._stop()
    server.set_forkserver_preload([programs.__name__])
    try:
        report = hunted(programs.train, (0, 2, store, "nan"), (1, 2, store, "nan"), method="forkserver")
    finally:
        server._stop()
        server.set_forkserver_preload(["__main__"])
    is_of_the_rank_in_which_it_was_born(report)
    assert (report.rank(1).exit_code, report.rank(0).state, report.rank(0).report.finding) == (1, "raised", None)


def test_it_travels_and_is_shown(nan_on_rank_1: RanksReport) -> None:
    again = pickle.loads(pickle.dumps(nan_on_rank_1))
    assert again.to_json() == nan_on_rank_1.to_json()
    assert again.rank(1).report.finding == nan_on_rank_1.rank(1).report.finding
    written = json.loads(nan_on_rank_1.to_json())
    assert (written["verdict"], written["first"], written["found"]) == (nan_on_rank_1.verdict, 1, True)
    assert [record["state"] for record in written["ranks"]] == ["raised", "raised"]
    text = plain.render(catalog.instrument("nanhunt").page(nan_on_rank_1))
    assert "Rank 1 of 2" in text
    assert "x.log()" in text


def test_healthy_ranks_are_one_sentence_and_unharmed(store: str, tmp_path: Path) -> None:
    launched(programs.train, *((rank, 2, store, "", 1, str(tmp_path / "plain")) for rank in range(2)))
    report = hunted(programs.train, *((rank, 2, f"{store}2", "", 1, str(tmp_path / "watched")) for rank in range(2)))
    assert report.first is None
    assert report.verdict.startswith("2 ranks, nothing found on any; rank 0: No NaN or inf")
    assert [(record.state, record.exit_code, record.error) for record in report.ranks] == [("finished", 0, "")] * 2
    for rank in range(2):
        weights, watched = (torch.load(tmp_path / f"{name}{rank}") for name in ("plain", "watched"))
        assert all(torch.equal(weights[name], watched[name]) for name in weights)


def test_torch_spawn(store: str) -> None:
    with torchdebug_magics.nanhunt() as session, pytest.raises(torch_multiprocessing.ProcessRaisedException):  # of either: both raise
        torch_multiprocessing.spawn(programs.train, (2, store, "nan"), nprocs=2)
    is_of_the_rank_in_which_it_was_born(session.report)


def test_the_rank_in_which_it_was_born_tells_before_its_launcher_ends_it(store: str) -> None:
    """The other one fails first, as it has less to look into, and the launcher ends all."""
    with torchdebug_magics.nanhunt() as session, pytest.raises(torch_multiprocessing.ProcessRaisedException):
        torch_multiprocessing.start_processes(programs.train_wrapped, (2, store), nprocs=2, start_method="fork")
    report: Any = session.report
    assert (report.first, report.finding.op, report.finding.step) == (1, "log", 2)
    assert report.rank(0).report.finding.diagnosis == "averaged_from_other_ranks"
    assert report.verdict.endswith("rank 0 received it with the averaged gradients")


@pytest.mark.parametrize(("fault", "state", "code"), [("raises", "raised", 1), ("leaves", "died", 3)])
def test_how_a_rank_ends(fault: str, state: str, code: int, store: str) -> None:
    report = hunted(programs.train, (0, 2, store, fault), (1, 2, store, fault))
    is_of_a_rank_that_ended_so(report, state, code)
    if fault == "raises":
        assert report.rank(1).error == "ValueError: no such class on rank 1"


def test_a_rank_that_is_killed_and_the_live_view_of_the_lowest(store: str) -> None:
    views: list[Any] = []
    with torchdebug_magics.nanhunt() as session:
        processes = started(programs.train, (0, 2, store, "is killed"), (1, 2, store, "is killed"))
        while any(process.is_alive() for process in processes):
            views.append(session.live())
            time.sleep(0.05)
    report: Any = session.report
    is_of_a_rank_that_ended_so(report, "died", -signal.SIGKILL)
    assert report.rank(1).location is not None
    assert report.rank(1).location.source == "time.sleep(1.5)  # so that it has said where it stands"
    assert "SIGKILL" in report.verdict
    assert any(view.steps_count for view in views if view is not None)


def is_of_a_rank_that_ended_so(report: Any, state: str, code: int) -> None:
    assert (report.rank(1).state, report.rank(1).exit_code) == (state, code)
    assert report.first is None
    assert "Rank 1" in report.verdict
    assert report.rank(0).report is not None, "the others' reports come all the same"


def test_a_spawned_rank_that_imports_torch_when_it_runs() -> None:
    """Beside a forked one, in which torch is there from the start."""
    with torchdebug_magics.nanhunt() as session:
        processes = started(programs.train_alone, (0,)) + started(late_program.train, (1, "nan"), method="spawn")
        children.join(*processes, limit_s=60)
    report: Any = session.report
    assert (report.first, report.finding.op, report.finding.step) == (1, "log", 1)
    assert report.rank(0).report.steps_count == 3


def test_different_errors() -> None:
    report = hunted(programs.raise_each, (0,), (1,), (2,))
    assert [record.error.partition(":")[0] for record in report.ranks] == ["ValueError", "KeyError", "OSError"]
    assert "Rank 0 raised ValueError: of rank 0" in report.verdict


def test_a_rank_that_hangs_when_the_user_stops(store: str, until: Callable[..., bool]) -> None:
    def stop() -> None:
        assert until(Path(f"{store}.happened").exists)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with torchdebug_magics.nanhunt() as session, pytest.raises(KeyboardInterrupt):
        children.join(*started(programs.train, (0, 2, store, "hangs"), (1, 2, store, "hangs")), limit_s=50)
    report: Any = session.report
    assert [record.state for record in report.ranks] == ["interrupted", "interrupted"]
    assert report.rank(1).location.source == "time.sleep(60)"
    assert "had not ended" in report.rank(1).verdict


def test_processes_without_a_group() -> None:
    report = hunted(programs.train_alone, (0, "nan"), (1, "nan"))
    assert (report.first, report.finding.op) == (1, "log")


def test_a_launcher_that_is_launched(store: str) -> None:
    report = hunted(programs.launch_more, (0, 2, store))
    assert (report.first, len(report.ranks)) == (1, 2)


def test_helpers_are_no_ranks() -> None:
    with torchdebug_magics.nanhunt() as session:
        programs.load()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(programs.square, range(4)) == [0, 1, 4, 9]
        launched(programs.tensors, (4,))
    assert isinstance(session.report, NanReport)
    assert session.report.backward_count == 4


def test_what_the_launcher_finds_itself_comes_first() -> None:
    with torchdebug_magics.nanhunt(keep_going=True) as session:
        launched(programs.train_alone, (0,))
        programs.train_alone(1, "nan")
    report: Any = session.report
    assert report.finding.op == "log"
    assert not report.verdict.startswith("Rank")


def test_two_magics(store: str) -> None:
    with torchdebug_magics.nanhunt() as hunt, torchdebug_magics.memtrace() as trace:
        launched(programs.train, (0, 2, store), (1, 2, store))
    for session in (hunt, trace):
        assert [record.state for record in session.report.ranks] == ["finished", "finished"]
    assert trace.report.steps_count == 5
    assert "2 ranks, nothing found" in hunt.report.verdict


@pytest.mark.parametrize("name", ["autograd", "gradwatch", "hangwatch", "memgauge", "memtrace", "shapes"])
def test_each_instrument_follows(name: str, store: str) -> None:
    with getattr(torchdebug_magics, name)() as session:
        launched(programs.train, (0, 2, store), (1, 2, store))
    report = session.report
    assert [record.state for record in report.ranks] == ["finished", "finished"]
    assert all(record.report is not None for record in report.ranks)
    assert report.rank_findings == ()
    assert report.verdict
    assert plain.render(catalog.instrument(name).page(report))


def test_a_rank_that_keeps_what_the_others_do_not(store: str) -> None:
    with torchdebug_magics.memtrace() as session:
        launched(programs.train_unevenly, (0, 2, store, "memory"), (1, 2, store, "memory"))
    (finding,) = session.report.rank_findings
    assert (finding.kind, finding.ranks) == ("uneven_memory", (1,))
    assert finding.location.source == "kept.append(out.detach())"
    assert session.report.first == 1


def test_ranks_whose_shapes_differ(store: str) -> None:
    with torchdebug_magics.shapes() as session:
        launched(programs.train_unevenly, (0, 2, store, "shapes"), (1, 2, store, "shapes"))
    (finding,) = session.report.rank_findings
    assert (finding.kind, finding.ranks, finding.tensor) == ("shapes_differ", (1,), "(root)")
    assert session.report.rows[0].output_shapes == ((8, 256),), "those of rank 0"
    assert session.report.verdict == "The shapes of rank 1 differ from rank 0's, first at (root)"


def test_what_goes_wrong_of_ours_in_a_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has what the test puts in place; the rank itself goes on."""
    launcher = os.getpid()

    def fails(_probe: object, _stack: object) -> None:
        if os.getpid() != launcher:
            msg = "no hooks today"
            raise RuntimeError(msg)

    monkeypatch.setattr("torchdebug_magics.instruments.nanhunt.probe.NanProbe.attach", fails)
    with torchdebug_magics.nanhunt() as session:
        processes = launched(programs.train_alone, (0,), (1,))
    assert [process.exitcode for process in processes] == [0, 0]
    assert session.report.problems == ("ranks 0 and 1: opening the session of a rank failed: RuntimeError: no hooks today",)
