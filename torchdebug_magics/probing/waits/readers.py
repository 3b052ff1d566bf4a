"""What calls of the standard library and of PyTorch that are known to wait wait for: a reader of local values for each."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdebug_magics.probing.waits.waiting import Target, Waiting

__all__ = ["POLLS", "READERS"]


def _condition(held: Mapping[str, Any]) -> Waiting | None:
    """``wait`` of an event, a condition or a barrier: one name, three classes."""
    waiter = held.get("self")
    kind = type(waiter).__name__
    if kind not in {"Event", "Condition", "Barrier"}:
        return None
    parties = f" for {waiter.parties} threads, {waiter.n_waiting} of which have arrived" if kind == "Barrier" and waiter is not None else ""
    return Waiting("event", f"{kind.lower()}{parties}", on=waiter, timeout_s=_timeout(held))


def _semaphore(held: Mapping[str, Any]) -> Waiting | None:
    return Waiting("lock", "semaphore", on=held.get("self"), timeout_s=_timeout(held)) if held.get("blocking", True) else None


def _import_lock(held: Mapping[str, Any]) -> Waiting | None:
    lock = held.get("self")
    ident, name = getattr(lock, "owner", None), getattr(lock, "name", "")
    return Waiting("lock", f"the import of {name}", targets=[("thread", ident)]) if isinstance(ident, int) else None


def _shared_event(held: Mapping[str, Any]) -> Waiting | None:
    kind = type(held.get("self")).__name__.lower()
    return Waiting("event", f"multiprocessing {kind}", on=held.get("self"), timeout_s=_timeout(held), facts={"shared": True})


def _shared_lock(held: Mapping[str, Any]) -> Waiting | None:
    lock = held.get("self")
    name = getattr(getattr(lock, "_semlock", None), "name", "")
    return Waiting("lock", f"multiprocessing {type(lock).__name__}", on=lock, facts={"semaphore": name})


def _thread_join(held: Mapping[str, Any]) -> Waiting | None:
    thread = held.get("self")
    ident = getattr(thread, "ident", None)
    if thread is None or ident is None:
        return None
    return Waiting("join", f"the end of thread {thread.name}", targets=[("thread", ident)], timeout_s=_timeout(held))


def _queue(word: str) -> Callable[[Mapping[str, Any]], Waiting | None]:
    def read(held: Mapping[str, Any]) -> Waiting | None:
        return Waiting("queue", f"queue.{word}()", on=held.get("self"), timeout_s=_timeout(held), facts={word: True})

    return read


def _process_queue(word: str) -> Callable[[Mapping[str, Any]], Waiting | None]:
    def read(held: Mapping[str, Any]) -> Waiting | None:
        queue = held.get("self")
        facts = {word: True, **_pipe_of(getattr(queue, "_reader", None))}
        return Waiting("queue", f"multiprocessing queue.{word}()", on=queue, timeout_s=_timeout(held), facts=facts)

    return read


def _connection(held: Mapping[str, Any]) -> Waiting | None:
    timeout = held.get("timeout")
    if "object_list" in held:  # multiprocessing.connection.wait: of what a launcher joins, the sentinels of its processes
        pids = [child.pid for child in _children() if child.pid is not None and child.sentinel in held["object_list"]]
        if pids:
            return Waiting("join", _ends(pids), targets=[("process", pid) for pid in pids], timeout_s=_timeout(held))
        return Waiting("io", "a pipe", timeout_s=timeout if isinstance(timeout, (int, float)) else None)
    connection = held.get("self")
    facts = {"network": True} if _leads_elsewhere(connection) else _pipe_of(connection)
    return Waiting("io", "a message from a pipe", timeout_s=_timeout(held), facts=facts)


def _pipe_full(held: Mapping[str, Any]) -> Waiting | None:
    return Waiting("io", "room in a pipe that nobody reads", facts={"pipe_full": True, **_pipe_of(held.get("self"))})


def _leads_elsewhere(connection: Any) -> bool:
    """Whether it is a socket with an address: whoever answers may be on another machine, or no process of ours."""
    try:
        number = os.dup(connection.fileno())
    except (OSError, AttributeError, ValueError):  # closed
        return False
    try:
        copy = socket.socket(fileno=number)
    except OSError:  # a pipe
        os.close(number)
        return False
    with copy, contextlib.suppress(OSError):
        return bool(copy.family != getattr(socket, "AF_UNIX", None) or copy.getpeername() or copy.getsockname())
    return False


def _pipe_of(connection: Any) -> dict[str, Any]:
    try:
        return {"pipe": os.readlink(f"/proc/self/fd/{connection.fileno()}")}  # noqa: PTH115 - such as "pipe:[123]"
    except (OSError, AttributeError, ValueError):
        return {}


def _process_join(held: Mapping[str, Any]) -> Waiting | None:
    process = held.get("self")
    pid = getattr(process, "pid", None)
    if process is None or pid is None:
        return None
    return Waiting("join", f"the end of process {process.name}", targets=[("process", pid)], timeout_s=_timeout(held))


def _handle_wait(held: Mapping[str, Any]) -> Waiting | None:
    pid = getattr(held.get("self"), "pid", None)
    return None if pid is None else Waiting("join", f"the end of process {pid}", targets=[("process", pid)], timeout_s=_timeout(held))


def _subprocess(held: Mapping[str, Any]) -> Waiting | None:
    child = held.get("self")
    if child is None or child.pid is None:
        return None
    words = child.args if isinstance(child.args, (list, tuple)) else [child.args]
    name = str(words[0] if words else "").rsplit("/", 1)[-1]
    return Waiting("join", f"the end of {name or 'a command'}", targets=[("process", child.pid)], timeout_s=_timeout(held))


def _elastic_agent(held: Mapping[str, Any]) -> Waiting | None:
    """``run`` of the agent that launches ranks, which looks ten times a second whether they have ended; None before it has started them."""
    context = getattr(held.get("self"), "_pcontext", None)
    with contextlib.suppress(AssertionError):  # it is about to start them
        pids = [*context.pids().values()] if context is not None else []
        return Waiting("join", _ends(pids), targets=[("process", pid) for pid in pids]) if pids else None
    return None


def _pool_result(held: Mapping[str, Any]) -> Waiting | None:
    pool = getattr(held.get("self"), "_pool", None)
    workers = pool if isinstance(pool, list) else getattr(pool, "_pool", None)
    if not isinstance(workers, list):
        return None
    pids = [worker.pid for worker in workers if getattr(worker, "pid", None) is not None]
    targets: list[Target] = [("process", pid) for pid in pids] or [("thread", one.ident) for one in workers if getattr(one, "ident", None)]
    return Waiting("join", "the result of a pool", targets=targets, timeout_s=_timeout(held), facts={"pool": True})


def _pool_join(held: Mapping[str, Any]) -> Waiting | None:
    workers = getattr(held.get("self"), "_pool", ())
    pids = [worker.pid for worker in workers if getattr(worker, "pid", None) is not None]
    return Waiting("join", "the end of a pool", targets=[("process", pid) for pid in pids], facts={"pool": True}) if pids else None


def _future(held: Mapping[str, Any]) -> Waiting | None:
    future = held.get("self")
    return (
        None if future is None else Waiting("join", "the result of a future", on=future, timeout_s=_timeout(held), facts={"future": True})
    )


def _futures(held: Mapping[str, Any]) -> Waiting | None:
    pending = held.get("not_done") or held.get("pending") or held.get("fs")
    one = next(iter(pending), None) if isinstance(pending, (set, frozenset, list, tuple)) else None
    return None if one is None else Waiting("join", "the result of a future", on=one, timeout_s=_timeout(held), facts={"future": True})


def _batch(held: Mapping[str, Any]) -> Waiting | None:
    loader = held.get("self")
    number = getattr(loader, "_rcvd_idx", None)
    task = getattr(loader, "_task_info", {}).get(number)
    if loader is None or number is None or not task:
        return None
    worker = loader._workers[task[0]]
    facts = {"worker": task[0], "workers": len(loader._workers), "pin_memory": bool(getattr(loader, "_pin_memory", False))}
    return Waiting("batch", f"batch {number}", targets=[("process", worker.pid)], facts=facts)


def _loader_end(held: Mapping[str, Any]) -> Waiting | None:
    pids = [worker.pid for worker in getattr(held.get("self"), "_workers", ()) if worker.pid is not None]
    return Waiting("join", "the end of the DataLoader's workers", targets=[("process", pid) for pid in pids]) if pids else None


def _timeout(held: Mapping[str, Any]) -> float | None:
    """Of the whole wait, by the names that the standard library uses."""
    timeout = held.get("timeout")
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        return float(timeout)
    end = next((held[name] for name in ("endtime", "end_time", "deadline") if isinstance(held.get(name), (int, float))), None)
    return None if end is None else max(0.0, end - time.monotonic())


def _children() -> list[Any]:
    from multiprocessing import process  # noqa: PLC0415 - its table of children is private

    return list(vars(process).get("_children", ()))


def _ends(pids: Sequence[int]) -> str:
    return f"the end of process {pids[0]}" if len(pids) == 1 else f"the end of {len(pids)} processes"


READERS: Mapping[tuple[str, str], Callable[[Mapping[str, Any]], Waiting | None]] = {
    ("threading", "wait"): _condition,
    ("threading", "wait_for"): _condition,
    ("threading", "_wait"): _condition,
    ("threading", "acquire"): _semaphore,
    ("importlib._bootstrap", "acquire"): _import_lock,
    ("_frozen_importlib", "acquire"): _import_lock,
    ("multiprocessing.synchronize", "wait"): _shared_event,
    ("multiprocessing.synchronize", "__enter__"): _shared_lock,
    ("threading", "join"): _thread_join,
    ("queue", "get"): _queue("get"),
    ("queue", "put"): _queue("put"),
    ("queue", "join"): _queue("join"),
    ("multiprocessing.queues", "get"): _process_queue("get"),
    ("multiprocessing.queues", "put"): _process_queue("put"),
    ("multiprocessing.connection", "wait"): _connection,
    ("multiprocessing.connection", "recv"): _connection,
    ("multiprocessing.connection", "recv_bytes"): _connection,
    ("multiprocessing.connection", "poll"): _connection,
    ("multiprocessing.connection", "_send"): _pipe_full,
    ("multiprocessing.process", "join"): _process_join,
    ("multiprocessing.popen_fork", "wait"): _handle_wait,
    ("multiprocessing.popen_fork", "poll"): _handle_wait,
    ("multiprocessing.pool", "get"): _pool_result,
    ("multiprocessing.pool", "wait"): _pool_result,
    ("multiprocessing.pool", "next"): _pool_result,
    ("multiprocessing.pool", "join"): _pool_join,
    ("concurrent.futures._base", "result"): _future,
    ("concurrent.futures._base", "exception"): _future,
    ("concurrent.futures._base", "wait"): _futures,
    ("concurrent.futures._base", "as_completed"): _futures,
    ("subprocess", "wait"): _subprocess,
    ("subprocess", "_wait"): _subprocess,
    ("subprocess", "communicate"): _subprocess,
    ("torch.distributed.elastic.agent.server.api", "run"): _elastic_agent,
    ("torch.utils.data.dataloader", "_next_data"): _batch,
    ("torch.utils.data.dataloader", "_get_data"): _batch,
    ("torch.utils.data.dataloader", "_try_get_data"): _batch,
    ("torch.utils.data.dataloader", "_shutdown_workers"): _loader_end,
}

POLLS = frozenset({("torch.distributed.elastic.agent.server.api", "run")})
"""Those that look again and again, and sleep in between: what they call meanwhile is no movement."""
