"""How far a counted loop of the user's has come, what slows it down, where it stands, and what it writes."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.hangwatch.everybody.participants import with_article
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.waits.thread_waits import wait_of
from torchdebug_magics.probing.source.call_sites import function_node, line_of, names_of, value_of
from torchdebug_magics.probing.source.syntax import called, dotted, loops_around
from torchdebug_magics.probing.source.user_code import adopt_timed, frames_above, is_user_code, locate, location, owner
from torchdebug_magics.report import Location

_BUILT_IN = frozenset({list, tuple, dict, set, str, range})
_REST_S = 1.0
_ALMOST, _EVERY_S = 0.7, 0.25
_TAIL = 4000


def loop_progress(frame: FrameType | None) -> tuple[int, int | None] | None:
    """(iterations begun, bound) of the innermost counted loop of the user's around the frame; None where there is none."""
    for one in (one for one in frames_above(frame) if is_user_code(one.f_code)):
        for loop in reversed(loops_around(function_node(one.f_code), line_of(one))):
            if isinstance(loop, ast.For) and (found := _counted(loop, one)) is not None:
                return found
    return None


def _counted(loop: ast.For, frame: FrameType) -> tuple[int, int | None] | None:
    names, iterated, target = names_of(frame), loop.iter, loop.target
    while isinstance(iterated, ast.Call) and iterated.args and called(iterated) in {"tqdm", "track", "trange"}:
        iterated = iterated.args[0]
    if not isinstance(iterated, ast.Call) or dotted(iterated.func) not in {"range", "enumerate"}:
        return None
    is_enumerated = dotted(iterated.func) == "enumerate"
    if is_enumerated and isinstance(target, ast.Tuple):
        target = target.elts[0]
    count = names.get(dotted(target))
    if type(count) is not int:
        return None
    if is_enumerated:
        return count, _length(value_of(iterated.args[0], frame, names)) if iterated.args else None
    ends: list[Any] = [
        _length(value_of(end.args[0], frame, names)) if isinstance(end, ast.Call) and called(end) == "len" else value_of(end, frame, names)
        for end in iterated.args
    ]
    whole = range(*ends) if ends and all(type(end) is int for end in ends) else range(0)
    return (whole.index(count), len(whole)) if count in whole else (count, None)


def _length(value: Any) -> int | None:
    """Of what is built in; of a DataLoader over such: a Dataset of the user's has code of its own for it."""
    is_loader = type(value).__module__.startswith("torch.utils.data")
    data = getattr(value, "dataset", None) if is_loader else value
    return len(value) if type(data) in _BUILT_IN or (is_loader and type(data).__name__ == "TensorDataset") else None


def installed_tracer(frame: FrameType | None) -> tuple[str, str, str] | None:
    """(what, its usual price, how to be without) for the thread that a frame belongs to; None where nothing is on."""
    for one in frames_above(frame):
        if one.f_trace is not None and owner(one.f_code.co_filename) in {"user", "torch", "library"}:
            name = getattr(one.f_trace, "__qualname__", type(one.f_trace).__name__)
            return f"a trace function (`sys.settrace`: {name})", "each Python line takes 2x to 20x as long", "call `sys.settrace(None)`"
    if torch.is_anomaly_enabled():
        repair = "call `torch.autograd.set_detect_anomaly(False)`; `%%nanhunt` finds NaN without it"
        return "anomaly mode", "a training step takes 2x to 3x as long", repair
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return "PyTorch's profiler", "small ops take 2x to 5x as long", "profile a few steps only, with `schedule=`"
    return None


class StandingPlace:
    """For the live view, and for a cell that ends before anybody was asked."""

    def __init__(self) -> None:
        self.at: Location | None = None
        """Of the latest rest."""
        self.longest_at: Location | None = None
        self.kind, self.what = "python", ""
        """Of the wait there."""
        self.hint = ""
        """What a cell that was stopped early was waiting for."""
        self._latest: tuple[str, int, str] | None = None

    @property
    def latest(self) -> Location | None:
        """The last line at which it was seen."""
        return self.at or (location(*self._latest) if self._latest else None)

    def look(self, frame: FrameType | None, progress: Progress, after_s: float) -> None:
        """At the innermost frame of the user's code."""
        if frame is None:
            return
        adopt_timed([frame])
        self._latest = frame.f_code.co_filename, line_of(frame), frame.f_code.co_name
        if progress.still_s > _REST_S:
            self.at = locate(frame)
        if progress.still_s > _ALMOST * max(after_s, progress.longest_s - _EVERY_S):
            waiting = wait_of([*frames_above(sys._current_frames().get(threading.main_thread().ident or 0))])
            self.kind, self.what = (waiting.kind, waiting.what) if waiting is not None else ("python", "")
            self.longest_at = locate(frame)
            waited = f"the main thread waited for {with_article(self.what)}" if self.kind != "python" else ""
            self.hint = f"the main thread slept in {self.what}" if self.kind == "sleep" else waited


class OutputMeter:
    """Stands before the `write` of both streams between `attach` and the end of the stack."""

    def __init__(self) -> None:
        self.written = 0
        """Characters."""
        self.tail = ""
        """The last of them."""
        self._counts: list[tuple[Any, _Counting]] = []

    def attach(self, stack: ExitStack) -> None:
        """From now on; a stream that does not allow it is not counted."""
        stack.callback(self.detach)
        for stream in (sys.stdout,) if sys.stdout is sys.stderr else (sys.stdout, sys.stderr):
            held = getattr(stream, "__dict__", None)
            if isinstance(held, dict):
                counting = _Counting(self, stream.write, held.get("write"))
                self._counts.append((stream, counting))
                held["write"] = counting

    def detach(self) -> None:
        """Take them away again, also from below those that came later. Harmless the second time."""
        for stream, counting in self._counts:
            counting.is_open = False
            top = stream.__dict__.pop("write", None)
            while isinstance(top, _Counting) and not top.is_open:
                top = top.before
            if top is not None:
                stream.__dict__["write"] = top
        self._counts.clear()


@dataclass(eq=False)
class _Counting:
    """A `write` that counts; once closed, it only hands on."""

    meter: OutputMeter
    write: Callable[..., Any]
    before: Any
    """What stood in the stream's own dict, or None."""
    is_open: bool = True

    def __call__(self, *texts: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        if self.is_open and texts and isinstance(texts[0], str):
            meter = self.meter
            meter.written += len(texts[0])
            meter.tail = (meter.tail + texts[0][-_TAIL:])[-_TAIL:]
        return self.write(*texts, **named)
