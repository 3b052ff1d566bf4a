"""One look at the process in which it is asked: its threads, what each waits for, and the collectives that it has issued."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torchdebug_magics.instruments.hangwatch.waits import builtin_waits
from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import Reach, Waiting, loop_tasks, task_frames
from torchdebug_magics.instruments.hangwatch.waits.thread_waits import find_holders, own_frames, task_wait, wait_of
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.source.call_sites import line_of, names_of
from torchdebug_magics.probing.source.user_code import is_module_code, is_user_code, owner
from torchdebug_magics.ranks.agent import record_of_error

CALL = f"{__name__}:facts_of_this_process"
"""How an agent is asked for it."""
_OURS = "torchdebug-"
_TASK = "task "
_WAITING = ("kind", "what", "targets", "able", "timeout_s")
_MOST_FRAMES = 80
_WATCHED_TYPES = (bool, int, float, str, type(None))
_MOST_TEXT = 40
_LATEST = 40
"""Collectives."""
_ERROR_FACTS_LATEST = 3


def facts_of_this_process() -> dict[str, Any]:
    """Plain data, as it is sent to the process that asks."""
    current, stacks, waits = sys._current_frames(), dict[int, list[FrameType]](), dict[int, Waiting | None]()
    try:
        return _facts(current, stacks, waits)
    finally:  # they hold the frame that looks, which holds them
        for held in (current, stacks, waits):
            held.clear()


def _facts(current: Mapping[int, FrameType], stacks: dict[int, list[FrameType]], waits: dict[int, Waiting | None]) -> dict[str, Any]:
    threads = [thread for thread in threading.enumerate() if thread.ident is not None and not thread.name.startswith(_OURS)]
    known = {thread.ident for thread in threading.enumerate()}
    unnamed = [_Task(ident, str(ident), None) for ident in current if ident not in known]  # started by `_thread`, or by native code
    idents = [thread.ident or 0 for thread in threads] + [thread.ident for thread in unnamed]
    stacks.update({ident: own_frames(current.get(ident)) for ident in idents})
    waits.update({ident: wait_of(frames) for ident, frames in stacks.items()})
    callbacks = [callback for frames in stacks.values() for callback in builtin_waits.scheduled_callbacks(frames)]
    tasks = _add_tasks(stacks, waits)
    everybody: list[threading.Thread | _Task] = [*threads, *unnamed, *tasks]
    reach = functools.cache(lambda ident: Reach(stacks[ident], [task.task for task in tasks if task.ident == ident]))
    planned = functools.cache(lambda: Reach([], callbacks))
    for ident, waiting in waits.items():
        if waiting is not None:  # who could end it: threads, tasks, and what a loop or an alarm will call
            find_holders(ident, waiting, stacks, waits, reach)
            will_be_called = waiting.on is not None and bool(callbacks) and planned().can_get(waiting.on)
            rings = ident == threading.main_thread().ident and _alarm_is_set()
            waiting.facts["may_end"] = waiting.facts.get("may_end") or will_be_called or rings
    joining = next((wait.facts for wait in waits.values() if wait is not None and wait.facts.get("op") == "init_process_group"), {})
    rank: Any = this_rank.rank()
    world_size: Any = this_rank.world_size()
    if rank is None:
        rank, world_size = joining.get("rank"), joining.get("world_size")
    torch = loaded("torch")
    worker = getattr(loaded("torch.utils.data._utils.worker"), "_worker_info", None)
    return {
        "pid": os.getpid(),
        "name": multiprocessing.current_process().name,
        "is_child": multiprocessing.parent_process() is not None,
        "rank": rank,
        "world_size": world_size,
        "worker": None if worker is None else int(worker.id),
        "torch_threads": torch.get_num_threads() if torch is not None and hasattr(torch, "get_num_threads") else None,
        "threads": [_thread(each, stacks[each.ident or 0], waits[each.ident or 0], reach) for each in everybody],
        "collectives": collectives(),
        "unused_parameters": _unused_parameters(stacks.values()) if rank is not None else [],
    }


def _alarm_is_set() -> bool:
    """Whether a handler of the user's will run in the main thread after some time, and can raise there."""
    alarms = ((signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_VIRTUAL, signal.SIGVTALRM)) if hasattr(signal, "getitimer") else ()
    return any(signal.getitimer(which)[0] and callable(signal.getsignal(number)) for which, number in alarms)


