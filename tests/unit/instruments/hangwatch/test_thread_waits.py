# ruff: noqa: PLW0108 - a function of the user's stands between the thread and what it calls
"""What a thread waits for, read from its frames: every way to wait that the standard library has, in real threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.pool
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics.instruments.hangwatch.waits.process_facts import facts_of_this_process
from torchdebug_magics.instruments.hangwatch.waits.thread_waits import own_frames, wait_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import Waiting

    Wait = tuple[Callable[[], object], Callable[[], object]]
    Resting = Callable[..., threading.Thread]

pytestmark = pytest.mark.usefixtures("none_outlives")
FORK = multiprocessing.get_context("fork")


def waiting_of(thread: threading.Thread) -> Waiting | None:
    return wait_of(own_frames(sys._current_frames()[thread.ident or 0]))


def lock_acquire_with_timeout() -> Wait:
    lock = threading.Lock()
    lock.acquire()
    return lambda: lock.acquire(timeout=30), lock.release


def lock_of_an_object() -> Wait:
    class Holder:
        def __init__(self) -> None:
            self.locks = {"a": [threading.Lock()]}

    holder = Holder()
    holder.locks["a"][0].acquire()

    def wait() -> None:
        with holder.locks["a"][0]:
            pass

    return wait, holder.locks["a"][0].release


def event() -> Wait:
    one = threading.Event()
    return lambda: one.wait(), one.set


def event_with_timeout() -> Wait:
    one = threading.Event()
    return lambda: one.wait(30), one.set


def condition() -> Wait:
    one = threading.Condition()

    def wait() -> None:
        with one:
            one.wait()

    def notify() -> None:
        with one:
            one.notify_all()

    return wait, notify


def condition_for() -> Wait:
    one, done = threading.Condition(), []

    def wait() -> None:
        with one:
            one.wait_for(lambda: done)

    def notify() -> None:
        done.append(1)
        with one:
            one.notify_all()

    return wait, notify


def barrier() -> Wait:
    one = threading.Barrier(3)

    def wait() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            one.wait()

    return wait, one.abort


def semaphore() -> Wait:
    one = threading.Semaphore(0)
    return lambda: one.acquire(), one.release


def thread_join_with_timeout() -> Wait:
    end = threading.Event()
    other = threading.Thread(target=end.wait, name="other", daemon=True)
    other.start()
    return lambda: other.join(30), end.set


def queue_get() -> Wait:
    one: queue.Queue[int] = queue.Queue()
    return lambda: one.get(), lambda: one.put(1)


def queue_put() -> Wait:
    one: queue.Queue[int] = queue.Queue(1)
    one.put(1)
    return lambda: one.put(2), one.get


def simple_queue() -> Wait:
    one: queue.SimpleQueue[int] = queue.SimpleQueue()
    return lambda: one.get(), lambda: one.put(1)


def sleep() -> Wait:
    return lambda: time.sleep(0.4), lambda: None


def process_event() -> Wait:
    one = FORK.Event()
    return lambda: one.wait(), one.set


def process_lock() -> Wait:
    one = FORK.Lock()
    one.acquire()
    return lambda: one.acquire(), one.release


def process_lock_with() -> Wait:
    one = FORK.Lock()
    one.acquire()

    def wait() -> None:
        with one:
            pass

    return wait, one.release


def pipe_recv() -> Wait:
    ours, theirs = multiprocessing.Pipe()
    return lambda: ours.recv(), lambda: theirs.send(1)


def pipe_poll() -> Wait:
    ours, theirs = multiprocessing.Pipe()
    return lambda: ours.poll(30), lambda: theirs.send(1)


def command_wait() -> Wait:
    child = subprocess.Popen(["sleep", "60"])
    return lambda: child.wait(), child.kill


def command_communicate() -> Wait:
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE)
    return lambda: child.communicate(), child.kill


def thread_pool_map() -> Wait:
    pool, end = multiprocessing.pool.ThreadPool(1), threading.Event()

    def release() -> None:
        end.set()
        pool.close()
        pool.join()

    return lambda: pool.map(lambda _: end.wait(), [1]), release


def futures_wait() -> Wait:
    one: concurrent.futures.Future[int] = concurrent.futures.Future()
    return lambda: concurrent.futures.wait([one]), lambda: one.set_result(1)


def futures_as_completed() -> Wait:
    one: concurrent.futures.Future[int] = concurrent.futures.Future()
    return lambda: list(concurrent.futures.as_completed([one])), lambda: one.set_result(1)


def socket_recv() -> Wait:
    ours, theirs = socket.socketpair(socket.AF_UNIX)

    def release() -> None:
        theirs.send(b"x")
        theirs.close()

    return lambda: (ours.recv(1), ours.close()), release


def socket_accept() -> Wait:
    listening = socket.create_server(("127.0.0.1", 0))

    def release() -> None:
        with socket.create_connection(listening.getsockname()):
            pass
        listening.close()

    return lambda: listening.accept()[0].close(), release


def pipe_read() -> Wait:
    reading, writing = os.pipe()

    def release() -> None:
        os.write(writing, b"x")
        os.close(writing)

    return lambda: (os.read(reading, 1), os.close(reading)), release


def file_read() -> Wait:
    reading, writing = os.pipe()
    file = os.fdopen(reading, "rb")
    return lambda: (file.read(), file.close()), lambda: os.close(writing)


def select_select() -> Wait:
    reading, writing = os.pipe()

    def release() -> None:
        os.write(writing, b"x")
        os.close(writing)
        os.close(reading)

    return lambda: select.select([reading], [], [], 30.0), release


def waitpid() -> Wait:
    child = subprocess.Popen(["sleep", "60"])

    def wait() -> None:
        child.returncode = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])

    return wait, child.kill


# By the way to wait: kind, what, timeout (None: none; 30: nearly), what its targets are
WAYS: dict[Callable[[], Wait], tuple[str, str, float | None, str]] = {
    lock_acquire_with_timeout: ("lock", "lock", 30, ""),
    lock_of_an_object: ("lock", "lock", None, ""),
    event: ("event", "event", None, ""),
    event_with_timeout: ("event", "event", 30, ""),
    condition: ("event", "condition", None, ""),
    condition_for: ("event", "condition", None, ""),
    barrier: ("event", "barrier", None, ""),
    semaphore: ("lock", "semaphore", None, ""),
    thread_join_with_timeout: ("join", "the end of thread other", 30, "thread"),
    queue_get: ("queue", "queue.get()", None, ""),
    queue_put: ("queue", "queue.put()", None, ""),
    simple_queue: ("queue", "queue.get()", None, ""),
    sleep: ("sleep", "time.sleep(0.4)", None, ""),
    process_event: ("event", "multiprocessing event", None, ""),
    process_lock: ("lock", "multiprocessing Lock", None, ""),
    process_lock_with: ("lock", "multiprocessing Lock", None, ""),
    pipe_recv: ("io", "a message from a pipe", None, ""),
    pipe_poll: ("io", "a message from a pipe", 30, ""),
    command_wait: ("join", "the end of sleep", None, "process"),
    command_communicate: ("join", "the end of sleep", None, "process"),
    thread_pool_map: ("join", "the result of a pool", None, "thread"),
    futures_wait: ("join", "the result of a future", None, ""),
    futures_as_completed: ("join", "the result of a future", None, ""),
    socket_recv: ("io", "a socket", None, ""),
    socket_accept: ("io", "the network", None, ""),
    pipe_read: ("io", "os.read()", None, ""),
    file_read: ("io", "a pipe or file", None, ""),
    select_select: ("io", "a file or socket", 30, ""),
    waitpid: ("join", "the end of a process", None, "process"),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_to_wait(way: Callable[[], Wait], resting: Resting) -> None:
    kind, what, timeout_s, targets = WAYS[way]
    wait, release = way()
    found = waiting_of(resting(wait, release=release))
    assert found is not None
    assert found.kind == kind
    assert found.what.startswith(what)
    assert (found.timeout_s is None) == (timeout_s is None)
    if timeout_s is not None:
        assert timeout_s - 15 < (found.timeout_s or 0) <= timeout_s
    assert {of for of, _ in found.targets} == ({targets} if targets else set())


def test_an_answer_at_a_prompt(resting: Resting, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    file = os.fdopen(reading)
    monkeypatch.setattr(sys, "stdin", file)
    thread = resting(lambda: input(), release=lambda: None)
    found = waiting_of(thread)
    os.write(writing, b"yes\n")
    thread.join(5)
    monkeypatch.undo()
    file.close()
    os.close(writing)
    assert found is not None
    assert (found.kind, found.what) == ("input", "your input")


@pytest.mark.parametrize("name", ["interaction", "cmdloop"])
def test_a_debugger_is_known_by_its_functions(name: str, resting: Resting) -> None:
    end = threading.Event()
    space: dict[str, Any] = {"__name__": "pdb", "wait": end.wait}
    exec(compile(f"def {name}():\n    wait()", threading.__file__, "exec"), space)
    found = waiting_of(resting(space[name], release=end.set))
    assert found is not None
    assert (found.kind, found.facts["debugger"]) == ("input", True)


@pytest.mark.parametrize(
    ("code", "module"),
    [("def _worker():\n    q.get()", "concurrent.futures.thread"), ("def run():\n    q.get()", "tqdm._monitor")],
)
def test_who_waits_for_work_is_idle(code: str, module: str, resting: Resting) -> None:
    one: queue.Queue[int] = queue.Queue()
    space: dict[str, Any] = {"__name__": module, "q": one}
    exec(compile(code, threading.__file__, "exec"), space)
    function = space["_worker" if "_worker" in space else "run"]
    found = waiting_of(resting(function, release=lambda: one.put(1)))
    assert found is not None
    assert found.facts == {"idle": True}


def test_a_worker_of_a_pool_that_has_none(resting: Resting) -> None:
    with concurrent.futures.ThreadPoolExecutor(1, "mine") as pool:
        pool.submit(int).result()
        time.sleep(0.05)
        thread = next(one for one in threading.enumerate() if one.name.startswith("mine"))
        found = waiting_of(thread)
        assert found is not None
        assert found.facts.get("idle")
        end = threading.Event()
        busy = pool.submit(lambda: end.wait())
        time.sleep(0.05)
        found = waiting_of(thread)
        assert found is not None
        assert (found.kind, found.what, found.facts.get("idle")) == ("event", "event", None)
        end.set()
        busy.result()


def test_an_agent_that_polls_its_ranks_waits_for_their_end(resting: Resting) -> None:
    """Torch's agent of an elastic launch; what it calls meanwhile, here a wait, is none of its own."""
    end = threading.Event()
    space: dict[str, Any] = {"__name__": "torch.distributed.elastic.agent.server.api", "end": end}
    exec(compile("def run(self):\n    end.wait()", threading.__file__, "exec"), space)
    pids = {0: os.getpid(), 1: os.getppid()}
    agent = types.SimpleNamespace(_pcontext=None)
    thread = resting(lambda: space["run"](agent), release=end.set)
    assert (found := waiting_of(thread)) is not None
    assert found.kind == "event", "it has started none"
    agent._pcontext = types.SimpleNamespace(pids=lambda: pids)
    found = waiting_of(thread)
    assert found is not None
    assert (found.kind, found.targets) == ("join", [("process", os.getpid()), ("process", os.getppid())])
    assert own_frames(sys._current_frames()[thread.ident or 0])[0].f_code.co_name == "run"


