"""Coroutines that wait in an event loop: their frames are not on the stack of any thread."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torchdebug_magics.probing.source.call_sites import names_of
from torchdebug_magics.probing.source.code_owner import frames_above, owner
from torchdebug_magics.probing.waits.reach import is_kernels
from torchdebug_magics.probing.waits.waiting import Waiting

__all__ = ["awaited_tasks", "cell_frames", "loop_tasks", "root_task", "scheduled_callbacks", "task_frames", "task_wait"]

_RUNNERS = frozenset({"run_code", "run_cell_async", "run_ast_nodes"})
"""IPython's coroutines, inside which the cell runs."""
_STEPS = ("_asyncio", "asyncio.futures", "asyncio.tasks")
"""Callbacks by which a task goes on."""
_MOST_DEEP = 100


def loop_tasks(frames: Sequence[FrameType]) -> list[Any]:
    """The tasks of the event loop that a thread runs, which waits for one of them; none where it runs no loop, or a task."""
    for frame in frames:
        if owner(frame.f_code.co_filename) == "user":
            break
        if _runs_loop(frame):
            asyncio: Any = sys.modules["asyncio"]
            try:
                return [task for task in asyncio.all_tasks(names_of(frame).get("self")) if not task.done()]
            except RuntimeError:  # the set has changed meanwhile
                return []
    return []


def scheduled_callbacks(frames: Sequence[FrameType]) -> list[Any]:
    """What the event loop that a thread runs will call, with its arguments: what the user's code has asked it for."""
    loops = [names_of(frame).get("self") for frame in frames if _runs_loop(frame)]
    handles = [handle for loop in loops for name in ("_ready", "_scheduled") for handle in tuple(getattr(loop, name, ()))]
    keys = [key for loop in loops for key in tuple(getattr(getattr(loop, "_selector", None), "_fd_to_key", {}).values())]
    ready = [handle for key in keys if isinstance(key.data, tuple) for handle in key.data if handle is not None]
    handles += [handle for handle in ready if not any(getattr(handle._callback, "__self__", None) is loop for loop in loops)]
    modules = [str(getattr(handle._callback, "__module__", "_asyncio")) for handle in handles]
    wanted = [one for one, module in zip(handles, modules, strict=True) if not is_kernels(module) and not module.startswith(_STEPS)]
    return [part for one in wanted for part in (one._callback, *(one._args or ()))]


def root_task(frames: Sequence[FrameType], tasks: Sequence[Any]) -> Any | None:
    """The task for which the thread's own code waits: that of ``asyncio.run``, or the one that runs the cell."""
    for frame in frames:
        if frame.f_code.co_name == "run_until_complete":
            future = names_of(frame).get("future")
            return next((task for task in tasks if task is future), None)
    return next((task for task in tasks if _runs_cell(task_frames(task))), None)


def cell_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the cell that awaits, innermost first, where a thread is in the event loop; else none."""
    frames = list(frames_above(frame))
    tasks = loop_tasks(frames)
    task = root_task(frames, tasks) if tasks else None
    return task_frames(task) if task is not None else []


def task_frames(task: Any) -> list[FrameType]:
    """The frames of a task, innermost first."""
    found: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(found) < _MOST_DEEP:
        frame = next((getattr(awaited, name, None) for name in ("cr_frame", "gi_frame", "ag_frame") if hasattr(awaited, name)), None)
        if frame is None:
            break
        found.append(frame)
        awaited = next((getattr(awaited, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await") if hasattr(awaited, name)), None)
    return found[::-1]


def task_wait(task: Any, tasks: Sequence[Any]) -> Waiting:  # noqa: PLR0911 - a table by module
    """What a task awaits."""
    waited = getattr(task, "_fut_waiter", None)
    for frame in reversed(task_frames(task)):
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        held = names_of(frame)
        what = type(held.get("self")).__name__.lower()
        if module == "asyncio.locks" and name in {"wait", "acquire", "wait_for"}:
            kind = "lock" if name == "acquire" else "event"
            return Waiting(kind, f"asyncio {what}", on=held.get("self"))  # type: ignore[arg-type]
        if module == "asyncio.queues" and name in {"get", "put", "join"}:
            return Waiting("queue", f"asyncio queue.{name}()", on=held.get("self"), facts={name: True})
        if module == "asyncio.tasks" and name == "sleep":
            return Waiting("sleep", f"asyncio.sleep({held.get('delay', 0)})")
        pid = getattr(held.get("self"), "pid", None) if module == "asyncio.subprocess" else None
        if isinstance(pid, int):
            return Waiting("join", f"the end of process {pid}", targets=[("process", pid)])
        if module.startswith(("asyncio.streams", "asyncio.subprocess", "aiohttp", "httpx", "httpcore")):
            return Waiting("io", "the network", facts={"network": True})
    waits_for = [waited, *(getattr(waited, "_children", None) or ())]
    targets = [("thread", id(one)) for one in waits_for if one in tasks]
    if targets:
        return Waiting("join", "a task", targets=targets)  # type: ignore[arg-type]
    return Waiting("event", "a future", on=waited, facts={"of_loop": True})


def awaited_tasks(task: Any, tasks: Sequence[Any]) -> list[Any]:
    """The tasks that a task waits for, and those that they wait for."""
    found: list[Any] = []
    waiting = [task]
    while waiting:
        waited = getattr(waiting.pop(), "_fut_waiter", None)
        more = [one for one in (waited, *(getattr(waited, "_children", None) or ())) if one in tasks and one not in found]
        found += more
        waiting += more
    return found


def _runs_loop(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_run_once" and frame.f_globals.get("__name__") == "asyncio.base_events"


def _runs_cell(frames: Sequence[FrameType]) -> bool:
    return any(frame.f_code.co_name in _RUNNERS for frame in frames) and any(owner(frame.f_code.co_filename) == "user" for frame in frames)
