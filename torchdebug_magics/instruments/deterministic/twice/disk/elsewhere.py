"""The calls of a later run that reach the disk: they find it as the first run did, and leave it as that one has left it."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import serialization

from torchdebug_magics.instruments.deterministic.twice.disk.disk_calls import SAVER, Entry, Folder, asker, is_writing, path_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.disk.view import View

__all__ = ["Elsewhere"]

_READING = ("stat", "access", "listxattr", "getxattr", "statvfs", "chdir")
_OF_A_LINK = ("lstat", "readlink")
_MARKING = ("chmod", "utime", "chown", "setxattr", "removexattr")


class Elsewhere:
    """What stands in, by the name of the function: ``"os.mkdir"``."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._others = frozenset(one.ident for one in threading.enumerate()) - {threading.get_ident()}
        """Threads that were there before the run: what they do is none of it."""

    def calls(self) -> dict[str, Callable[..., Any]]:
        """One for each."""
        found: dict[str, Callable[..., Any]] = {
            "open": self._opened(builtins.open),
            "os.open": self._os_opened(os.open),
            SAVER: self._saved(getattr(serialization, SAVER)),
            "os.listdir": self._listed(os.listdir),
            "os.scandir": self._scanned(os.scandir),
            "os.truncate": self._truncated(os.truncate),
            "os.mkdir": self._changed(os.mkdir, lambda path, mode=0o777: self._view.make_folder(path, mode)),
            "os.rmdir": self._changed(os.rmdir, lambda path: self._view.remove(path, is_folder=True)),
            "os.remove": self._changed(os.remove, lambda path: self._view.remove(path, is_folder=False)),
            "os.unlink": self._changed(os.unlink, lambda path: self._view.remove(path, is_folder=False)),
            "os.rename": self._changed_two(os.rename, self._view.move),
            "os.replace": self._changed_two(os.replace, self._view.move),
            "os.link": self._changed_two(os.link, self._copied),
            "os.symlink": self._linked(os.symlink),
        }
        found |= {f"os.{name}": self._read(getattr(os, name)) for name in _READING if hasattr(os, name)}
        found |= {f"os.{name}": self._read(getattr(os, name), follow=False) for name in _OF_A_LINK}
        found |= {f"os.{name}": self._marked(getattr(os, name)) for name in _MARKING if hasattr(os, name)}
        return found

    def _is_ours(self, path: str, frame: Any) -> bool:
        who = "" if threading.get_ident() in self._others else asker(frame)
        return who in {"user", "library"} or (who == "thread" and self._view.is_known(path))

    def _read(self, original: Callable[..., Any], *, follow: bool = True) -> Callable[..., Any]:
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            whole = path_of(path, kwargs)
            if whole is None or not self._view.is_known(whole) or not self._is_ours(whole, sys._getframe(1)):
                return original(path, *args, **kwargs)
            place = self._view.where(whole, follow=follow)
            if place == whole:
                return original(path, *args, **kwargs)
            return _as_of(path, place, lambda: original(place, *args, **kwargs))

        return read

    def _opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            whole = path_of(file, {}) if kwargs.get("opener") is None and isinstance(mode, str) else None
            if whole is None or not self._is_ours(whole, sys._getframe(1)):
                return original(file, mode, *args, **kwargs)
            if "x" in mode and os.path.lexists(self._view.where(whole)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
            place = self._view.to_write(whole, anew="w" in mode) if is_writing(mode) and "r" not in mode else self._to_change(whole, mode)
            return _as_of(file, place, lambda: original(file if place == whole else place, mode, *args, **kwargs))

        return opened

    def _to_change(self, whole: str, mode: str) -> str:
        """To read, or to write to what is there."""
        place = self._view.where(whole)
        return self._view.to_write(whole) if "+" in mode and os.path.exists(place) else place

    def _os_opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            whole = path_of(path, kwargs)
            if whole is None or not self._is_ours(whole, sys._getframe(1)):
                return original(path, flags, *args, **kwargs)
            place = self._view.where(whole)
            if is_writing(flags) and (flags & os.O_CREAT or os.path.exists(place)) and not (flags & os.O_EXCL and os.path.lexists(place)):
                place = self._view.to_write(whole, anew=bool(flags & os.O_TRUNC))
            return _as_of(path, place, lambda: original(path if place == whole else place, flags, *args, **kwargs))

        return opened

    def _saved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def saved(file: Any) -> Any:
            __tracebackhide__ = True
            whole = path_of(file, {})
            is_ours = whole is not None and self._is_ours(whole, sys._getframe(1))
            return original(self._view.to_write(whole, anew=True) if whole is not None and is_ours else file)

        return saved

    def _listed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: Any = ".") -> Any:
            __tracebackhide__ = True
            whole = path_of(path, {})
            names = None if whole is None or not self._is_ours(whole, sys._getframe(1)) else self._view.names(whole)
            return original(path) if names is None else names

        return listed

    def _scanned(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scanned(path: Any = ".") -> Any:
            __tracebackhide__ = True
            whole = path_of(path, {})
            names = None if whole is None or not self._is_ours(whole, sys._getframe(1)) else self._view.names(whole)
            if whole is None or names is None:
                return original(path)
            places = [self._view.where(os.path.join(whole, name), follow=False) for name in names]
            return Folder([Entry(os.fspath(path), name, place) for name, place in zip(names, places, strict=True)])

        return scanned

    def _truncated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def truncated(path: Any, length: int) -> None:
            __tracebackhide__ = True
            whole = path_of(path, {})
            is_ours = whole is not None and self._is_ours(whole, sys._getframe(1)) and os.path.exists(self._view.where(whole))
            original(self._view.to_write(whole) if is_ours and whole is not None else path, length)

        return truncated

    def _marked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stays as the first run has marked it is not marked again."""

        def marked(path: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            whole = path_of(path, kwargs)
            if whole is None or not self._is_ours(whole, sys._getframe(1)):
                return original(path, *args, **kwargs)
            place = self._view.where(whole)
            return original(place, *args, **kwargs) if self._view.is_own(whole) else os.lstat(place) and None

        return marked

    def _changed(self, original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            whole = path_of(path, kwargs)
            if whole is None or not self._is_ours(whole, sys._getframe(1)):
                return original(path, *args, **kwargs)
            return _as_of(path, self._view.where(whole, follow=False), lambda: instead(whole, *args))

        return changed

    def _changed_two(self, original: Callable[..., Any], instead: Callable[[str, str], Any]) -> Callable[..., Any]:
        def changed(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            first, second = path_of(source, kwargs), path_of(target, kwargs)
            if first is None or second is None or not self._is_ours(second, sys._getframe(1)):
                return original(source, target, *args, **kwargs)
            return _as_of(source, self._view.where(first, follow=False), lambda: instead(first, second))

        return changed

    def _copied(self, source: str, target: str) -> None:
        shutil.copy2(self._view.where(source), self._view.to_write(target, anew=True))

    def _linked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def linked(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            whole = path_of(target, kwargs)
            if whole is None or not self._is_ours(whole, sys._getframe(1)):
                return original(source, target, *args, **kwargs)
            if os.path.lexists(self._view.where(whole, follow=False)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)
            return original(source, self._view.to_write(whole, anew=True), *args, **kwargs)

        return linked


def _as_of(path: Any, place: str, call: Callable[[], Any]) -> Any:
    """What is raised speaks of the path as the user knows it."""
    __tracebackhide__ = True
    try:
        return call()
    except OSError as error:
        if error.filename == place:
            error.filename = path
        raise
