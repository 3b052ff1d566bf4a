"""Reads from the frames of a thread what it waits for, the outermost call that is known to wait, and who holds that."""

from __future__ import annotations

import ast
import contextlib
import gc
import multiprocessing.process
import operator
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, FunctionType, MappingProxyType
from typing import Any, TypeAlias

from torchdebug_magics.instruments.hangwatch.waits import builtin_waits
from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import LOCKS, Kind, Reach, Target, Waiting, lock_wait, pipe_of, runs_loop
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, line_of, names_of, value_of
from torchdebug_magics.probing.source.syntax import WITHS, enclosing, last_name, loops_around, nodes, own_nodes
from torchdebug_magics.probing.source.user_code import is_user_code, owner

_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "cmd", "IPython.core.debugger", "IPython.terminal.debugger", "pudb.debugger"})
_PROMPTS = frozenset({"interaction", "cmdloop", "_cmdloop", "_do_wait_suspend", "do_wait_suspend"})
_INPUTS = frozenset({"_input_request", "raw_input", "getpass"})
_NETWORK = (
    "urllib3.", "http.client.", "urllib.request.", "requests.", "httpx.", "httpcore.", "aiohttp.", "ssl.", "socket.", "ftplib.", "smtplib.",
    "asyncio.streams.",
)  # fmt: skip
COMPILERS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "torch.utils.cpp_extension.", "triton.")
_LAUNCHERS = ("torch.distributed.launcher.", "torch.distributed.elastic.", "torch.distributed.run.", "torch.distributed.checkpoint.")
_COLLECTIVES = ("torch.distributed.", "torch.nn.parallel.distributed.")
_IDLE = {
    ("multiprocessing.pool", "worker"), ("multiprocessing.pool", "_handle_workers"), ("multiprocessing.pool", "_handle_tasks"),
    ("multiprocessing.pool", "_handle_results"), ("concurrent.futures.thread", "_worker"), ("tqdm._monitor", "run"),
    ("concurrent.futures.process", "_process_worker"), ("torch.utils.data._utils.worker", "_worker_loop"),
}  # fmt: skip
"""Loops that wait for work whenever there is none."""
_QUEUES = ("queue", "multiprocessing.queues", "multiprocessing.connection", "multiprocessing.synchronize", "threading")
_BEGINNINGS = {("multiprocessing.process", "_bootstrap"), ("multiprocessing.spawn", "_main")}
"""The first call of a process that `multiprocessing` has started: what stands above belongs to its parent, or to the interpreter."""
_POOL = "concurrent.futures.thread"
_PACKAGE = __name__.partition(".")[0]
POLLS = frozenset({("torch.distributed.elastic.agent.server.api", "run")})
"""Those that look again and again, and sleep in between: what they call meanwhile is no movement."""
Stacks = Mapping[int, Sequence[FrameType]]
"""The frames of each thread, by its ident, innermost first."""
_OWNER = re.compile(r"owner=(\d+)")
_MOST_FUNCTIONS = 2000


def own_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, innermost first: those of its own process, without what a loop that polls calls meanwhile."""
    frames: list[FrameType] = []
    while frame is not None:
        place = (_module(frame), frame.f_code.co_name)
        if place in POLLS and READERS[place](names_of(frame)) is not None:
            frames.clear()
        frames.append(frame)
        if place in _BEGINNINGS:
            break
        frame = frame.f_back
    return frames


def wait_of(frames: Sequence[FrameType]) -> Waiting | None:
    """None for a thread that computes, as far as its frames tell; `frames` are innermost first."""
    if not frames:
        return None
    inner = frames[: next((at for at, frame in enumerate(frames) if owner(frame.f_code.co_filename) == "user"), len(frames))]
    for frame in reversed(inner):
        waiting = _known(frame, inner)
        if waiting is not None:
            return waiting
    return builtin_waits.builtin_wait(frames[0])


def task_wait(task: Any, tasks: Sequence[Any]) -> Waiting:
    """What a task of asyncio's awaits: as told by its frames, or another task, or a future."""
    frames, waited = builtin_waits.task_frames(task), builtin_waits.awaited(task)
    waiting = next(filter(None, (_known(frame, frames) for frame in reversed(frames))), None)
    targets: list[Target] = [("thread", id(one)) for one in waited if one in tasks]
    if waiting is None and targets:
        return Waiting("join", "a task", targets=targets)
    return waiting or Waiting("event", "a future", on=waited[0], facts={"of_loop": True})


