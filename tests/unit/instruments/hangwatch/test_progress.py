"""What counts as progress, and what slows every line down."""

from __future__ import annotations

import sys
import threading
import time
from itertools import repeat
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress, installed_tracer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.waits


def look_from_aside(call: Callable[[], Any]) -> Any:
    """What `call` returns in another thread, while this one waits for it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


class Looker:
    """Looks from another thread whenever it is asked, and says whether there was progress."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.questions: SimpleQueue[str] = SimpleQueue()
        self.answers: SimpleQueue[bool] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.questions.get() != "end":
            before = self.progress.last_s
            time.sleep(0.002)
            self.progress.look()
            self.answers.put(self.progress.last_s > before)


def test_new_lines_steps_output_and_values_are_progress() -> None:
    looker, seen, value = Looker(), [], "one"
    for moment in (*["quiet"] * 4, "a step", "output", "a value", *["quiet"] * 2):
        progress = looker.progress
        if moment == "a step":
            progress.step()
        progress.written += 4 * (moment == "output")
        value = "another" if moment in {"a value", "quiet again"} else value
        moment = ""  # noqa: PLW2901 - its own change would be progress
        looker.questions.put("look")
        seen.append(looker.answers.get())
    looker.questions.put("end")
    assert seen[0]
    assert seen[2:] == [False, False, True, True, True, False, False]


def test_how_long_there_was_none() -> None:
    looker = Looker()
    progress = looker.progress
    for _ in repeat(None, 6):
        time.sleep(0.05)
        looker.questions.put("look")
        looker.answers.get()
    looker.questions.put("end")
    assert progress.still_s >= 0.2
    assert progress.longest_s >= 0.2
    before = progress.last_s
    progress.went_on(before - 1)
    assert progress.last_s == before, "that is long ago"
    progress.passed(7.0)
    assert progress.longest_s == 7.0


def test_steps_per_second() -> None:
    progress = Progress()
    assert progress.rate is None
    for _ in range(6):
        time.sleep(0.03)
        progress.step()
        progress.step()
        look_from_aside(progress.look)
    assert 25 < (progress.rate or 0) < 70


# What slows everything down --------------------------------------------------------------------------------------------


def main_frame() -> Any:
    return sys._current_frames()[threading.main_thread().ident or 0]


def test_nothing_slows_it_down() -> None:
    assert look_from_aside(lambda: installed_tracer(main_frame())) is None


def test_a_trace_function() -> None:
    def trace(*_: object) -> Any:
        return trace

    def traced() -> Any:
        return look_from_aside(lambda: installed_tracer(main_frame()))

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = traced()
    finally:
        sys.settrace(before)
    assert "sys.settrace" in found[0]
    assert "test_a_trace_function" in found[0]


def test_anomaly_mode_and_the_profiler() -> None:
    with torch.autograd.set_detect_anomaly(mode=True):
        assert look_from_aside(lambda: installed_tracer(main_frame()))[0] == "anomaly mode"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert look_from_aside(lambda: installed_tracer(main_frame()))[0] == "PyTorch's profiler"
