"""Files that were open before the first run: later runs write through the same handles, to copies."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.twice.disk.disk_calls import FILES
from torchdebug_magics.probing.where import runs_alone

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.disk.before import Before
    from torchdebug_magics.instruments.deterministic.twice.disk.view import View
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Handles", "is_file"]

_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)


def is_file(value: object) -> bool:
    """Whether it is a handle of a file that can be written to."""
    if type(value) not in _KINDS:  # by its type: a lazy object may answer otherwise, with an import
        return False
    file: Any = value
    try:
        return bool(file.writable()) and not file.closed and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):
        return False


@dataclass
class _Handle:
    number: int
    file: Any
    """None where only its number is known."""
    path: str
    identity: tuple[int, int]
    start: int
    end: int = 0

    def is_there(self) -> bool:
        """Whether it is still that file."""
        if self.file is not None and self.file.closed:
            return False
        try:
            return _identity(self.number) == self.identity
        except OSError:
            return False

    def place(self) -> int:
        """How far it is, with all that was written on the disk."""
        if self.file is None:
            return os.lseek(self.number, 0, os.SEEK_CUR)
        self.file.flush()
        place: int = self.file.tell()
        return place

    def go(self, place: int) -> None:
        """To a place that was told before."""
        if self.file is None:
            os.lseek(self.number, place, os.SEEK_SET)
        else:
            self.file.seek(place)


class Handles:
    """Those that the user's names lead to, and those that a run writes to by number."""

    def __init__(self, before: Before, guard: Guard) -> None:
        self._before = before
        self._guard = guard
        self._handles: dict[int, _Handle] = {}
        self._of_run: set[int] = set()

    def before_run(self, files: Iterable[Any]) -> None:
        """Note how far each is."""
        for file in files:
            self._guard.run("looking at an open file", self._note, file.fileno(), file)

    def opened(self, number: int) -> None:
        """The first run has opened it."""
        self._of_run.add(number)

    def met(self, number: int) -> None:
        """The first run is about to write to it by number."""
        with contextlib.suppress(OSError):
            if number not in self._handles and number not in self._of_run and stat.S_ISREG(os.fstat(number).st_mode):
                self._guard.run("looking at an open file", self._note, number, None)

    def over(self) -> tuple[str, ...]:
        """The first run has ended: those that it has closed, a phrase each."""
        closed = [one for one in self._handles.values() if not one.is_there()]
        for one in closed:
            del self._handles[one.number]
        for one in self._handles.values():
            one.end = self._guard.run("looking at an open file", one.place) or 0
        return tuple(f"the file {os.path.basename(one.path)}, which the first run closed" for one in closed)

    def lead_to(self, view: View, stack: ExitStack) -> None:
        """Until the stack closes, what is written goes to copies; not where a thread of the user's may write to one meanwhile."""
        for one in self._handles.values():
            if one.is_there() and runs_alone():
                stack.callback(self._guard.run, "putting back an open file", one.go, one.end)
                self._guard.run("leading an open file elsewhere", _lead, one, view.to_write(one.path), stack)

    def _note(self, number: int, file: Any) -> None:
        path = _path(number, file)
        if path is None:
            return
        handle = _Handle(number, file, path, _identity(number), 0)
        handle.start = handle.place()
        # What is written at its end leaves what was there before.
        self._before.note(path, grows=os.fstat(number).st_size <= os.lseek(number, 0, os.SEEK_CUR) or _appends(file))
        self._handles[number] = handle


def _lead(handle: _Handle, place: str, stack: ExitStack) -> None:
    kept = os.dup(handle.number)
    stack.callback(os.close, kept)
    stack.callback(os.dup2, kept, handle.number)
    copy = os.open(place, os.O_RDWR | (os.O_APPEND if _appends(handle.file) else 0))
    try:
        os.dup2(copy, handle.number)
    finally:
        os.close(copy)
    if handle.file is not None:
        stack.callback(handle.file.flush)
    handle.go(handle.start)


def _appends(file: Any) -> bool:
    return "a" in str(getattr(file, "mode", ""))


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino


def _path(number: int, file: Any) -> str | None:
    """None where it has none, or another file stands there."""
    name = getattr(file, "name", None)
    path = os.path.abspath(name) if isinstance(name, str) else None
    with contextlib.suppress(OSError):
        path = os.readlink(f"{FILES}/{number}")
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return path if found is not None and (found.st_dev, found.st_ino) == _identity(number) else None
