"""What is older than a run and that it may change: threads, streams, databases; and what it leaves running."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType, FrameType, FunctionType
from typing import Any

from torchdebug_magics.machine.process_state import child_pids, process_state
from torchdebug_magics.probing.names import Named, values_found
from torchdebug_magics.probing.outside.acts import Asker
from torchdebug_magics.probing.outside.open_files import is_stream
from torchdebug_magics.probing.outside.unseen_changes import is_shareable, used_by, used_in
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, local_values

_MOST_WAIT_S = 5.0
"""For threads that a rerun has started and not joined."""
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_RECURSIVE})


class Surroundings:
    """Finds reasons for which code cannot run again, each as what the code does: ``leaves the thread `x` running``."""

    def __init__(self, guard: Guard, roots: tuple[object, ...] = (), *, looks: bool = True) -> None:
        self._guard, self._looks = guard, looks
        self._threads = frozenset(threading.enumerate()) - {threading.current_thread()}
        self._started: list[threading.Thread] = []
        self._of_run: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._queues: list[object] = []
        self._has_forked = False
        used = used_by(*roots) if looks else []
        spaces = [root for root in roots if type(root) is dict] if looks else []
        self._names = lambda: [
            *used,
            *(Named(str(name), value) for space in spaces for name, value in space.items() if str(name)[:1] != "_"),
        ]
        self._children = _children() if looks else frozenset()
        self._databases = [(database.name, database.value, _state_of(database.value)) for database in self._connections()]
        self._used_databases = [(database.name, database.value) for database in values_found(iter(used), _is_connection)]
        streams = (f"may write to the open stream `{stream.name}`" for stream in values_found(iter(used), is_stream))
        self.shared = (*streams, *_shared_with_threads(used, self._threads))
        """What the run may do to streams and threads that are older."""

    def is_older_thread(self) -> bool:
        """Whether the current thread was there before the run."""
        return _this_thread() in self._threads

    def is_thread_of_run(self) -> bool:
        """Whether the user's code has started the current thread in the run."""
        return _this_thread() in self._of_run

    def starts(self, thread: threading.Thread) -> None:
        """The run starts a thread."""
        self._started.append(thread)
        self._of_run.add(thread)

    def forks(self, who: Asker) -> None:
        """The run forks a child; workers of a DataLoader may outlive it."""
        self._has_forked |= who in {"user", "library", "thread"}

    def feeds(self, items: object) -> Iterator[str]:
        """The run puts something into a queue."""
        self._queues.append(items)
        yield from (f"hands work to the thread `{name}`, which is older" for name in _consumers(items, self._threads))

    def wait(self) -> Iterator[str]:
        """Wait for the threads that the run has started: all that they write is put back, too."""
        until_s = time.monotonic() + _MOST_WAIT_S
        for thread in self._started:
            if thread.is_alive() and thread is not threading.current_thread():
                yield f"leaves the thread `{thread.name}` running"
                thread.join(max(0.0, until_s - time.monotonic()))
        self._started.clear()

    def left(self) -> Iterator[str]:
        """What the run has left behind."""
        if not self._looks:
            return
        for thread in threading.enumerate():
            is_new = thread not in self._threads and thread is not threading.current_thread()
            if is_new and (thread in self._started or any(_users_frames(thread.ident))):
                yield f"leaves the thread `{thread.name}` running"
        for items in self._queues:
            yield from (f"hands work to the thread `{name}`, which goes on" for name in _consumers(items, None))
        if self._has_forked and _children() - self._children:
            yield "leaves a process running"
        for name, connection, state in self._databases:
            if state is not None and _state_of(connection) not in {state, None}:
                yield f"changes the database behind `{name}`"
        known = {id(connection) for _, connection, _ in self._databases}
        for database in self._connections():
            if id(database.value) not in known and (_state_of(database.value) or (0, False))[1]:
                yield f"leaves the database behind `{database.name}` in a transaction"

    def forbid_writes(self, stack: ExitStack, note: Callable[[str], None]) -> None:
        """Until the stack closes, a database that was open before refuses to be written."""
        for name, connection in self._used_databases:

            def allowed(action: int, *_: object, name: str = name) -> int:
                if action in _READS:
                    return sqlite3.SQLITE_OK
                note(f"changes the database behind `{name}`")
                return sqlite3.SQLITE_DENY

            with contextlib.suppress(sqlite3.Error):  # closed, or another thread's
                connection.set_authorizer(allowed)
                stack.callback(self._guard.run, "letting a database be written", connection.set_authorizer, None)

    def _connections(self) -> list[Any]:
        named = iter(self._names())
        return list(values_found(named, _is_connection))


