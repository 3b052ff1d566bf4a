"""What stands in for the calls by which Python reaches the disk: in the first run to note, in later ones to lead elsewhere."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from torch import serialization

from torchdebug_magics.probing.where import frames_above, owner

if TYPE_CHECKING:
    from typing import Self

__all__ = ["FILES", "SAVER", "Entry", "Folder", "asker", "held", "is_writing", "path_of"]

SAVER = "_open_zipfile_writer_file"
"""What `torch.save` writes a file with: it opens none in Python."""


FILES = "/proc/self/fd"
"""Where the system tells which file a number stands for."""
_WRITING = frozenset("wax+")


def held(namespace: dict[str, Any], instead: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """Every place at which one of these functions is looked up, with what is to stand there."""
    found: list[tuple[Any, str, Any]] = []
    for name, function in instead.items():
        if name == "open":
            found += [(builtins, "open", function), (io, "open", function)]
            if getattr(namespace.get("open"), "__wrapped__", None) is io.open:  # IPython's own, which has looked up Python's long ago
                found.append((namespace, "open", function))
        elif name == SAVER:
            found.append((serialization, SAVER, function))
        else:
            found.append((os, name.removeprefix("os."), function))
    return found


def is_writing(mode: str | int) -> bool:
    """Whether a file that is opened like that may be changed."""
    if isinstance(mode, int):
        return bool(mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
    return bool(_WRITING & set(mode))


def path_of(path: Any, keywords: dict[str, Any]) -> str | None:
    """The whole path that a call is about; None where it is about something else, such as an open file."""
    if isinstance(path, (int, bytes)) or any(keywords.get(name) is not None for name in ("src_dir_fd", "dst_dir_fd")):
        return None
    try:
        folder = "" if keywords.get("dir_fd") is None else os.readlink(f"{FILES}/{keywords['dir_fd']}")
        return str(os.path.abspath(os.path.join(folder, path)))
    except (TypeError, OSError):
        return None


def asker(frame: FrameType | None) -> str:
    """Whose code asks, be it through Python's library: ``"user"``; ``"library"`` if it is called by the user's, ``"thread"`` if not."""
    for one in frames_above(frame):
        name = one.f_code.co_filename
        whose = owner(name)
        if whose == "user" or name == serialization.__file__:
            return "user"
        if whose == "library":
            return "library" if any(owner(above.f_code.co_filename) == "user" for above in frames_above(one)) else "thread"
        if whose != "python":
            return whose
    return "python"


class Entry:
    """One name in a folder, as `os.scandir` tells of it."""

    def __init__(self, folder: str, name: str, place: str) -> None:
        self.name = name
        self.path = os.path.join(folder, name)
        self._place = place

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As `os.DirEntry`."""
        return os.path.isdir(self._place) and (follow_symlinks or not os.path.islink(self._place))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As `os.DirEntry`."""
        return os.path.isfile(self._place) and (follow_symlinks or not os.path.islink(self._place))

    def is_symlink(self) -> bool:
        """As `os.DirEntry`."""
        return os.path.islink(self._place)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As `os.DirEntry`."""
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """As `os.DirEntry`."""
        return os.lstat(self._place).st_ino


class Folder:
    """What `os.scandir` gives."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def close(self) -> None:
        """As `os.scandir`'s: nothing is open."""
