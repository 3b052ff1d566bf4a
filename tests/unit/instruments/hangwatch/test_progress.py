"""What counts as progress, the graph that grows, and what slows every line down."""

from __future__ import annotations

import sys
import threading
import time
from itertools import repeat
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchdebug_magics.instruments.hangwatch.graph_growth import BackwardPass, carried_graph
from torchdebug_magics.instruments.hangwatch.progress import Progress
from torchdebug_magics.instruments.hangwatch.tracers import installed_tracer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
    assert progress.rate() is None
    for _ in range(6):
        time.sleep(0.03)
        progress.step()
        progress.step()
        look_from_aside(progress.look)
    assert 25 < (progress.rate() or 0) < 70


# The graph that grows ------------------------------------------------------------------------------------------------


HOOK = """
def hook(gradient):
    questions.put("look")
    found.append(answers.get())
    return gradient
"""
LOOP = """
hidden = torch.zeros(1, 4)
total = 0.0
for step in range(2):
    {}
    loss.register_hook(hook)
    loss.backward({})
"""
CARRIES = {
    "a state": ("hidden = model(hidden).tanh(); loss = hidden.sum()", "retain_graph=True", "hidden"),
    "a state, and the input": ("hidden = model(torch.ones(1, 4) + hidden); loss = hidden.sum()", "retain_graph=True", "hidden"),
    "a sum": ("total = total + model(hidden).sum(); loss = total * 1", "retain_graph=True", "total"),
    "a sum in place": ("total += model(hidden).sum(); loss = total * 1", "retain_graph=True", "total"),
    "a state that is detached": ("hidden = model(hidden.detach()).detach(); loss = model(hidden).sum()", "retain_graph=True", ""),
    "nothing": ("loss = model(hidden).sum()", "retain_graph=True", ""),
    "nothing that is kept": ("hidden = model(hidden.detach()); loss = hidden.sum()", "", ""),
    "expressly nothing": ("hidden = model(hidden.detach()); loss = hidden.sum()", "retain_graph=False", ""),
}
GROWS = (1.0, 1.4, 1.9)


def in_backward(loop: str, option: str, file: Path, *times_s: float) -> tuple[str, int] | None:
    """What is found in the last backward pass of a piece of code, whose passes so far took these times."""
    questions: SimpleQueue[str] = SimpleQueue()
    answers: SimpleQueue[Any] = SimpleQueue()
    found: list[Any] = []
    passes = [BackwardPass(0.0) for _ in times_s]
    for one, took_s in zip(passes, times_s, strict=True):
        one.took_s = took_s

    def look() -> None:
        while questions.get() != "end":
            answers.put(carried_graph(passes))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    # A hook that is no line of the user's: his innermost line is the one that calls `backward`.
    hook: dict[str, Any] = {"questions": questions, "answers": answers, "found": found}
    exec(compile(HOOK, nn.__file__, "exec"), hook)
    file.write_text(LOOP.format(loop, option))
    exec(compile(file.read_text(), str(file), "exec"), {"torch": torch, "hook": hook["hook"], "model": nn.Linear(4, 4)})
    questions.put("end")
    thread.join()
    last: tuple[str, int] | None = found[-1]
    return last


@pytest.mark.parametrize("case", CARRIES)
def test_what_carries_the_graph_of_earlier_steps_on(case: str, tmp_path: Path) -> None:
    loop, option, name = CARRIES[case]
    found = in_backward(loop, option, tmp_path / "loop.py", *GROWS)
    assert (found and found[0]) == (name or None)


@pytest.mark.parametrize("times_s", [(), (1.0, 2.0), (1.0, 1.0, 1.0), (1.0, 1.05, 1.1), (1.0, 3.0, 2.0), (3.0, 2.0, 1.0)])
def test_passes_that_do_not_take_longer_and_longer_carry_nothing(times_s: tuple[float, ...], tmp_path: Path) -> None:
    loop, option, _ = CARRIES["a state"]
    assert in_backward(loop, option, tmp_path / "loop.py", *times_s) is None


def test_outside_of_a_backward_pass_there_is_none() -> None:
    passes = [BackwardPass(0.0) for _ in GROWS]
    for one, took_s in zip(passes, GROWS, strict=True):
        one.took_s = took_s
    assert look_from_aside(lambda: carried_graph(passes)) is None


# What slows everything down --------------------------------------------------------------------------------------------


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        FOUND.append(look_from_aside(lambda: installed_tracer(main_frame())))
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        FOUND.append(look_from_aside(lambda: installed_tracer(main_frame())))
        return func(*args, **(kwargs or {}))


FOUND: list[Any] = []


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


@pytest.mark.parametrize(("mode", "name"), [(Dispatch, "TorchDispatchMode"), (Function, "TorchFunctionMode")])
def test_a_mode(mode: Any, name: str) -> None:
    FOUND.clear()
    with mode():
        torch.ones(2) + 1
    assert name in FOUND[-1][0]


def test_a_tool_that_monitors() -> None:
    if not hasattr(sys, "monitoring"):  # new in Python 3.12
        return
    sys.monitoring.use_tool_id(3, "a profiler")  # type: ignore[attr-defined]
    sys.monitoring.set_events(3, sys.monitoring.events.LINE)  # type: ignore[attr-defined]
    try:
        assert "'a profiler'" in installed_tracer(sys._getframe())[0]  # type: ignore[index]
    finally:
        sys.monitoring.free_tool_id(3)  # type: ignore[attr-defined]