@dataclass
class _Task:
    """A task of asyncio's, or a thread that `threading` does not know, in the form of a thread."""

    ident: int
    name: str
    task: Any
    native_id: int | None = None


def _add_tasks(stacks: dict[int, list[FrameType]], waits: dict[int, Waiting | None]) -> list[_Task]:
    """Let a thread that runs an event loop stand where its own task does, and every other task of the user's beside the threads."""
    found = []
    for ident, frames in [*stacks.items()]:
        tasks, root = loop_tasks(frames)
        waited_for = {id(future) for task in tasks for future in builtin_waits.awaited(task)}
        for task in tasks:
            if task is root:
                stacks[ident] = [*task_frames(task), *frames]
                waits[ident] = task_wait(task, tasks)
            elif id(task) in waited_for or any(is_user_code(frame.f_code) for frame in task_frames(task)):
                stacks[id(task)], waits[id(task)] = task_frames(task), task_wait(task, tasks)
                found.append(_Task(id(task), f"{_TASK}{task.get_name()}", task))
        for waiting in (waits[key] for key in (ident, *(id(task) for task in tasks)) if key in waits):
            if waiting is not None and root is not None:  # whoever waits for the loop's own task waits for the thread
                waiting.targets = [("thread", ident) if target == ("thread", id(root)) else target for target in waiting.targets]
    return found


def _thread(
    thread: threading.Thread | _Task, frames: Sequence[FrameType], waiting: Waiting | None, reach: Callable[[int], Reach]
) -> dict[str, Any]:  # fmt: skip
    shown = frames[:_MOST_FRAMES]
    is_main = thread is threading.main_thread()
    # The exception that it is handling, as a process that ends records it: a rank may wait in its `finally:`.
    error: Any = sys._current_exceptions().get(thread.ident or 0) if is_main else None
    error = error[1] if isinstance(error, tuple) else error  # as Python 3.11 has it
    # Another process could share a queue or a lock with this one.
    has_relatives = multiprocessing.parent_process() is not None or bool(vars(multiprocessing.process)["_children"])
    return {
        "ident": thread.ident,
        "name": thread.name,
        "number": thread.native_id,
        "is_main": is_main,
        "shares": not is_main and has_relatives and any(is_user_code(frame.f_code) for frame in frames) and reach(thread.ident or 0).shares,
        "frames": [(frame.f_code.co_filename, line_of(frame), frame.f_code.co_name) for frame in shown],
        "at": [frame.f_lasti for frame in shown],
        "values": _values(frames),
        "calls": builtin_waits.called_name(frames[0]) if frames else "",
        "handling": error_record(error) if isinstance(error, Exception) else None,
        "waiting": None if waiting is None else {**{name: getattr(waiting, name) for name in _WAITING}, **waiting.facts},
    }


def _values(frames: Sequence[FrameType]) -> dict[str, Any]:
    """Small local values of the innermost frame of the user's: what moves while a loop makes progress."""
    frame = next((frame for frame in frames if owner(frame.f_code.co_filename) == "user"), None)
    names = {} if frame is None else names_of(frame)
    if frame is not None and is_module_code(frame.f_code):
        names = {name: names[name] for name in frame.f_code.co_names if name in names}
    plain = {name: value for name, value in names.items() if type(value) in _WATCHED_TYPES and value == value}  # noqa: PLR0124 - a NaN has no JSON
    return {name: value for name, value in plain.items() if type(value) is not str or len(value) <= _MOST_TEXT}


