"""No folder of an agent is left by any of these tests, and threads that were made to wait end with them."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.instruments.hangwatch.build import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType


@pytest.fixture(autouse=True)
def apart(agents_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left by any of these tests, and the cells of other tests are none of the user's."""
    monkeypatch.setattr(linecache, "cache", {})
    monkeypatch.setattr("torchdebug_magics.probing.waits.process_facts._alarm_is_set", bool)  # pytest-timeout sets one


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
        for thread in threads:
            assert _stands_still(thread)
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


def _stands_still(thread: threading.Thread) -> bool:
    last, since_s, end_s = None, time.monotonic(), time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < end_s:
        frame = sys._current_frames().get(thread.ident or 0)
        now = None if frame is None else (id(frame), frame.f_lasti)
        if now != last:
            last, since_s = now, time.monotonic()
        elif now is not None and time.monotonic() - since_s > 0.03:
            return True
        time.sleep(0.005)
    return False
