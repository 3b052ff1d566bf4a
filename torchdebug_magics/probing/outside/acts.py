"""Hears of what a run does to files and to the outside world, before it is done."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Literal, Protocol, TypeAlias

from torch import serialization
from torch._C._dynamo.eval_frame import set_eval_frame

from torchdebug_magics.probing.outside.open_files import path_of_descriptor
from torchdebug_magics.probing.source.user_code import frames_above, owner

Asker: TypeAlias = Literal["user", "library", "thread", "torch", "compiler", "own", "python"]
_SAVER = "_open_zipfile_writer_file"
"""What `torch.save` writes a file with: it opens none in Python."""
_USERS, _FOLLOWED = frozenset({"user"}), frozenset({"user", "library", "thread"})
_WRITING = frozenset("wax+")
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_COMPILERS = tuple(f"{os.sep}torch{os.sep}{name}{os.sep}" for name in ("_inductor", "_dynamo", "_functorch"))
_CACHES = "_write_atomic"
"""With what Python writes the bytecode of a module that is imported."""
_WORKERS = f"{os.sep}multiprocessing{os.sep}"
"""Python's own library makes sockets and folders there, and remembers them."""
_MISSING = object()
_MOST_FILES = 10_000
"""How many files are looked at of a folder that is moved or removed whole."""


class Listener(Protocol):
    """Hears of each act before it happens; what it raises prevents the act."""

    def changes(self, path: str, who: Asker) -> None:
        """The file or folder at this whole path is about to be written, made, moved or removed."""

    def writes(self, number: int) -> None:
        """The user's code is about to write to a descriptor by its number."""

    def acts(self, what: str) -> None:
        """Something is about to happen that nobody can put back: ``connects to example.org:443``."""

    def forks(self, who: Asker) -> None:
        """A child process is about to be forked, which has this listener, too."""

    def starts(self, thread: threading.Thread) -> None:
        """The user's code is about to start a thread."""

    def feeds(self, items: object) -> None:
        """Something is about to be put into this queue."""


def asker(frame: FrameType | None) -> Asker:
    """Whose code asks, be it through Python's own library: ``"library"`` if it is called by the user's, ``"thread"`` if not."""
    for caller in frames_above(frame):
        name = caller.f_code.co_filename
        whose = owner(name)
        if whose == "user" or name == serialization.__file__:
            return "user"
        if whose == "library":
            is_called = any(owner(above.f_code.co_filename) == "user" for above in frames_above(caller))
            return "compiler" if _is_compiling(caller) else "library" if is_called else "thread"
        if whose == "torch":
            return "compiler" if _is_compiling(caller) else "torch"
        if whose != "python":
            return "own"
        if caller.f_code.co_name == _CACHES or _WORKERS in name:
            return "compiler"
    return "python"


def _is_compiling(frame: FrameType) -> bool:
    """Whether a compiler is at work between this frame and the user's code: what it writes is a cache, which may stay."""
    for caller in frames_above(frame):
        name = caller.f_code.co_filename
        if owner(name) == "user":
            return False
        if any(part in name for part in _COMPILERS):
            return True
    return False


def hear(stack: ExitStack, listener: Listener) -> None:
    """Let `listener` hear from here until the stack closes, in forked children as well."""
    stack.callback(_Hook.remove, listener)
    _Hook.add(listener)


def unhear(listener: Listener) -> None:
    """Let it hear no more, also where an interrupt has kept a stack from closing. Harmless the second time."""
    _Hook.remove(listener)


class _Hook:
    """The audit hook of this process, and what stands in for functions that Python does not audit.

    Python removes no audit hook, so there is only this one; without listeners it returns at once, and nothing stands in.
    """

    listeners: tuple[Listener, ...] = ()
    is_added = False
    busy = threading.local()
    undo: tuple[tuple[Any, str, Any, Any], ...] = ()
    """(holder, name, what stands there, what stood there or `_MISSING`)."""

    @classmethod
    def add(cls, listener: Listener) -> None:
        is_first, cls.listeners = not cls.listeners, (*cls.listeners, listener)
        if not cls.is_added:
            cls.is_added = True
            sys.addaudithook(_audited)
        if is_first:
            for holder, name, stand_in in _stand_ins():
                cls.undo = (*cls.undo, (holder, name, stand_in, vars(holder).get(name, _MISSING)))  # first, whatever interrupts
                setattr(holder, name, stand_in)

    @classmethod
    def remove(cls, listener: Listener) -> None:
        cls.listeners = tuple(kept for kept in cls.listeners if kept is not listener)
        while cls.undo and not cls.listeners:
            holder, name, stand_in, original = cls.undo[-1]
            if vars(holder).get(name) is stand_in:  # else the user has put something there, and it stays
                delattr(holder, name) if original is _MISSING else setattr(holder, name, original)
            cls.undo = cls.undo[:-1]


