"""Which branches of the package this process has reached since the last look, by the monitoring of Python 3.12 or later."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import CodeType

TOOL = 4  # of the ids that CPython leaves to tools without a name of their own
PACKAGE = f"{Path(__file__).parent.parent / 'torchdebug_magics'}{os.sep}"
FOLDER = "TORCHDEBUG_COVER_TO"
WORKER = "PYTEST_XDIST_WORKER"
reached: set[tuple[str, int, int, int]] = set()
"""(file, first line of the function, offset of the branch, where it went) of each branch since the last look."""


def begin() -> None:
    """Watch every branch of the package in this process from now on."""
    monitoring = sys.monitoring
    if monitoring.get_tool(TOOL) is not None:
        return
    monitoring.use_tool_id(TOOL, "branches_reached")
    monitoring.register_callback(TOOL, monitoring.events.PY_START, _function)
    monitoring.register_callback(TOOL, monitoring.events.BRANCH, _branch)
    monitoring.set_events(TOOL, monitoring.events.PY_START)


def flush(test: str = "") -> None:
    """Write what a process that a test has started has reached so far."""
    if reached:
        part = Path(os.environ[FOLDER], f"child-{os.getpid()}-{time.monotonic_ns()}.part")
        part.write_text(
            json.dumps({"test": test, "worker": os.environ.get(WORKER), "ended": time.time(), "branches": taken()}), encoding="utf-8"
        )
        part.rename(part.with_suffix(".json"))  # a process that is killed while it writes leaves none that is read


def _function(code: CodeType, _offset: int) -> object:
    if code.co_filename.startswith(PACKAGE):
        sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.BRANCH)
    return sys.monitoring.DISABLE


_both: dict[tuple[str, int, int], int] = {}


def _branch(code: CodeType, offset: int, to: int) -> object:
    place = (code.co_filename, code.co_firstlineno, offset)
    before = _both.get(place)
    if before is None:
        _both[place] = to
        reached.add((*place, to))
        return None
    if before == to:
        return None
    reached.add((*place, to))
    return sys.monitoring.DISABLE  # both ways were taken: nothing more to see here in this test


def taken() -> list[str]:
    """Each branch as ``file:line of the function:offset:destination``; the next look begins."""
    branches = sorted(f"{file.removeprefix(PACKAGE)}:{line}:{offset}:{to}" for file, line, offset, to in reached)
    reached.clear()
    _both.clear()
    sys.monitoring.restart_events()
    return branches


def begin_in_child() -> None:
    """What `sitecustomize` calls in a process that was started with the folder in its environment."""
    begin()
    atexit.register(flush)
    os.register_at_fork(after_in_child=lambda: (reached.clear(), _both.clear()))
    leave = os._exit

    def flush_and_leave(status: int) -> NoReturn:
        flush()  # forked processes end without `atexit`
        leave(status)

    os._exit = flush_and_leave
