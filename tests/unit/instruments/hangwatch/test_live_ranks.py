"""The live report of a session that launches processes, read while it hangs, and what their own reports say of a prompt."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from torch import multiprocessing as torch_multiprocessing

import torchdebug_magics
from tests.kernel.test_live_ranks import SLOW_IMPORT
from tests.unit.ranks import programs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("none_outlives")]

LIMIT_S = 30.0
"""Until Stop is pressed where the live report does not say what is waited for."""


@contextmanager
def stopped_at(words: str, session: Any) -> Iterator[list[str]]:
    """Press Stop as soon as the live report says it; the verdicts until then."""
    verdicts: list[str] = []
    is_over = threading.Event()

    def look() -> None:
        for _ in range(int(LIMIT_S / 0.1)):
            finding = getattr(session.live(), "finding", None)
            verdicts.extend([] if finding is None else [finding.title])
            if is_over.wait(0.1) or words in " ".join(verdicts):
                break
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield verdicts
    finally:
        is_over.set()
        reader.join()


def launched(target: Callable[..., object], *args: tuple[Any, ...], method: str = "fork", name: str = "") -> None:
    context: Any = multiprocessing.get_context(method)
    processes = [context.Process(target=target, args=arguments, name=name or f"rank-{at}") for at, arguments in enumerate(args)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


LAUNCHES: dict[str, Callable[[str], object]] = {
    "Process, fork": lambda store: launched(programs.run_out, (0, store), (1, store)),
    "mp.start_processes": lambda store: torch_multiprocessing.start_processes(programs.run_out, (store,), 2, start_method="fork"),
    "mp.spawn": lambda store: torch_multiprocessing.spawn(programs.run_out, (store,), 2),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_live_report_of_ranks_is_their_launchers_verdict(launch: str, tmp_path: Path) -> None:
    session = torchdebug_magics.hangwatch(after=1.5)
    verdict = "Stuck: rank 1 has run out of batches"
    with stopped_at(verdict, session) as verdicts, session:
        LAUNCHES[launch](str(tmp_path / "store"))
    assert verdict in verdicts[-1]
    assert "distributed.barrier()" in verdicts[-1]
    assert not any("the main thread has been in" in each for each in verdicts), "a rank's own report"
    assert session.report.ended_by == "Stop"


def test_the_pace_of_ranks_is_shown_while_they_make_progress(tmp_path: Path) -> None:
    session, paces = torchdebug_magics.hangwatch(after=30), []

    def look() -> None:
        while not is_over.wait(0.1):
            paces.append(getattr(session.live(), "rate", None))

    is_over, reader = threading.Event(), threading.Thread(target=look)
    with session:
        reader.start()
        launched(programs.step_slowly, ())
        is_over.set()
        reader.join()
    assert any(paces), "the launcher itself takes no step"


def test_a_prompt_in_a_child_is_not_the_launchers() -> None:
    session = torchdebug_magics.hangwatch(after=1)
    with stopped_at("process asker waits for input", session) as verdicts, session:
        launched(programs.ask, (), name="asker")
    assert verdicts[-1].startswith("Stuck: process asker waits for input")
    assert "a child process cannot read the keyboard" in session.report.reason
    assert "under the cell" not in session.report.to_json()


def test_the_report_of_a_rank_does_not_send_the_user_to_the_cell() -> None:
    """Each rank also leaves its own report, which only its launcher's hides."""
    with torchdebug_magics.hangwatch(after=1) as session:
        launched(programs.ask, (2.5,))
    report: Any = session.report
    own = report.rank(0).report
    assert (own.state, own.cause) == ("stuck", "input_waiting")
    assert "under the cell" not in report.to_json()


def test_the_start_of_a_child_is_not_called_an_import_of_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    session = torchdebug_magics.hangwatch(after=1)
    with stopped_at("process late is starting", session) as verdicts, session:
        launched(programs.raise_each, (0,), method="spawn", name="late")
    assert "Slow: process late is starting" in verdicts[-1]
    assert not any("imports torchdebug" in each for each in verdicts)


def test_only_the_launcher_writes_the_verdict_of_a_script(capfd: pytest.CaptureFixture[str]) -> None:
    with torchdebug_magics.hangwatch(after=1):
        process = multiprocessing.get_context("fork").Process(target=programs.take_twice, name="taker")
        process.start()
        process.join(4)  # it ends by itself, which is no hang
        process.kill()
        process.join()
    assert "hangwatch: Stuck" not in capfd.readouterr().err