def _audited(event: str, args: tuple[Any, ...]) -> None:
    __tracebackhide__ = True
    if not _Hook.listeners:
        return
    handler = _HANDLERS.get(event)
    if handler is None or getattr(_Hook.busy, "is_set", False):
        return
    _Hook.busy.is_set = True  # what the listener does itself is not heard
    compiler = _set_compiler(None)  # nor compiled, where the user's function is
    try:
        handler(args, sys._getframe(1))
    finally:
        _set_compiler(compiler)
        _Hook.busy.is_set = False


def _set_compiler(callback: Any) -> Any:
    """Set what torch lets compile frames in this thread; returns what was set."""
    return set_eval_frame(callback) if "torch._dynamo" in sys.modules else None


# --- files ---------------------------------------------------------------------------------------------------------------------------


def _changed(paths: Iterator[str], frame: FrameType) -> None:
    __tracebackhide__ = True
    who = asker(frame)
    if who not in {"own", "compiler"}:
        for path in paths:
            for listener in _Hook.listeners:
                listener.changes(path, who)


def _opened(args: tuple[Any, ...], frame: FrameType) -> None:
    __tracebackhide__ = True
    path, mode, flags = args
    is_writing = bool(_WRITING & set(mode)) if isinstance(mode, str) else isinstance(flags, int) and bool(flags & _WRITING_FLAGS)
    if is_writing and not isinstance(path, int) and path is not None:
        _changed(_whole(path, follow=True), frame)


def _at(*places: tuple[int, int | None], follow: bool = False, whole_folder: bool = False) -> Callable[[tuple[Any, ...], FrameType], None]:
    """A handler of an event whose arguments at these places are (path, descriptor of a folder)."""

    def handler(args: tuple[Any, ...], frame: FrameType) -> None:
        __tracebackhide__ = True
        for place, folder in places:
            number = args[folder] if folder is not None and len(args) > folder else -1
            for path in _whole(args[place], number, follow=follow):
                paths = list(islice(_tree(path), _MOST_FILES + 1)) if whole_folder else [path]
                if len(paths) > _MOST_FILES:
                    _act(lambda _: f"moves or removes a folder of more than {_MOST_FILES:,} files")(args, frame)
                _changed(iter(paths), frame)

    return handler


def _whole(path: Any, folder: Any = -1, *, follow: bool = False) -> Iterator[str]:
    """The whole path; none for a descriptor that leads to no file."""
    if isinstance(path, int):
        place = path_of_descriptor(path)
        if place is not None:
            yield place
        return
    if not isinstance(path, (str, bytes, os.PathLike)):
        return
    try:
        base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
        whole = os.path.join(base, os.fsdecode(path))
        place = os.path.realpath(whole) if follow else os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
    except (OSError, TypeError, ValueError):
        return
    if not place.startswith(("/dev/", "/proc/", "/sys/")):
        yield os.path.normpath(place)


def _tree(path: str) -> Iterator[str]:
    yield path
    if os.path.isdir(path) and not os.path.islink(path):
        for folder, folders, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in (*folders, *names))


def _database(args: tuple[Any, ...], frame: FrameType) -> None:
    __tracebackhide__ = True
    path = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else ":memory:"
    if path.startswith("file:"):
        path = path.removeprefix("file:").partition("?")[0]
    if path and not path.startswith(":memory:"):
        for place in _whole(path, follow=True):
            _changed(iter((place, f"{place}-journal", f"{place}-wal", f"{place}-shm")), frame)


# --- acts that nobody can put back -----------------------------------------------------------------------------------------------------


def _act(say: Callable[[tuple[Any, ...]], str]) -> Callable[[tuple[Any, ...], FrameType], None]:
    def handler(args: tuple[Any, ...], frame: FrameType) -> None:
        __tracebackhide__ = True
        what = say(args)
        who = asker(frame) if what else "own"
        if who in _FOLLOWED:
            for listener in _Hook.listeners:
                listener.acts(what)

    return handler


def _address(args: tuple[Any, ...]) -> str:
    address = args[1] if len(args) > 1 else None
    if isinstance(address, tuple) and len(address) > 1:
        return f"connects to {address[0]}:{address[1]}"
    return f"connects to {os.fsdecode(address)}" if isinstance(address, (str, bytes)) and address else "sends to another process"


def _command(command: Any) -> str:
    """The program, without its folder."""
    try:
        words = shlex.split(command) if isinstance(command, str) else [os.fsdecode(word) for word in command]
    except (TypeError, ValueError):
        words = []
    return f"runs the command `{words[0].rpartition(os.sep)[2]}`" if words else "runs a command"


