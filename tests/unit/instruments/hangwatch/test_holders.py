"""Who holds a lock, feeds a queue, sets an event, runs a future: found in the process itself."""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.hangwatch.waits.process_facts import facts_of_this_process

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Resting = Callable[..., threading.Thread]


def waits() -> dict[str, dict[str, Any]]:
    """By the name of the thread."""
    threads = facts_of_this_process()["threads"]
    names = {one["ident"]: one["name"] for one in threads}
    found = {one["name"]: dict(one["waiting"]) for one in threads if one["waiting"]}
    for one in found.values():
        one["who"] = [names.get(number) for kind, number in one["targets"] if kind == "thread"]
    return found


def acquired_line(waiting: dict[str, Any]) -> str:
    import linecache

    file, line, _ = waiting["acquired"]
    return linecache.getline(file, line).strip()


def test_a_lock_that_was_released_again_is_not_held_by_who_did(resting: Resting) -> None:
    lock, end = threading.Lock(), threading.Event()

    def had_it() -> None:
        lock.acquire()
        lock.release()
        end.wait()

    def wants() -> None:
        lock.acquire()

    resting(had_it, release=end.set)
    lock.acquire()
    resting(wants, release=lock.release)
    assert waits()["wants"]["who"] == ["MainThread"]


def test_a_lock_that_is_held_further_out(resting: Resting) -> None:
    lock, end = threading.Lock(), threading.Event()

    def holds() -> None:
        with lock:
            deeper()

    def deeper() -> None:
        end.wait()

    def wants() -> None:
        with lock:
            pass

    resting(holds, release=end.set)
    resting(wants, release=lambda: None)
    found = waits()["wants"]
    assert found["who"] == ["holds"]
    assert acquired_line(found) == "with lock:"


def test_a_reentrant_lock_says_who_holds_it(resting: Resting) -> None:
    lock, end = threading.RLock(), threading.Event()

    def hidden() -> None:
        getattr(lock, "acquire")()  # noqa: B009 - as no line of the source says it
        end.wait()
        lock.release()

    def wants() -> None:
        with lock:
            pass

    resting(hidden, release=end.set)
    resting(wants, release=lambda: None)
    assert waits()["wants"]["who"] == ["hidden"]


def test_the_lock_of_a_condition(resting: Resting) -> None:
    condition, end = threading.Condition(), threading.Event()

    def holds() -> None:
        with condition:
            end.wait()

    def wants() -> None:
        with condition:
            pass

    resting(holds, release=end.set)
    resting(wants, release=lambda: None)
    assert waits()["wants"]["who"] == ["holds"]


def loops_and_release() -> tuple[Callable[[], None], Callable[[], None]]:
    """Apart, so that the main thread has no name for the lock: it could be the one that gives it."""
    lock = threading.Lock()

    def loops() -> None:
        for _ in range(2):
            lock.acquire()

    return loops, lock.release


def test_a_lock_that_a_loop_took_in_its_last_round(resting: Resting) -> None:
    loops, release = loops_and_release()
    resting(loops, release=release)
    assert waits()["loops"]["who"] == ["loops"]


def test_a_lock_that_a_function_has_taken_and_kept(resting: Resting, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "cell.py"
    file.write_text("import threading\nkept = threading.Lock()\ndef take():\n    kept.acquire()\n")
    cell = types.ModuleType("__main__")
    exec(compile(file.read_text(), str(file), "exec"), vars(cell))
    monkeypatch.setitem(sys.modules, "__main__", cell)
    vars(cell)["take"]()
    kept = vars(cell)["kept"]

    def wants() -> None:
        kept.acquire()

    resting(wants, release=kept.release)
    found = waits()["wants"]
    assert found["who"] == []
    assert tuple(found["acquired"])[:2] == (str(file), 4)
    monkeypatch.undo()


def test_who_could_still_feed_a_queue(resting: Resting) -> None:
    feed: queue.Queue[int] = queue.Queue()
    end = threading.Event()

    def feeder() -> None:
        end.wait()
        feed.put(1)

    def reads() -> None:
        feed.get()

    def reads_too() -> None:
        feed.get()

    def stranger() -> None:
        end.wait()

    def release() -> None:
        end.set()
        feed.put(1)

    resting(feeder, reads, reads_too, stranger, release=release)
    found = waits()
    assert "feeder" in found["reads"]["who"]
    assert not {"reads", "reads_too", "stranger"} & set(found["reads"]["who"])


def test_who_could_still_set_an_event_that_an_object_holds(resting: Resting) -> None:
    holder = types.SimpleNamespace(ready=threading.Event())
    ready, end = holder.ready, threading.Event()

    def setter() -> None:
        end.wait()
        holder.ready.set()

    def wants() -> None:
        ready.wait()

    resting(setter, wants, release=end.set)
    assert "setter" in waits()["wants"]["who"]


def test_who_runs_a_future_and_who_stands_before_it(resting: Resting) -> None:
    end = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1, "pool") as pool:
        runs, queued = pool.submit(end.wait), pool.submit(int)

        def wants_running() -> None:
            runs.result()

        def wants_queued() -> None:
            queued.result()

        resting(wants_running, wants_queued, release=end.set)
        found = waits()
        assert found["wants_running"]["who"] == ["pool_0"]
        assert found["wants_queued"]["who"] == ["pool_0"]
        end.set()


def test_whoever_has_a_future_that_was_made_by_hand_can_resolve_it(resting: Resting) -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()

    def wants() -> None:
        future.result()

    resting(wants, release=lambda: future.set_result(1))
    assert waits()["wants"]["who"] == ["MainThread"]


def test_looking_takes_no_lock_and_runs_nothing_of_the_users(resting: Resting) -> None:
    ran: list[str] = []

    class Alarmed:
        def __getattr__(self, name: str) -> Any:
            ran.append(name)
            raise AttributeError(name)

        @property
        def lock(self) -> threading.Lock:
            ran.append("lock")
            return threading.Lock()

        def __eq__(self, other: object) -> bool:
            ran.append("__eq__")
            return False

        __hash__ = None  # type: ignore[assignment]

    lock, alarmed = threading.Lock(), Alarmed()
    lock.acquire()

    def wants() -> Any:
        lock.acquire()
        return alarmed

    def other() -> Any:
        end.wait()
        with alarmed.lock:
            return alarmed

    end = threading.Event()
    resting(wants, other, release=lambda: (lock.release(), end.set()))
    for _ in range(3):
        facts_of_this_process()
    assert ran == []
    assert lock.locked()
