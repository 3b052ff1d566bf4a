"""The disk as a later run finds it: as at the start, with that run's own changes, which reach no file that is there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.disk.before import Before

__all__ = ["View"]

_MOST_LINKS = 8


class View:
    """Of one run. What has a history is kept in `folder` in its place; what is new is made where it belongs, and gone at the end."""

    def __init__(self, before: Before, folder: str) -> None:
        self._before = before
        self._folder = folder
        self._aside: set[str] = set()
        """Paths whose file or folder stands in `folder`."""
        self._gone: set[str] = {path for path in before if _was(before, path) == "absent"}
        """Paths at which nothing of the real disk is seen, nor below them."""
        self._new: dict[str, None] = {}
        """Made by this run where nothing was."""

    def finish(self) -> None:
        """Remove what this run has made."""
        for path in reversed(self._new):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        self._new.clear()

    # --- where things are ----------------------------------------------------------------------------------------------------------

    def where(self, path: str, *, follow: bool = True) -> str:
        """Where the run finds what it calls `path`, be it there or not."""
        return self._place(self._followed(path) if follow else path)

    def is_known(self, path: str) -> bool:
        """Whether it, or the folder that it is in, has a history in any of the runs."""
        return any(one in self._before or one in self._new or one in self._aside or one in self._gone for one in _upwards(path))

    def is_own(self, path: str) -> bool:
        """Whether it stands aside, or was made by this run."""
        path = self._followed(path)
        return self._place(path) != path or self._is_new(path)

    def to_write(self, path: str, *, anew: bool = False) -> str:
        """Where to write to it; of a file that is there, to a copy. If `anew`, what was in it does not matter."""
        path = self._followed(path)
        place = self._place(path)
        if place != path:
            return self._settle(path)
        if self._is_new(path):
            return path
        if not os.path.lexists(path):
            self._new[path] = None
            return path
        if not os.path.isfile(path):  # a device, a pipe
            return path
        aside = self._settle(path)
        if not anew:
            shutil.copy2(path, aside)
        return aside

    def names(self, path: str) -> list[str] | None:
        """What is in a folder; None where that is what the disk says."""
        path = self._followed(path)
        near = [one for one in (*self._before, *self._aside, *self._gone) if os.path.dirname(one) == path]
        place = self._place(path)
        if not near and place == path:
            return None
        found = dict.fromkeys(os.listdir(path)) if self._is_seen(path) and os.path.isdir(path) else {}
        if place != path or not os.path.isdir(path):
            found |= dict.fromkeys(os.listdir(place))  # which raises what it would raise
        found |= dict.fromkeys(os.path.basename(one) for one in near)
        known = {name: number for number, name in enumerate(self._before.listed.get(path, ()))}
        present = [name for name in found if os.path.lexists(self.where(os.path.join(path, name), follow=False))]
        return sorted(present, key=lambda name: known.get(name, len(known)))

    # --- changes -------------------------------------------------------------------------------------------------------------------

    def make_folder(self, path: str, mode: int) -> None:
        """As `os.mkdir`."""
        place = self.where(path, follow=False)
        if place != path:
            os.mkdir(self._settle(path), mode)
            return
        os.mkdir(path, mode)
        if not self._is_new(path):
            self._new[path] = None

    def remove(self, path: str, *, is_folder: bool) -> None:
        """As `os.remove` and `os.rmdir`."""
        place = self.where(path, follow=False)
        if is_folder and self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if place != path or self._is_new(path):
            os.rmdir(place) if is_folder else os.remove(place)
        else:
            os.lstat(path)  # which raises what it would raise
        self._forget(path)

    def move(self, path: str, target: str) -> None:
        """As `os.replace`, of a file or of a folder that this run has made."""
        place = self.where(path, follow=False)
        is_copied = place == path and not self._is_new(path)
        if is_copied and os.path.isdir(place):
            raise OSError(errno.EXDEV, "a directory from before the run cannot be moved in a rerun", path)
        goal = self.to_write(target, anew=True)
        shutil.copy2(place, goal) if is_copied else shutil.move(place, goal)
        for held in (self._aside, self._gone):
            below = [one for one in held if one.startswith(path + os.sep)]
            held.difference_update(below)
            held.update(target + one.removeprefix(path) for one in below)
        self._forget(path)

    # --- inside --------------------------------------------------------------------------------------------------------------------

    def _followed(self, path: str) -> str:
        """What a link leads to, as the run sees it."""
        for _ in range(_MOST_LINKS):
            place = self._place(path)
            if place == path or not os.path.islink(place):
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(place)))
        return path

    def _forget(self, path: str) -> None:
        is_new = self._is_new(path)
        self._aside.discard(path)
        self._new.pop(path, None)
        if not is_new:
            self._gone.add(path)

    def _place(self, path: str) -> str:
        if path in self._aside:
            return self._path_aside(path)
        was = self._before.of(path)
        if was is not None and was.kind not in {"absent", "lost"} and path not in self._gone:
            return self._as_it_was(path)
        return path if self._is_seen(path) else self._path_aside(path)

    def _is_seen(self, path: str) -> bool:
        """Whether the real disk shows through."""
        return next((one in self._new for one in _upwards(path) if one in self._new or one in self._gone), True)

    def _is_new(self, path: str) -> bool:
        return next((one in self._new for one in _upwards(path) if one in self._new or one in self._gone), False)

    def _as_it_was(self, path: str) -> str:
        was = self._before.of(path)
        assert was is not None
        if was.kind == "beginning" and not os.path.isfile(path):
            return path
        aside = self._settle(path)
        if was.kind == "folder":
            os.makedirs(aside, exist_ok=True)
            return aside
        with open(aside, "wb") as file:
            file.write(was.content if was.kind == "file" else _beginning(path, was.size_bytes))
        os.utime(aside, ns=(was.changed_ns, was.changed_ns))
        return aside

    def _settle(self, path: str) -> str:
        """It stands aside from now on, in a folder that is there if its own is."""
        aside, holder = self._path_aside(path), os.path.dirname(path)
        if os.path.isdir(self.where(holder)):
            os.makedirs(os.path.dirname(aside), exist_ok=True)
        self._aside.add(path)
        return aside

    def _path_aside(self, path: str) -> str:
        return self._folder + os.sep + path.replace(":", "").lstrip(os.sep)


def _upwards(path: str) -> Iterator[str]:
    """It, and the folders around it."""
    while True:
        yield path
        above = os.path.dirname(path)
        if above == path:
            return
        path = above


def _was(before: Before, path: str) -> str:
    was = before.of(path)
    return "" if was is None else was.kind


def _beginning(path: str, size_bytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size_bytes)