def _known(frame: FrameType, inner: Sequence[FrameType]) -> Waiting | None:  # noqa: PLR0911 - a table by module
    module, name, at = _module(frame), frame.f_code.co_name, inner.index(frame)
    inside = f"{module}."
    # A loop of a pool waits in its queue where the frame that it has called, if any, is the queue's.
    if (module, name) in _IDLE and (not at or _module(inner[at - 1]).startswith(_QUEUES)):
        return Waiting("queue", "more work", facts={"idle": True})
    if runs_loop(frame):
        return Waiting("io", "an event of its loop", facts={"may_end": True})
    if name == "_find_and_load" and module.endswith(("importlib._bootstrap", "_frozen_importlib")) and (imports := _import(frame, inner)):
        return imports
    is_prompt = module in _DEBUGGERS and name in _PROMPTS
    if is_prompt or (name in _INPUTS and module.startswith(("ipykernel", "getpass", "google.colab"))):
        is_debugger = is_prompt or any(_module(one) in _DEBUGGERS for one in inner)
        return Waiting("input", "a debugger's prompt" if is_debugger else "your input", facts={"debugger": is_debugger})
    reader = READERS.get((module, name))
    if reader is not None and (waiting := reader(names_of(frame))) is not None:
        return waiting
    if inside.startswith(_COLLECTIVES) and not inside.startswith(_LAUNCHERS) and not name.startswith(("_", "wrapper", "forward")):
        return _collective(name, names_of(frame))
    if inside.startswith(COMPILERS):
        return Waiting("python", "torch.compile", facts={"compiling": True})
    if inside.startswith(_NETWORK):
        host = _host(inner)
        return Waiting("io", f"a response from {host}" if host else "the network", facts={"network": True, "host": host})
    return None


def _import(frame: FrameType, inner: Sequence[FrameType]) -> Waiting | None:
    if any((_module(one), one.f_code.co_name) in READERS for one in inner if owner(one.f_code.co_filename) == "python"):
        return None  # it waits to import
    imported = str(names_of(frame).get("name"))
    if imported.partition(".")[0] == _PACKAGE:  # so that a child can be watched: nothing that its own code asks for
        return Waiting("python", "its start", facts={"does": "is starting"})
    return Waiting("python", f"the import of {imported}", facts={"does": f"imports {imported}"})


def _collective(name: str, held: Mapping[str, Any]) -> Waiting:
    numbers = {key: held[key] for key in ("rank", "world_size", "src", "dst") if isinstance(held.get(key), int) and held[key] >= 0}
    what = f"init_process_group of {numbers['world_size']} ranks" if name == "init_process_group" and "world_size" in numbers else name
    peer = numbers.get("src", numbers.get("dst")) if name in {"send", "recv"} else None
    return Waiting("collective", what if peer is None else f"{name} with rank {peer}", facts={"op": name, "peer": peer, **numbers})


def _host(inner: Sequence[FrameType]) -> str:
    for frame in inner:
        names = names_of(frame)
        for value in (names.get("self"), names.get("conn"), names.get("address")):
            host = getattr(value, "host", None) if not isinstance(value, tuple) else value[0]
            if isinstance(host, str) and host:
                return host
    return ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


_Read: TypeAlias = Callable[[Mapping[str, Any]], Waiting | None]


