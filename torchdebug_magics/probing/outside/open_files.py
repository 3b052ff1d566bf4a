"""Files that are open, or mapped into memory, before a run: where they stand, and back there."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdebug_magics.machine.process_state import child_pids
from torchdebug_magics.probing.safety import Guard

_DESCRIPTORS = "/proc/self/fd"
_SQLITE = b"SQLite format 3\0"
_STANDARD = 3
"""Descriptors below are the process's own input and output."""
_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO)


@dataclass(eq=False)
class _Handle:
    file: Any
    """A file object, or the number of a descriptor."""
    path: str
    identity: tuple[int, int]
    start: int | None
    """None if the first run has opened it."""
    end: int | None = 0
    """None if the first run has closed it."""
    can_reopen: bool = False
    """Whether it is a file object that can be written to."""

    def is_open(self) -> bool:
        try:
            return _identity(self.number()) == self.identity
        except (OSError, ValueError):
            return False

    def number(self) -> int:
        return self.file if isinstance(self.file, int) else int(self.file.fileno())

    def flush(self) -> None:
        if self.is_open() and not isinstance(self.file, int) and self.file.writable():
            self.file.flush()

    def position(self) -> int:
        self.flush()
        return os.lseek(self.file, 0, os.SEEK_CUR) if isinstance(self.file, int) else int(self.file.tell())

    def put_back(self, position: int | None) -> None:
        """To a position, open again if need be; closed, if None."""
        if position is None:
            self.file.close()
            return
        if not self.is_open():
            self._reopen()
        if isinstance(self.file, int):
            os.lseek(self.file, position, os.SEEK_SET)
        elif self.position() != position:
            self.file.seek(position)

    def _reopen(self) -> None:
        """The same objects, made anew: who holds the file, or a method of it, as a csv writer does, goes on."""
        file = self.file
        is_text = type(file) is io.TextIOWrapper
        buffer = file.buffer if is_text else file
        raw = buffer.raw if hasattr(buffer, "raw") else buffer
        name, mode = raw.name, raw.mode
        number = os.open(self.path, (os.O_RDWR if "+" in mode else os.O_WRONLY) | (os.O_APPEND if "a" in mode else 0))
        if _identity(number) != self.identity:
            os.close(number)
            msg = f"another file stands at {self.path}"
            raise OSError(msg)
        raw.__init__(number, mode)
        raw.name = name
        if buffer is not raw:
            buffer.__init__(raw)
        if is_text:
            file.__init__(buffer, file.encoding, file.errors, line_buffering=file.line_buffering, write_through=file.write_through)