def _this_thread() -> threading.Thread | None:
    known: dict[int, threading.Thread] = vars(threading)["_active"]  # `current_thread` may make an object
    return known.get(threading.get_ident())


def used_by_other_threads() -> frozenset[int]:
    """The ids of what the user's code in other threads works on now, such as a deque that one of them empties: nobody may rewind it."""
    others = [thread for thread in sys._current_frames() if thread != threading.get_ident()]
    values = [value for thread in others for frame in _users_frames(thread) for value in _values_in(frame)]
    return frozenset(id(value) for value in values if is_shareable(value) and not _is_plain(value))


def _users_frames(thread: int | None) -> Iterator[FrameType]:
    """The frames of the user's code in which a thread is, by its number."""
    return (frame for frame in frames_above(sys._current_frames().get(thread or 0)) if is_user_code(frame.f_code))


def _values_in(frame: FrameType) -> list[object]:
    """What the code of a frame may use: its variables, and the global ones that it names."""
    return [value for _, value in (*local_values(frame).items(), *used_in(frame.f_code, frame.f_globals))]


def _shared_with_threads(used: list[Named], threads: frozenset[threading.Thread]) -> Iterator[str]:
    """Reasons: variables and functions of the run that an older thread of the user's uses as well."""
    functions = (getattr(variable.value, "__func__", variable.value) for variable in used)
    codes = {inner for function in functions if type(function) is FunctionType for inner in _codes(function.__code__)}
    known = {id(variable.value): variable.name for variable in used if is_shareable(variable.value) and not _is_plain(variable.value)}
    for thread in threading.enumerate():
        for frame in _users_frames(thread.ident) if thread in threads else ():
            if frame.f_code in codes:
                yield f"uses `{frame.f_code.co_name}`, which the thread `{thread.name}` still runs"
            shared = next((known[id(value)] for value in _values_in(frame) if id(value) in known), "")
            if shared:
                yield f"shares `{shared}` with the thread `{thread.name}`, which is older"


def _is_plain(value: object) -> bool:
    """Whether it is a dict of settings, which threads may read."""
    return isinstance(value, dict) and all(isinstance(part, (str, int, float, bool, type(None))) for part in value.values())


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if type(part) is CodeType:
            yield from _codes(part)


def _consumers(items: object, among: frozenset[threading.Thread] | None) -> Iterator[str]:
    """Names of other threads that wait for, or work on, what is put into a queue."""
    for thread in threading.enumerate():
        if thread is threading.current_thread() or (among is not None and thread not in among):
            continue
        frames = frames_above(sys._current_frames().get(thread.ident or 0))
        if any(value is items for frame in frames for value in local_values(frame).values()):
            yield thread.name


def _children() -> frozenset[int]:
    """Processes that this one has started and that still run."""
    states = map(process_state, child_pids(os.getpid()))
    return frozenset(state.pid for state in states if state is not None and not state.is_zombie)


def _is_connection(value: object) -> bool:
    return issubclass(type(value), sqlite3.Connection)


def _state_of(connection: sqlite3.Connection) -> tuple[int, bool] | None:
    """How much it has changed, and whether it is in a transaction; None where it is closed, or another thread's."""
    try:
        return connection.total_changes, connection.in_transaction
    except sqlite3.Error:
        return None