def _wait(
    kind: Kind, what: str | Callable[[Any], str], *, on: Callable[[Any], Iterable[Target]] | None = None,
    pipe: Callable[[Any], Any] | None = None, facts: Mapping[str, bool] = MappingProxyType({}),
) -> _Read:  # fmt: skip
    """A row of the table: a method waits, on its `self` unless `on` names who ends the wait.

    It does not wait where `what` is empty, or `on` names nobody, or an attribute is missing, as those are private.
    """

    def read(held: Mapping[str, Any]) -> Waiting | None:
        waiter = held.get("self")
        with contextlib.suppress(AttributeError, AssertionError):
            targets = [*on(waiter)] if on is not None else []
            text = what if isinstance(what, str) else what(waiter)
            if waiter is not None and text and (targets or on is None):
                more = {} if pipe is None else pipe_of(pipe(waiter), "socket:")
                return Waiting(kind, text, None if on else waiter, targets, timeout_s=_timeout(held), facts={**facts, **more})
        return None

    return read


def _synchronizer(waiter: Any) -> str:
    """``wait`` of an event, a condition or a barrier: one name, three classes."""
    kind = type(waiter).__name__
    if kind == "Barrier":
        return f"barrier for {waiter.parties} threads, {waiter.n_waiting} of which have arrived"
    return kind.lower() if kind in {"Event", "Condition"} else ""


def _processes(*started: Any) -> list[Target]:
    return [("process", one.pid) for one in started if getattr(one, "pid", None) is not None]


def _ends(targets: Sequence[Target]) -> str:
    return f"the end of process {targets[0][1]}" if len(targets) == 1 else f"the end of {len(targets)} processes"


def _command(child: Any) -> str:
    words = child.args if isinstance(child.args, (list, tuple)) else [child.args]
    return f"the end of {str(words[0] if words else '').rsplit('/', 1)[-1] or 'a command'}"


def _pool_workers(result: Any) -> list[Target]:
    """Of a pool, or of the pool of a result; the threads of a `ThreadPool`."""
    pool = result._pool
    workers = pool if isinstance(pool, list) else pool._pool
    return _processes(*workers) or [("thread", worker.ident) for worker in workers if getattr(worker, "ident", None)]


def _ranks(agent: Any) -> list[Target]:
    """Of the agent that launches ranks, which looks ten times a second whether they have ended; none before it has started them."""
    return [("process", pid) for pid in agent._pcontext.pids().values()]


def _connections(held: Mapping[str, Any]) -> Waiting | None:
    """``multiprocessing.connection.wait``: of what a launcher joins, the sentinels of its processes."""
    children = vars(multiprocessing.process).get("_children", ())
    targets = _processes(*(child for child in tuple(children) if child.sentinel in held["object_list"]))
    return Waiting("join" if targets else "io", _ends(targets) if targets else "a pipe", targets=targets, timeout_s=_timeout(held))


def _connection(held: Mapping[str, Any]) -> Waiting:
    """A pipe; or a socket with an address: whoever answers may be on another machine, or no process of ours."""
    connection: Any = held.get("self")
    facts: dict[str, Any] = pipe_of(connection, "socket:")
    with contextlib.suppress(OSError, AttributeError, ValueError):  # it is closed
        if stat.S_ISSOCK(os.fstat(connection.fileno()).st_mode):
            with socket.socket(fileno=os.dup(connection.fileno())) as copy:
                leads_elsewhere = copy.family != getattr(socket, "AF_UNIX", None) or copy.getpeername() or copy.getsockname()
                facts = {"network": True} if leads_elsewhere else facts
    return Waiting("io", "a message from a pipe", timeout_s=_timeout(held), facts=facts)


def _futures(held: Mapping[str, Any]) -> Waiting | None:
    pending = held.get("not_done") or held.get("pending") or held.get("fs")
    future = next(iter(pending), None) if isinstance(pending, (set, frozenset, list, tuple)) else None
    return _FUTURE({**held, "self": future})


