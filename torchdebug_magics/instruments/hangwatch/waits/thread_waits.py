"""Reads from the frames of a thread what it waits for: the outermost call of the standard library or of PyTorch that is known to wait."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import Target, Waiting, builtin_wait
from torchdebug_magics.probing.source.call_sites import names_of
from torchdebug_magics.probing.source.code_owner import owner

_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "cmd", "IPython.core.debugger", "IPython.terminal.debugger", "pudb.debugger"})
_PROMPTS = frozenset({"interaction", "cmdloop", "_cmdloop", "_do_wait_suspend", "do_wait_suspend"})
_INPUTS = frozenset({"_input_request", "raw_input", "getpass"})
_NETWORK = ("urllib3", "http.client", "urllib.request", "requests", "httpx", "httpcore", "aiohttp", "ssl", "socket", "ftplib", "smtplib")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.utils.cpp_extension", "triton")
_LAUNCHERS = ("torch.distributed.launcher", "torch.distributed.elastic", "torch.distributed.run", "torch.distributed.checkpoint")
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")
_IDLE = {
    ("multiprocessing.pool", "worker"), ("multiprocessing.pool", "_handle_workers"), ("multiprocessing.pool", "_handle_tasks"),
    ("multiprocessing.pool", "_handle_results"), ("concurrent.futures.thread", "_worker"), ("tqdm._monitor", "run"),
    ("concurrent.futures.process", "_process_worker"), ("torch.utils.data._utils.worker", "_worker_loop"),
}  # fmt: skip
"""Loops that wait for work whenever there is none."""
_BEGINNINGS = {("multiprocessing.process", "_bootstrap"), ("multiprocessing.spawn", "_main")}
"""The first call of a process that `multiprocessing` has started: what stands above belongs to its parent, or to the interpreter."""
_PACKAGE = __name__.partition(".")[0]
POLLS = frozenset({("torch.distributed.elastic.agent.server.api", "run")})
"""Those that look again and again, and sleep in between: what they call meanwhile is no movement."""


def own_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, innermost first: those of its own process, without what a loop that polls calls meanwhile."""
    found: list[FrameType] = []
    while frame is not None:
        place = (_module(frame), frame.f_code.co_name)
        if place in POLLS and READERS[place](names_of(frame)) is not None:
            found.clear()
        found.append(frame)
        if place in _BEGINNINGS:
            break
        frame = frame.f_back
    return found


def wait_of(frames: Sequence[FrameType]) -> Waiting | None:
    """None for a thread that computes, as far as its frames tell; `frames` are innermost first."""
    if not frames:
        return None
    inner = frames[: _first_user(frames)]
    for frame in reversed(inner):
        waiting = _known(frame, inner)
        if waiting is not None:
            return waiting
    return builtin_wait(frames[0])


def _first_user(frames: Sequence[FrameType]) -> int:
    return next((at for at, frame in enumerate(frames) if owner(frame.f_code.co_filename) == "user"), len(frames))


def _known(frame: FrameType, inner: Sequence[FrameType]) -> Waiting | None:  # noqa: PLR0911 - a table by module
    module, name = _module(frame), frame.f_code.co_name
    if (loop := _loop(frame, inner)) is not None:
        return loop
    if module in _DEBUGGERS and name in _PROMPTS:
        return Waiting("input", "a debugger's prompt", facts={"debugger": True})
    if name in _INPUTS and module.startswith(("ipykernel", "getpass", "google.colab")):
        is_debugger = any(_module(one) in _DEBUGGERS for one in inner)
        return Waiting("input", "a debugger's prompt" if is_debugger else "your input", facts={"debugger": is_debugger})
    reader = READERS.get((module, name))
    if reader is not None:
        waiting = reader(names_of(frame))
        if waiting is not None:
            return waiting
    if _is_in(module, _COLLECTIVES) and not _is_in(module, _LAUNCHERS) and not name.startswith(("_", "wrapper", "forward")):
        return _collective(name, names_of(frame))
    if _is_in(module, _COMPILERS):
        return Waiting("python", "torch.compile", facts={"compiling": True})
    if _is_in(module, _NETWORK):
        host = _host(inner)
        return Waiting("io", f"a response from {host}" if host else "the network", facts={"network": True, "host": host})
    return None


def _loop(frame: FrameType, inner: Sequence[FrameType]) -> Waiting | None:
    """What a loop of a library's waits for, or an import, which runs a module."""
    module, name = _module(frame), frame.f_code.co_name
    if (module, name) in _IDLE and _has_no_work(frame, inner):
        return Waiting("queue", "more work", facts={"idle": True})
    if (module, name) == ("asyncio.base_events", "_run_once"):
        return Waiting("io", "an event of its loop", facts={"may_end": True})
    if name == "_find_and_load" and module.endswith(("importlib._bootstrap", "_frozen_importlib")) and not _waits_to_import(inner):
        imported = str(names_of(frame).get("name"))
        if imported.partition(".")[0] == _PACKAGE:  # so that a child can be watched: nothing that its own code asks for
            return Waiting("python", "its start", facts={"does": "is starting"})
        return Waiting("python", f"the import of {imported}", facts={"does": f"imports {imported}"})
    return None


def _waits_to_import(inner: Sequence[FrameType]) -> bool:
    return any((_module(frame), frame.f_code.co_name) in READERS for frame in inner if owner(frame.f_code.co_filename) == "python")


def _has_no_work(frame: FrameType, inner: Sequence[FrameType]) -> bool:
    """Whether a loop of a pool waits in its queue: the frame that it has called, if any, is the queue's."""
    at = inner.index(frame)
    called = _module(inner[at - 1]) if at else "queue"
    return called.startswith(("queue", "multiprocessing.queues", "multiprocessing.connection", "multiprocessing.synchronize", "threading"))


def _collective(name: str, held: Mapping[str, Any]) -> Waiting:
    numbers = {key: held[key] for key in ("rank", "world_size", "src", "dst") if isinstance(held.get(key), int) and held[key] >= 0}
    what = f"init_process_group of {numbers['world_size']} ranks" if name == "init_process_group" and "world_size" in numbers else name
    peer = numbers.get("src", numbers.get("dst")) if name in {"send", "recv"} else None
    return Waiting("collective", what if peer is None else f"{name} with rank {peer}", facts={"op": name, "peer": peer, **numbers})


def _host(inner: Sequence[FrameType]) -> str:
    for frame in inner:
        held = names_of(frame)
        for value in (held.get("self"), held.get("conn"), held.get("address")):
            host = getattr(value, "host", None) if not isinstance(value, tuple) else value[0]
            if isinstance(host, str) and host:
                return host
    return ""


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return module.startswith(packages) and any(module == one or module.startswith(f"{one}.") for one in packages)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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