def _name(path: Any) -> str:
    return "a file" if isinstance(path, int) else os.path.basename(os.fsdecode(path))


def _forked(_args: tuple[Any, ...], frame: FrameType) -> None:
    who = asker(frame)
    for listener in _Hook.listeners:
        listener.forks(who)


_HANDLERS: dict[str, Callable[[tuple[Any, ...], FrameType], None]] = {
    "open": _opened,
    "os.remove": _at((0, 1)),
    "os.rmdir": _at((0, 1)),
    "os.mkdir": _at((0, 2)),
    "os.rename": _at((0, 2), (1, 3), whole_folder=True),
    "os.link": _at((1, 3)),
    "os.symlink": _at((1, 2)),
    "os.truncate": _at((0, None), follow=True),
    "os.chmod": _at((0, 2), follow=True),
    "os.chown": _act(lambda args: f"changes the owner of {_name(args[0])}"),
    "os.utime": _at((0, 3), follow=True),
    "os.setxattr": _act(lambda args: f"changes attributes of {_name(args[0])}"),
    "os.removexattr": _act(lambda args: f"changes attributes of {_name(args[0])}"),
    "shutil.rmtree": _at((0, 1), whole_folder=True),
    "sqlite3.connect": _database,
    "socket.connect": _act(_address),
    "socket.sendto": _act(_address),
    "socket.sendmsg": _act(_address),
    "subprocess.Popen": _act(lambda args: _command(args[1])),
    "os.fork": _forked,
    "os.forkpty": _forked,
    "os.system": _act(lambda args: _command(os.fsdecode(args[0]))),
    "os.posix_spawn": _act(lambda args: _command(args[1])),
    "os.exec": _act(lambda args: _command(args[1])),
    "os.kill": _act(lambda args: "" if args[1] == 0 or args[0] == os.getpid() else f"sends a signal to process {args[0]}"),
}


# --- what Python does not audit ----------------------------------------------------------------------------------------------------------


def _stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(holder, name, what stands there meanwhile) for each function that is to be heard."""

    def before(original: Callable[..., Any], hear: Callable[..., object], whose: frozenset[str] = _FOLLOWED) -> Callable[..., Any]:
        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            compiler = _set_compiler(None)
            try:
                if asker(sys._getframe(1)) in whose:
                    for listener in _Hook.listeners:
                        hear(listener, *args)
            finally:
                _set_compiler(compiler)
            return original(*args, **kwargs)

        return stand_in

    yield serialization, _SAVER, before(getattr(serialization, _SAVER), _saved)
    yield queue.Queue, "put", before(queue.Queue.put, lambda listener, items, *_: listener.feeds(items))
    yield ThreadPoolExecutor, "submit", before(ThreadPoolExecutor.submit, lambda listener, pool, *_: listener.feeds(pool._work_queue))
    yield BaseProcess, "start", before(BaseProcess.start, _started)
    yield threading.Thread, "start", before(threading.Thread.start, lambda listener, thread: listener.starts(thread), _USERS)
    yield os, "write", before(os.write, lambda listener, number, *_: listener.writes(number), _USERS)
    sockets: list[Any] = [socket.socket]
    if "ssl" in sys.modules:  # one that is encrypted sends by methods of its own
        sockets.append(sys.modules["ssl"].SSLSocket)
    for kind in sockets:
        for name in ("send", "sendall"):
            yield kind, name, before(getattr(kind, name), _sent)


def _saved(listener: Listener, file: Any, *_: Any) -> None:
    __tracebackhide__ = True
    for path in _whole(file, follow=True):
        listener.changes(path, "user")


def _started(listener: Listener, process: Any) -> None:
    __tracebackhide__ = True
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    if method != "fork":  # a forked child has this hook, too
        listener.acts(f"starts the process `{process.name}`")


def _sent(listener: Listener, connection: Any, *_: Any) -> None:
    __tracebackhide__ = True
    if peer := _peer(connection):
        listener.acts(f"connects to {peer}")


def _peer(connection: Any) -> str:
    """Whom a client talks to; empty for a pair of sockets, and where others have connected to this process."""
    try:
        peer, here = connection.getpeername(), connection.getsockname()
    except OSError:
        return ""
    if isinstance(peer, tuple):
        return "" if here[1] in _served_ports() else f"{peer[0]}:{peer[1]}"
    return os.fsdecode(peer) if peer else ""


def _served_ports() -> set[int]:
    import psutil  # noqa: PLC0415 - only for what sends through a socket

    process: Any = psutil.Process()
    connections = getattr(process, "net_connections", process.connections)(kind="tcp")  # the name before psutil 6
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