def _batch(held: Mapping[str, Any]) -> Waiting | None:
    loader = held.get("self")
    number = getattr(loader, "_rcvd_idx", None)
    task = getattr(loader, "_task_info", {}).get(number)
    if loader is None or not task:
        return None
    facts = {"worker": task[0], "workers": len(loader._workers), "pin_memory": bool(getattr(loader, "_pin_memory", False))}
    return Waiting("batch", f"batch {number}", targets=_processes(loader._workers[task[0]]), facts=facts)


def _timeout(held: Mapping[str, Any]) -> float | None:
    """Of the whole wait, by the names that the standard library uses."""
    timeout = held.get("timeout")
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        return float(timeout)
    end = next((held[name] for name in ("endtime", "end_time", "deadline") if isinstance(held.get(name), (int, float))), None)
    return None if end is None else max(0.0, end - time.monotonic())


_FUTURE = _wait("join", "the result of a future", facts={"future": True})
_SEMAPHORE = _wait("lock", "semaphore")
_PIPE_FULL = _wait("io", "room in a pipe that nobody reads", pipe=lambda one: one, facts={"pipe_full": True})
_READER = operator.attrgetter("_reader")
_DATALOADER = "torch.utils.data.dataloader"
_TABLE: tuple[tuple[str, str, _Read], ...] = (
    ("threading", "wait wait_for _wait", _wait("event", _synchronizer)),
    ("threading", "acquire", lambda held: _SEMAPHORE(held) if held.get("blocking", True) else None),
    ("threading", "join", _wait("join", "the end of thread {0.name}".format, on=lambda one: [("thread", one.ident)] if one.ident else [])),
    *(
        (module, "acquire", _wait("lock", "the import of {0.name}".format, on=lambda one: [("thread", one.owner)] if one.owner else []))
        for module in ("importlib._bootstrap", "_frozen_importlib")
    ),
    (
        "multiprocessing.synchronize",
        "wait",
        _wait("event", lambda one: f"multiprocessing {type(one).__name__.lower()}", facts={"shared": True}),
    ),
    ("multiprocessing.synchronize", "__enter__", lambda held: lock_wait(held.get("self"))),
    *(("queue", word, _wait("queue", f"queue.{word}()", facts={word: True})) for word in ("get", "put", "join")),
    *(
        ("multiprocessing.queues", word, _wait("queue", f"multiprocessing queue.{word}()", pipe=_READER, facts={word: True}))
        for word in ("get", "put")
    ),
    ("multiprocessing.connection", "wait", _connections),
    ("multiprocessing.connection", "recv recv_bytes poll", _connection),
    ("multiprocessing.connection", "_send", _PIPE_FULL),
    ("multiprocessing.process", "join", _wait("join", "the end of process {0.name}".format, on=_processes)),
    ("multiprocessing.popen_fork", "wait poll", _wait("join", "the end of process {0.pid}".format, on=_processes)),
    ("multiprocessing.pool", "get wait next", _wait("join", "the result of a pool", on=_pool_workers, facts={"pool": True})),
    ("multiprocessing.pool", "join", _wait("join", "the end of a pool", on=lambda pool: _processes(*pool._pool), facts={"pool": True})),
    ("concurrent.futures._base", "result exception", _FUTURE),
    ("concurrent.futures._base", "wait as_completed", _futures),
    ("subprocess", "wait _wait communicate", _wait("join", _command, on=_processes)),
    ("asyncio.locks", "wait wait_for", _wait("event", lambda one: f"asyncio {type(one).__name__.lower()}")),
    ("asyncio.locks", "acquire", _wait("lock", lambda one: f"asyncio {type(one).__name__.lower()}")),
    *(("asyncio.queues", word, _wait("queue", f"asyncio queue.{word}()", facts={word: True})) for word in ("get", "put", "join")),
    ("asyncio.tasks", "sleep", lambda held: Waiting("sleep", f"asyncio.sleep({held.get('delay', 0)})")),
    ("asyncio.subprocess", "wait communicate _read_stream", _wait("join", "the end of process {0.pid}".format, on=_processes)),
    ("torch.distributed.elastic.agent.server.api", "run", _wait("join", lambda agent: _ends(_ranks(agent)), on=_ranks)),
    (_DATALOADER, "_next_data _get_data _try_get_data", _batch),
    (_DATALOADER, "_shutdown_workers", _wait("join", "the end of the DataLoader's workers", on=lambda one: _processes(*one._workers))),
)
"""(module, functions, how their local names say what they wait for)."""
READERS: Mapping[tuple[str, str], _Read] = {(module, name): read for module, names, read in _TABLE for name in names.split()}