class OpenFiles:
    """All file objects of Python's that are open on regular files, and descriptors that a run writes to by number."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._handles: list[_Handle] = []

    def begin(self) -> Iterator[str]:
        """Note where each stands; yields the paths of those that can be written to."""
        for handle in self._new():
            self._handles.append(handle)
            if handle.can_reopen:
                yield handle.path

    def _new(self) -> list[_Handle]:
        """The files that are open and not known."""
        known = {id(handle.file) for handle in self._handles}
        files = [file for file in _file_objects() if id(file) not in known] if _are_any_open() else []
        handles = [self._guard.run("looking at an open file", _handle_of, file) for file in files]
        return [handle for handle in handles if handle is not None]

    def met(self, number: int) -> str | None:
        """The run is about to write to a descriptor by number; its path if it is new here."""
        known = any(handle.is_open() and handle.number() == number for handle in self._handles)
        handle = None if known else _handle_of(number)
        if handle is None:
            return None
        self._handles.append(handle)
        return handle.path

    def end(self) -> tuple[str, ...]:
        """The run has ended; the paths of files that it has closed and that cannot be opened again."""
        closed = [handle for handle in self._handles if not handle.is_open()]
        for handle in self._handles:
            handle.end = None if handle in closed else self._guard.run("looking at an open file", handle.position) or 0
        for handle in self._new():  # a rerun from the end may close it
            handle.start, handle.end = None, handle.start
            self._handles.append(handle)
        return tuple(handle.path for handle in closed if not handle.can_reopen)

    def flush(self) -> None:
        """Nothing that a run has written waits in memory."""
        for handle in self._handles:
            self._guard.run("writing an open file", handle.flush)

    def put_back(self, *, to_end: bool) -> None:
        """Where each stood at the start, or at the end of the first run."""
        for handle in self._handles:
            is_there = to_end or handle.start is not None
            if is_there and (handle.is_open() or handle.can_reopen):
                self._guard.run("putting back an open file", handle.put_back, handle.end if to_end else handle.start)

    def close(self) -> None:
        """Nothing is put back any more."""
        self._handles.clear()


def path_of_descriptor(number: int) -> str | None:
    """The path of a regular file that is open; None if it has none, or another file stands there."""
    try:
        path = os.readlink(f"{_DESCRIPTORS}/{number}")
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    is_file = stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == _identity(number)
    return path if is_file else None


def paths_written_by_others() -> frozenset[str]:
    """What other processes have open for writing, as far as this one may see; a child has what it was forked with."""
    own = {os.getpid(), *child_pids(os.getpid())}
    written: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        if int(folder.parent.name) not in own:
            with contextlib.suppress(OSError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:
                            written.add(os.readlink(entry.path))
    return frozenset(written)


def mapped_paths() -> Iterator[str]:
    """Regular files that are mapped into memory so that writing there writes to them."""
    seen: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and "w" in fields[1] and "s" in fields[1] and fields[5].startswith("/"):  # noqa: PLR2004 - as proc(5) says
                path = fields[5]
                # A database shares its own memory through one of these, a process its tensors through another.
                if path not in seen and not path.startswith("/dev/") and not path.endswith("-shm") and os.path.isfile(path):
                    seen.add(path)
                    yield path


def _are_any_open() -> bool:
    """Whether Python may have a regular file open: a search of all objects takes a moment."""
    if not os.path.isdir(_DESCRIPTORS):
        return True
    numbers = (int(name) for name in os.listdir(_DESCRIPTORS) if name.isdigit())
    return any(number >= _STANDARD and path_of_descriptor(number) is not None and not _is_database(number) for number in numbers)


def _is_database(number: int) -> bool:
    """Whether the file is one of SQLite's, as IPython's history is: nobody has it open through Python.

    It is read through the descriptor itself: to close another one would drop the locks that the database has on it.
    """
    try:
        return os.pread(number, len(_SQLITE), 0) == _SQLITE
    except OSError:
        return False


def _file_objects() -> list[Any]:
    """The outermost ones: not the buffer of a text file, nor the raw file of a buffer."""
    # By their type: a lazy object may answer otherwise, with an import.
    files: list[Any] = [thing for thing in gc.get_objects() if type(thing) in _KINDS and _is_plain(thing)]
    inner: set[int] = set()
    for file in files:
        for name in ("buffer", "raw"):
            with contextlib.suppress(AttributeError, ValueError):
                inner.add(id(getattr(file, name)))
    return [file for file in files if id(file) not in inner]


def _is_plain(file: Any) -> bool:
    """Whether nothing stands between the file object and the disk."""
    return type(file) is not io.TextIOWrapper or type(getattr(file, "buffer", None)) in _KINDS


def is_stream(value: object) -> bool:
    """Whether it is a file that can be written to and not be put back: a pipe, or one whose state only something in between knows."""
    kind = type(value)
    if not issubclass(kind, io.IOBase) or issubclass(kind, (io.BytesIO, io.StringIO)):
        return False
    file: Any = value
    try:
        if file.closed or not file.writable() or (number := file.fileno()) < _STANDARD:
            return False
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
    except Exception:  # noqa: BLE001 - a class of the user's may answer in any way
        return False
    return not is_file or kind not in _KINDS or not _is_plain(file)


def _handle_of(file: Any) -> _Handle | None:
    try:
        number = file if isinstance(file, int) else file.fileno()
        path = path_of_descriptor(number) if number >= _STANDARD else None
        if path is None and number >= _STANDARD and isinstance(getattr(file, "name", None), str) and not os.path.isdir(_DESCRIPTORS):
            path = os.path.abspath(file.name)  # where the system does not tell
        if path is None:
            return None
        handle = _Handle(file, path, _identity(number), 0)
        handle.start = handle.position()
        handle.can_reopen = not isinstance(file, int) and file.writable()
    except (OSError, ValueError):  # closed, or in the middle of being read line by line
        return None
    return handle


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino
