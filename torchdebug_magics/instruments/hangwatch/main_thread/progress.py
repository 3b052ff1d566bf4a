"""Whether the main thread goes on, as a look from another thread can tell: new lines, other values, optimizer steps, output."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torchdebug_magics.instruments.hangwatch.main_thread.growing_graph import BackwardPasses
from torchdebug_magics.probing.source.call_sites import line_of, names_of
from torchdebug_magics.probing.source.code_owner import frames_above, is_module_code, is_user_code
from torchdebug_magics.probing.waits.async_tasks import cell_frames

__all__ = ["Progress"]

_MOST_POSITIONS = 4096
_MOST_FRAMES = 40
_RATE_OVER = 40
"""Looks."""
_LOADER = "torch.utils.data.dataloader"
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.utils.cpp_extension", "triton")
_BACKWARD = "_engine_run_backward"


@dataclass
class Progress:
    """What is known of the main thread from looks that cost some tens of microseconds."""

    steps: int = 0
    """Of optimizers: counted by a hook."""
    written: int = 0
    """Characters of output."""
    began_s: float = field(default_factory=time.monotonic)
    last_s: float = field(default_factory=time.monotonic)
    """When there was progress last."""
    rested_s: float = field(default_factory=time.monotonic)
    """Since when the innermost frame stands at the same instruction."""
    new_line_s: float = field(default_factory=time.monotonic)
    """When the user's code was last at a line at which it had not been, or an optimizer stepped, or something was written."""
    longest_s: float = 0.0
    is_idle: bool = False
    """Whether the main thread runs no code of the user's."""
    looks: int = 0
    looks_at: Counter[str] = field(default_factory=Counter)
    """How many looks found the main thread in a DataLoader, and so on."""
    doing: Counter[str] = field(default_factory=Counter)
    """The same since the last progress."""
    tracer: tuple[str, str, str] | None = None
    """What traces the main thread: its name, its usual price, and how to be without."""
    step_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_OVER))
    passes: BackwardPasses = field(default_factory=BackwardPasses)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _latest: tuple[int, int, tuple[tuple[int, int], ...]] = (0, 0, ())
    _values: int = 0
    _at: tuple[int, int] = (0, 0)

    @property
    def still_s(self) -> float:
        """How long there was no progress, until now."""
        return 0.0 if self.is_idle else time.monotonic() - self.last_s

    def step(self, *_: Any) -> None:
        """Called after each step of an optimizer."""
        self.steps += 1

    def look(self) -> FrameType | None:
        """Note where the main thread stands; the innermost frame of the user's."""
        now_s = time.monotonic()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return None
        at = (id(frame.f_code), frame.f_lasti)
        if at != self._at:
            self._at, self.rested_s = at, now_s
        users = [one for one in (*cell_frames(frame), *frames_above(frame)) if is_user_code(one.f_code)][:_MOST_FRAMES]
        self._count(frame)
        was_idle, self.is_idle = self.is_idle, not users
        if self.is_idle or was_idle:
            self._went_on(now_s, is_new=True)
            return users[0] if users else None
        places = tuple((id(one.f_code), one.f_lasti) for one in users)
        latest = (self.steps, self.written, places)
        lines = {(id(one.f_code), -line_of(one)) for one in users}
        is_new = latest[:2] != self._latest[:2] or not self._seen.issuperset(lines)
        if is_new or not self._seen.issuperset(places) or self._other_values(users):
            self._went_on(now_s, is_new=is_new)
        self._seen.update(places, lines)
        self._latest = latest
        self.longest_s = max(self.longest_s, now_s - self.last_s)
        self.step_times.append((now_s, self.steps))
        return users[0]

    def went_on(self, when_s: float) -> None:
        """There was progress elsewhere: in all processes that the main thread waits for."""
        if when_s > self.last_s:
            self._went_on(when_s, is_new=True)

    def passed(self, seconds_s: float) -> None:
        """No look was possible for so long: that there was progress meanwhile is not known."""
        self.longest_s = max(self.longest_s, seconds_s)

    def rate(self) -> float | None:
        """Optimizer steps per second, over the latest looks."""
        if len(self.step_times) < 2:  # noqa: PLR2004 - two make a rate
            return None
        (first_s, first), (last_s, last) = self.step_times[0], self.step_times[-1]
        return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None

    def _went_on(self, now_s: float, *, is_new: bool) -> None:
        self.longest_s = max(self.longest_s, 0.0 if self.is_idle else now_s - self.last_s)
        self.last_s = now_s
        self.doing.clear()
        if is_new:
            self.new_line_s = now_s
            if len(self._seen) > _MOST_POSITIONS:
                self._seen.clear()

    def _other_values(self, users: list[FrameType]) -> bool:
        """Whether a name of the user's stands for another object than at the look before."""
        values = hash(tuple(tuple(map(id, _held(frame))) for frame in users))
        changed, self._values = values != self._values, values
        return changed

    def _count(self, frame: FrameType) -> None:
        self.looks += 1
        label, backward = "python", None
        for depth, one in enumerate(frames_above(frame)):
            if is_user_code(one.f_code) or depth > _MOST_FRAMES:
                break
            module = one.f_globals.get("__name__") or ""
            if module == _LOADER:
                label = "batch"
            elif module.startswith("importlib._bootstrap"):
                label = "importing"
            elif module.startswith(_COMPILERS):
                label = "compiling"
            elif one.f_code.co_name == _BACKWARD:
                label, backward = "backward", one
        self.looks_at[label] += 1
        self.doing[label] += 1
        self.passes.look(backward, time.monotonic())


def _held(frame: FrameType) -> list[Any]:
    names = names_of(frame)
    if is_module_code(frame.f_code):
        return [names.get(name) for name in frame.f_code.co_names]
    return list(names.values())