def find_holders(ident: int, waiting: Waiting, stacks: Stacks, waits: Mapping[int, Waiting | None], reach: Callable[[int], Reach]) -> None:
    """Fill in `targets` and `able`, and in `facts` where a lock was acquired; `reach` is asked for that of a thread, by its ident."""
    if waiting.on is None or waiting.targets:
        return
    if waiting.facts.get("of_loop"):
        # A thread of a pool that runs the user's code may compute what a coroutine awaits; else a socket, a process or a callback.
        users = {other: frames for other, frames in stacks.items() if any(is_user_code(frame.f_code) for frame in frames)}
        waiting.targets = [("thread", other) for other, frames in users.items() if any(_module(frame) == _POOL for frame in frames)]
        waiting.facts["may_end"] = True
        return
    if waiting.kind == "lock":
        _lock_holder(ident, waiting, stacks, reach)
    elif waiting.facts.get("future"):
        waiting.targets = _runners(waiting.on, stacks)
        if not waiting.targets and any(_is_to_run(waiting.on, frame) for frame in stacks[ident]):
            waiting.targets = [("thread", ident)]
            waiting.facts["own_loop"] = True
        waiting.kind = "join" if waiting.targets else "event"
    alike = {other for other, its in waits.items() if its is not None and (its.on is waiting.on or its.facts.get("idle"))}
    others = [other for other in stacks if other != ident and other not in alike]
    if waiting.kind in {"queue", "event"} and not waiting.targets:
        waiting.targets = [("thread", other) for other in others if reach(other).names(waiting.on)]
    if waiting.kind in {"queue", "event"} or (waiting.kind == "lock" and waiting.targets in ([], [("thread", ident)])):
        waiting.able = [("thread", other) for other in others if reach(other).can_get(waiting.on)]


def _lock_holder(ident: int, waiting: Waiting, stacks: Stacks, reach: Callable[[int], Reach]) -> None:
    lock = waiting.on
    told = _OWNER.search(repr(lock)) if isinstance(lock, LOCKS) else None
    if told is not None and int(told[1]):
        waiting.targets = [("thread", int(told[1]))]
    for other, frames in sorted(stacks.items(), key=lambda item: item[0] != ident):
        for frame in (frame for frame in frames if owner(frame.f_code.co_filename) in {"user", "library"}):
            line, by_with = _acquired_at(frame, lock)
            shared = getattr(lock, "_semlock", None)
            is_free = other == ident and shared is not None and not shared._count()  # this process does not hold it
            if line is None or is_free or (waiting.targets and waiting.targets != [("thread", other)]):
                continue
            others = [one for one in stacks if one != ident and reach(one).names(lock)] if other == ident and not by_with else []
            waiting.targets = [("thread", other) for other in others or [other]]  # a lock may be a signal, that another thread gives
            waiting.facts["acquired"] = (frame.f_code.co_filename, line, frame.f_code.co_name)
            return
    if not waiting.targets:
        waiting.facts["acquired"], waiting.facts["acquired_by_with"] = _acquired_somewhere(str(waiting.facts.get("name", "")))