def test_who_computes_waits_for_nothing(looping: Callable[..., Any]) -> None:
    frame = looping("x = 0\nwhile True:\n    x += 1")
    assert wait_of(own_frames(frame)) is None
    assert wait_of([]) is None


def test_a_call_that_does_not_block_is_no_wait(looping: Callable[..., Any]) -> None:
    lock = threading.Lock()
    lock.acquire()
    frame = looping("while True:\n    lock.acquire(blocking=False)", lock=lock)
    for _ in range(50):
        found = wait_of(own_frames(frame))
        assert found is None
        time.sleep(0.001)


def test_a_fork_has_no_frames_of_its_parents() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = FORK.Process(target=lambda: theirs.send([frame.f_code.co_name for frame in own_frames(sys._getframe())]))
    process.start()
    assert ours.poll(10)
    assert ours.recv()[-1] == "_bootstrap"
    process.join()
    ours.close()
    theirs.close()


# Coroutines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def loop_thread(resting: Resting) -> Callable[[Callable[[], Any]], dict[str, dict[str, Any]]]:
    """Run a coroutine by `asyncio.run` in a thread; the facts of all threads, by name."""

    def begin(main: Callable[[], Any]) -> dict[str, dict[str, Any]]:
        ends: list[Any] = []

        async def both() -> None:
            task = asyncio.ensure_future(main())
            ends.append((asyncio.get_running_loop(), asyncio.current_task(), task))
            with contextlib.suppress(asyncio.CancelledError):
                await task

        def end() -> None:
            loop, _, task = ends[0]
            loop.call_soon_threadsafe(task.cancel)

        def runs_loop() -> None:
            asyncio.run(both())

        resting(runs_loop, release=end)
        return {one["name"]: one for one in facts_of_this_process()["threads"]}

    return begin


