"""SIGTERM in the middle of a look: it comes again when what was found is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tests import children
from torchdebug_magics.instruments.nanhunt.rerun import attempt
from torchdebug_magics.instruments.nanhunt.rerun.attempt import end_deferred

FORK = multiprocessing.get_context("fork")


def _looks(path: str, then_s: float) -> None:
    attempt._UNTIL_TOLD_S = 0.3
    with end_deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        Path(path).write_text("found", encoding="utf-8")
    time.sleep(then_s)
    Path(path).write_text("told", encoding="utf-8")


@pytest.mark.parametrize(("then_s", "told", "code"), [(0.0, "told", 0), (30.0, "found", -signal.SIGTERM)], ids=["it ends", "it goes on"])
def test_a_launched_process_ends_its_look_first(then_s: float, told: str, code: int, tmp_path: Path) -> None:
    process = FORK.Process(target=_looks, args=(str(tmp_path / "told"), then_s))
    with children.none_outlives():
        process.start()
        children.join(process, limit_s=20)
    assert (process.exitcode, (tmp_path / "told").read_text(encoding="utf-8")) == (code, told)


def test_nothing_is_changed_elsewhere() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with end_deferred():
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before