def _acquired_at(frame: FrameType, lock: Any) -> tuple[int | None, bool]:
    """The line of a frame's function at which it took the lock that it still holds, and whether by a `with`."""
    function = function_node(frame.f_code) if not frame.f_code.co_filename.startswith("<frozen") else None
    if function is None:
        return None, False
    line, names = line_of(frame), names_of(frame)
    for statement in enclosing(function, line):
        if isinstance(statement, WITHS) and line > statement.lineno:
            for item in statement.items:
                if _same(value_of(item.context_expr, frame, names), lock):
                    return item.context_expr.lineno, True
    taken: int | None = None
    for word, at in _called_on(lock, function, frame, names):
        if at < line:
            taken = at if word == "acquire" else None if word == "release" else taken
    if taken is None:  # by the last round of a loop whose body never gives it back, at the line where it waits now
        words = [word for loop in loops_around(function, line)[-1:] for word, _ in _called_on(lock, loop, frame, names)]
        taken = line if words and "release" not in words else None
    return taken, False


def _called_on(lock: Any, inside: ast.AST, frame: FrameType, names: dict[str, Any]) -> list[tuple[str, int]]:
    """(method, line) of the calls on a lock in a function or loop, in the order of the text."""
    functions = [node.func for node in own_nodes(inside) if isinstance(node, ast.Call)]
    methods = (function for function in functions if isinstance(function, ast.Attribute))
    return [(method.attr, method.lineno) for method in methods if _same(value_of(method.value, frame, names), lock)]


def _same(value: Any, lock: Any) -> bool:
    return value is not MISSING and (value is lock or (type(value).__module__ == "threading" and getattr(value, "_lock", None) is lock))


def _acquired_somewhere(name: str) -> tuple[tuple[str, int, str] | None, bool]:
    """Where a function of the user's that has ended took a lock of this name, if only one does, and whether in a `with`."""
    found = []
    values = list(vars(sys.modules["__main__"]).values())[:_MOST_FUNCTIONS] if name else []
    functions = (each for value in values for each in (value, *(vars(value).values() if issubclass(type(value), type) else ())))
    for code in (each.__code__ for each in functions if isinstance(each, FunctionType) and is_user_code(each.__code__)):
        function = function_node(code)
        taken = [(node.value, False) for node in nodes(ast.Attribute, function) if node.attr == "acquire"]
        taken += [(node.context_expr, True) for node in nodes(ast.withitem, function)]
        found += [((code.co_filename, node.lineno, code.co_name), by_with) for node, by_with in taken if last_name(node) == name]
    return found[0] if len(found) == 1 else (None, bool(found) and all(by_with for _, by_with in found))


def _runners(future: Any, stacks: Stacks) -> list[Target]:
    """The thread that runs a future's work; of one that waits for its turn, the threads of its pool that are busy."""
    busy: list[tuple[int, Any]] = []
    for ident, frames in stacks.items():
        for frame in frames:
            if _module(frame) == _POOL and frame.f_code.co_name in {"run", "_worker"}:
                names = names_of(frame)
                if getattr(names.get("self"), "future", None) is future:
                    return [("thread", ident)]
                if frame.f_code.co_name == "_worker" and names.get("work_item") is not None:
                    busy.append((ident, names.get("work_queue")))
    # What waits in a pool's queue is held by its `SimpleQueue`, which tells the collector what it refers to.
    queued = ((ident, referent) for ident, queue in busy if queue is not None for referent in gc.get_referents(queue))
    waiting = ((ident, item) for ident, one in queued for item in (tuple(one) if isinstance(one, list) else (one,)))
    return list(dict.fromkeys(("thread", ident) for ident, item in waiting if getattr(item, "future", None) is future))


def _is_to_run(future: Any, frame: FrameType) -> bool:
    """Whether it stands for a coroutine that an event loop, run by this frame, has been asked for and cannot begin."""
    ready = getattr(names_of(frame).get("self"), "_ready", ()) if runs_loop(frame) else ()
    closures = (getattr(getattr(handle, "_callback", None), "__closure__", None) or () for handle in tuple(ready))
    return any(cell.cell_contents is future for closure in closures for cell in closure)
