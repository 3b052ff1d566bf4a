"""No folder of an agent is left by any of these tests, and threads that were made to wait end with them."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.instruments.hangwatch.build import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@pytest.fixture(autouse=True)
def apart(agents_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left by any of these tests, and the cells of other tests are none of the user's."""
    monkeypatch.setattr(linecache, "cache", {})
    monkeypatch.setattr("torchdebug_magics.instruments.hangwatch.waits.process_facts._alarm_is_set", bool)  # pytest-timeout sets one


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def resting() -> Iterator[Callable[..., threading.Thread]]:
    """Run functions in daemon threads until all of them stand still; `release` is called at the end."""
    releases: list[Callable[[], object]] = []
    threads: list[threading.Thread] = []

    def begin(*functions: Callable[[], object], release: Callable[[], object]) -> threading.Thread:
        releases.append(release)
        for function in functions:
            thread = threading.Thread(target=function, name=f"{getattr(function, '__name__', 'one')}", daemon=True)
            threads.append(thread)
            thread.start()
        assert _stand_still(threads)
        return threads[-1]

    yield begin
    for release in releases:
        release()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "its release does not end it"


@pytest.fixture
def looping(tmp_path: Path) -> Iterator[Callable[..., FrameType]]:
    """Run a piece of code that does not end in a daemon thread; the innermost frame of its own. It is ended with the test."""
    threads: list[threading.Thread] = []

    def begin(code: str, name: str = "loop.py", **names: Any) -> FrameType:
        file = tmp_path / name
        file.write_text(code)
        space = {"__name__": "__main__", **names}
        thread = threading.Thread(target=_until_ended, args=(compile(code, str(file), "exec"), space), name="looping", daemon=True)
        threads.append(thread)
        thread.start()
        time.sleep(0.1)
        frame: Any = sys._current_frames()[thread.ident or 0]
        while frame.f_code.co_filename != str(file):
            frame = frame.f_back
            assert frame is not None, "it has ended"
        return frame

    yield begin
    for thread in threads:
        while thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            thread.join(0.05)


def _until_ended(code: Any, space: dict[str, Any]) -> None:
    with contextlib.suppress(SystemExit):
        exec(code, space)


def _stand_still(threads: list[threading.Thread]) -> bool:
    """Whether all of them come to rest, at the same time."""
    last, since_s, end_s = None, time.monotonic(), time.monotonic() + 30
    while all(thread.is_alive() for thread in threads) and time.monotonic() < end_s:
        now = [_where(thread) for thread in threads]
        if now != last or None in now:
            last, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > 0.03:
            return True
        time.sleep(0.005)
    return False


def _where(thread: threading.Thread) -> tuple[object, ...] | None:
    """Where it waits; None while it can run: on a loaded machine one that was woken may stay where it was for long."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return None
    status = Path(f"/proc/self/task/{thread.native_id}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    if any(line.startswith("State:") and "sleeping" not in line for line in lines):
        return None
    return id(frame), frame.f_lasti, *(line for line in lines if "ctxt_switches" in line)
