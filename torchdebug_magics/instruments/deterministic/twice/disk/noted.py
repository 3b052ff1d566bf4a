"""The calls of the first run that change something on the disk: done as they are, with a note of what was there before."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import serialization

from torchdebug_magics.errors import DeterminismError
from torchdebug_magics.instruments.deterministic.twice.disk.disk_calls import SAVER, asker, is_writing, path_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.disk.before import Before
    from torchdebug_magics.instruments.deterministic.twice.disk.handles import Handles

__all__ = ["Noted"]

REFUSED = "--strict: {}, which cannot be undone for a second run: move it to its own cell"
_FOLLOWED = frozenset({"user", "library", "thread"})
_MOST_NAMES = 10_000
"""Of a folder whose order is remembered, or whose files are kept before it is moved."""


class Noted:
    """What stands in, by the name of the function: ``"os.mkdir"``."""

    def __init__(self, before: Before, handles: Handles, *, strict: bool) -> None:
        self._before = before
        self._handles = handles
        self._strict = strict
        self.appended: dict[str, None] = {}
        """Files that are added to, by name."""

    def calls(self) -> dict[str, Callable[..., Any]]:
        """One for each."""
        one = {name: self._of_one(getattr(os, name)) for name in ("mkdir", "rmdir", "remove", "unlink", "truncate")}
        two = {name: self._of_two(getattr(os, name)) for name in ("rename", "replace", "symlink", "link")}
        opening = {"open": self._opened(builtins.open), "os.open": self._os_opened(os.open)}
        others = {
            SAVER: self._saved(getattr(serialization, SAVER)),
            "os.write": self._written(os.write),
            "os.listdir": self._listed(os.listdir),
        }
        return {**opening, **others, **{f"os.{name}": call for name, call in {**one, **two}.items()}}

    def changes(self, path: str) -> str:
        """The run is about to change it by means of its own."""
        self._before.note(path)
        return path

    def _note(self, path: str | None, *, grows: bool = False, frame: Any) -> None:
        __tracebackhide__ = True
        who = "" if path is None else asker(frame)
        if path is None or who not in _FOLLOWED:
            return
        is_added_to = grows and who == "user" and path not in self._before and os.path.exists(path)
        if is_added_to and self._strict:
            raise DeterminismError(REFUSED.format(f"the file {os.path.basename(path)} is added to"))
        if is_added_to:
            self.appended[os.path.basename(path)] = None
        self._before.note(path, grows=grows)

    def _opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if isinstance(mode, str) and is_writing(mode) and kwargs.get("opener") is None:
                self._note(path_of(file, {}), grows="a" in mode, frame=sys._getframe(1))
            return original(file, mode, *args, **kwargs)

        return opened

    def _os_opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            __tracebackhide__ = True
            if is_writing(flags):
                grows = bool(flags & os.O_APPEND) and not flags & os.O_TRUNC
                self._note(path_of(path, kwargs), grows=grows, frame=sys._getframe(1))
            number: int = original(path, flags, *args, **kwargs)
            self._handles.opened(number)
            return number

        return opened

    def _saved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def saved(file: Any) -> Any:
            __tracebackhide__ = True
            self._note(path_of(file, {}), frame=sys._getframe(1))
            return original(file)

        return saved

    def _written(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def written(number: int, data: Any) -> int:
            __tracebackhide__ = True
            if asker(sys._getframe(1)) == "user":
                self._handles.met(number)
            count: int = original(number, data)
            return count

        return written

    def _listed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: Any = ".") -> Any:
            __tracebackhide__ = True
            names = original(path)
            whole = path_of(path, {})
            if whole is not None and len(names) <= _MOST_NAMES and asker(sys._getframe(1)) in _FOLLOWED:
                self._before.listed[whole] = list(names)
            return names

        return listed

    def _of_one(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._note(path_of(path, kwargs), frame=sys._getframe(1))
            return original(path, *args, **kwargs)

        return changed

    def _of_two(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            frame = sys._getframe(1)
            first, second = path_of(source, kwargs), path_of(target, kwargs)
            if original.__name__ in {"rename", "replace"}:
                for one in _inside(first):
                    self._note(one, frame=frame)
            self._note(second, frame=frame)
            return original(source, target, *args, **kwargs)

        return changed


def _inside(path: str | None) -> Iterator[str]:
    """A path, and what is in the folder that it may be."""
    if path is None:
        return
    yield path
    if os.path.isdir(path):
        for count, (folder, _, names) in enumerate(os.walk(path)):
            if count > _MOST_NAMES:
                return
            yield from (os.path.join(folder, name) for name in names)