async def _event() -> None:
    await asyncio.Event().wait()


async def _lock() -> None:
    lock = asyncio.Lock()
    await lock.acquire()
    await lock.acquire()


async def _sleep() -> None:
    await asyncio.sleep(60)


async def _future() -> None:
    await asyncio.get_running_loop().create_future()


async def _gather() -> None:
    await asyncio.gather(_event(), _sleep())


TASKS = {
    _event: ("event", "asyncio event"),
    _lock: ("lock", "asyncio lock"),
    _future: ("event", "a future"),
    _gather: ("join", "a task"),
}


@pytest.mark.parametrize("main", TASKS, ids=lambda main: main.__name__)
def test_what_a_coroutine_awaits(main: Callable[[], Any], loop_thread: Callable[..., dict[str, dict[str, Any]]]) -> None:
    threads = loop_thread(main)
    own = threads["runs_loop"]
    assert own["waiting"]["kind"] == "join", "its own task waits for the one that was made"
    (ident,) = (number for kind, number in own["waiting"]["targets"] if kind == "thread")
    task = next(one for one in threads.values() if one["ident"] == ident)
    assert task["name"].startswith("task ")
    assert (task["waiting"]["kind"], task["waiting"]["what"]) == TASKS[main]
    assert main.__name__ in [name for *_, name in task["frames"]]
    assert "both" in [name for *_, name in own["frames"]]
    if main is _gather:
        assert len(task["waiting"]["targets"]) == 2


def test_a_thread_that_blocks_inside_a_coroutine_stands_there(
    loop_thread: Callable[..., dict[str, dict[str, Any]]],
) -> None:
    async def blocks() -> None:
        time.sleep(0.5)  # noqa: ASYNC251 - as a user does by mistake

    threads = loop_thread(blocks)
    assert threads["runs_loop"]["waiting"]["what"] == "time.sleep(0.5)"


def test_the_facts_are_plain_data_and_hold_no_thread_of_ours() -> None:
    import json

    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="torchdebug-one", daemon=True)
    thread.start()
    nan, long, surrogate = float("nan"), "x" * 1000, "\ud800"
    facts = json.loads(json.dumps(facts_of_this_process(), allow_nan=False))
    assert (nan != nan, len(long), len(surrogate)) == (True, 1000, 1)  # noqa: PLR0124
    assert facts["pid"] == os.getpid()
    assert "torchdebug-one" not in [one["name"] for one in facts["threads"]]
    (main,) = (one for one in facts["threads"] if one["is_main"])
    assert "nan" not in main["values"]
    assert "long" not in main["values"]
    end.set()
    thread.join()