def _unused_parameters(stacks: Iterable[Sequence[FrameType]]) -> list[str]:
    """Of the models under DistributedDataParallel that the user's code holds: parameters without a gradient, where others have one."""
    found: list[str] = []
    for frame in (frame for frames in stacks for frame in frames if owner(frame.f_code.co_filename) == "user"):
        for model in names_of(frame).values() if not is_module_code(frame.f_code) else ():
            if type(model).__module__ == "torch.nn.parallel.distributed" and hasattr(model, "module"):
                trained = {name: value.grad is not None for name, value in model.module.named_parameters() if value.requires_grad}
                found += [name for name, has_gradient in trained.items() if not has_gradient] if any(trained.values()) else []
                found += _not_reached(model, names_of(frame).values())
    return list(dict.fromkeys(found))


def _not_reached(model: Any, values: Iterable[Any]) -> list[str]:
    """Parameters that the graph of a scalar, the loss, does not lead to; none where the user's code holds no such scalar."""
    from torchdebug_magics.probing import graphs  # noqa: PLC0415 - it imports torch, which a model of the user's has done

    for value in values:
        root = getattr(value, "grad_fn", None) if type(value).__module__ == "torch" and value.dim() == 0 else None
        if root is not None:
            reached = {id(leaf) for leaf in graphs.leaves_of([value])}
            absent = [name for name, weight in model.module.named_parameters() if weight.requires_grad and id(weight) not in reached]
            return absent if len(absent) < len(list(model.module.parameters())) else []
    return []


def collectives() -> dict[str, Any] | None:
    """The latest collectives, the ranks of each process group, and its last numbers, by the group's name; None outside a job.

    From PyTorch's Flight Recorder, without its stacks: the first dump of them holds the GIL for seconds.
    """
    binding = loaded("torch._C._distributed_c10d")
    if this_rank.job() is None or binding is None or not hasattr(binding, "_dump_fr_trace"):
        return None
    dump = pickle.loads(binding._dump_fr_trace(includeCollectives=True, includeStackTraces=False, onlyActive=False))  # noqa: S301 - what torch has just written
    entries = [
        {
            "group": str(entry.get("process_group", ("0",))[0]),
            "number": entry.get("collective_seq_id", 0),
            "op": str(entry.get("profiling_name", "")).rpartition(":")[2],
            "sizes": [list(size) for size in entry.get("input_sizes") or []],
            "dtypes": list(entry.get("input_dtypes") or []),
            "is_done": bool(entry.get("retired")) or entry.get("state") == "completed",
            "is_p2p": bool(entry.get("is_p2p")),
        }
        for entry in dump.get("entries", ())[-_LATEST:]
    ]
    status = {str(name): dict(numbers) for name, numbers in dump.get("pg_status", {}).items()}
    world: Any = getattr(loaded("torch.distributed.distributed_c10d"), "_world", None)  # private: no other way leads to all groups
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    groups = {str(name): sorted(ranks[group]) for group, name in names.items() if group in ranks}
    return {"status": status, "entries": entries, "groups": groups}


def loaded(name: str) -> Any | None:
    """A module that has been imported, and is not just being imported by another thread."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def error_record(error: BaseException) -> dict[str, Any]:
    """As an agent records the exception that ends its process."""
    return {**record_of_error(error), **error_facts(error)}


def error_facts(error: BaseException) -> dict[str, Any]:
    """Plain data; asked in the process that ends, while its variables are still there."""
    issued = collectives() or {"entries": []}
    found: dict[str, Any] = {"rank": this_rank.rank(), "entries": issued["entries"][-_ERROR_FACTS_LATEST:]}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        model: Any = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "torch.nn.parallel.distributed" and hasattr(model, "module"):
            found["parameters"] = [name for name, value in model.module.named_parameters() if value.requires_grad]
    return found
