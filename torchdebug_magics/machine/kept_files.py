"""What stands at a path, copied before it is changed, and put back; the copies of a process that was killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["FileStore", "Stamp", "Version", "abandoned_copies", "stamp_of"]

_PARENT = "torchdebug_magics-copies"
_JOURNAL, _RERUNNING = "journal.jsonl", "rerunning"
_ROOM_RATIO = 0.1
"""Of a disk, what copies leave free."""
_ANCHORED = ".inode"


@dataclass(frozen=True)
class Stamp:
    """Tells two states of a path apart without reading them."""

    kind: Literal["absent", "folder", "file", "link", "other"]
    mode: int = 0
    size_bytes: int = 0
    changed_ns: int = 0
    inode: tuple[int, int] = (0, 0)
    links_count: int = 1
    made_ns: int = 0
    """When the inode was made, or last changed in any way: after a file that is new was first seen."""

    def is_same(self, other: Stamp) -> bool:
        """Whether nothing has changed; the inode may be another one."""
        return self.is_same_content(other) and self.mode == other.mode

    def is_same_content(self, other: Stamp) -> bool:
        """Whether nothing has written to the path."""
        return (self.kind, self.size_bytes, self.changed_ns) == (other.kind, other.size_bytes, other.changed_ns)


@dataclass(frozen=True)
class Version:
    """What stood at a path."""

    stamp: Stamp
    copy: str = ""
    """Where the content of a file is; empty if it could not be copied."""
    target: str = ""
    """Of a symbolic link."""

    @property
    def is_whole(self) -> bool:
        """Whether it can be put back."""
        return self.stamp.kind in {"absent", "folder", "link"} or (self.stamp.kind == "file" and bool(self.copy))


def stamp_of(path: str) -> Stamp:
    """The state of a path now; a symbolic link is not followed."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return Stamp("absent")
    kind: Literal["folder", "file", "link", "other"] = "other"
    if stat.S_ISDIR(status.st_mode):
        kind = "folder"
    elif stat.S_ISREG(status.st_mode):
        kind = "file"
    elif stat.S_ISLNK(status.st_mode):
        kind = "link"
    is_file = kind == "file"
    return Stamp(
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_size if is_file else 0,
        status.st_mtime_ns if is_file else 0,
        (status.st_dev, status.st_ino),
        status.st_nlink if is_file else 1,
        status.st_ctime_ns,
    )


class FileStore:
    """Copies of files in a folder of their own, until `close`.

    The folder is named for this process. If the process is killed while a rerun has changed files, `abandoned_copies` of a later process
    finds them. Forked children copy into the same folder, and tell this process by a journal.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._numbers = itertools.count()
        self._cache: dict[str, Version] = {}
        self._read_bytes = 0
        self._is_kept = False

    @property
    def folder(self) -> str:
        """Where the copies are; made when first asked for."""
        if not self._folder:
            parent, name = _parent(), f"{os.getpid()}-{_started(os.getpid())}-"
            for _ in range(3):  # another process may remove the empty parent meanwhile
                parent.mkdir(mode=0o700, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    self._folder = tempfile.mkdtemp(prefix=name, dir=parent)
                    break
        return self._folder

    def version(self, path: str, *, is_changed: bool = False) -> Version:
        """What stands at `path` now, a file with a copy, unless there is no room for it. One that `is_changed` is copied again."""
        stamp = stamp_of(path)
        known = self._cache.get(path)
        if known is not None and known.stamp == stamp and known.is_whole and not is_changed:
            return known
        version = Version(stamp)
        if stamp.kind == "link":
            version = Version(stamp, target=os.readlink(path))
        elif stamp.kind == "file" and self._has_room(stamp.size_bytes):
            with contextlib.suppress(OSError):  # one that cannot be read has no copy
                version = Version(stamp, self._copied(path))
        self._cache[path] = version
        return version

    def note(self, phase: str, path: str, version: Version) -> None:
        """Write it down for a later process, and for the one that has forked this one."""
        entry = {"phase": phase, "path": path, "copy": version.copy, "target": version.target, **asdict(version.stamp)}
        self._append(entry)

    def note_act(self, act: str) -> None:
        """The same for an act that cannot be put back."""
        self._append({"act": act})

    def news(self) -> Iterator[tuple[str, str, Version | None]]:
        """What the journal has got since the last time: (phase, path, version), or ("act", what, None)."""
        if not self._folder:
            return
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self._folder, _JOURNAL), "rb") as file:
            file.seek(self._read_bytes)
            lines = file.read()
            self._read_bytes += len(lines)
            for line in lines.splitlines():
                entry = json.loads(line)
                if "act" in entry:
                    yield "act", entry["act"], None
                else:
                    phase, path = entry.pop("phase"), entry.pop("path")
                    copy, target = entry.pop("copy"), entry.pop("target")
                    yield phase, path, Version(Stamp(**{**entry, "inode": tuple(entry["inode"])}), copy, target)

    def anchor(self, path: str, version: Version) -> bool:
        """Move the file away without a new inode, so that what has it open still has it; whether that could be done."""
        if not version.copy or stamp_of(path).inode != version.stamp.inode:
            return False
        try:
            os.rename(path, version.copy + _ANCHORED)
        except OSError:  # another file system
            return False
        return True

    def rerunning(self, *, is_begun: bool) -> None:
        """Files are about to be other than the user has left them, or are so no more."""
        marker = Path(self.folder, _RERUNNING)
        marker.touch() if is_begun else marker.unlink(missing_ok=True)

    def known(self, path: str, stamp: Stamp) -> Version:
        """The version that had this stamp; without a copy if none was made."""
        version = self._cache.get(path)
        return version if version is not None and version.stamp.is_same(stamp) else Version(stamp)

    def put_back(self, versions: Mapping[str, Version]) -> list[str]:
        """Make all paths as they were in `versions`; the paths for which that failed."""
        failed: list[str] = []
        for path in sorted(versions, reverse=True):  # what is in a folder goes before the folder
            if stamp_of(path).kind not in {versions[path].stamp.kind, "absent"}:
                try:
                    os.rmdir(path) if stamp_of(path).kind == "folder" else os.remove(path)
                except OSError:
                    failed.append(path)
        linked: dict[tuple[int, int], str] = {}
        for path in sorted(versions):
            try:
                _put_back(path, versions[path], linked)
            except OSError:
                failed.append(path)
        return failed

    def set_aside(self, path: str) -> str:
        """Copy what stands at `path` and keep it after `close`; where it is."""
        kept = os.path.join(_parent(), f"{os.path.basename(self.folder)}-{os.path.basename(path)}")
        shutil.copy2(path, kept)
        return kept

    def keep(self, version: Version) -> str:
        """The copy of a version that could not be put back: it stays after `close`."""
        self._is_kept = True
        return version.copy

    def close(self) -> None:
        """All is put back: remove the copies."""
        if self._folder and not self._is_kept:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # others have copies there
                _parent().rmdir()
        self._folder, self._read_bytes, self._is_kept = "", 0, False
        self._cache.clear()

    def _copied(self, path: str) -> str:
        place = os.path.join(self.folder, f"{os.getpid()}-{next(self._numbers)}-{os.path.basename(path)[-100:]}")
        shutil.copyfile(path, place)
        return place

    def _has_room(self, size_bytes: int) -> bool:
        if not size_bytes:
            return True
        usage = shutil.disk_usage(self.folder)
        return usage.free - size_bytes > min(_ROOM_RATIO * usage.total, 1 << 30)

    def _append(self, entry: dict[str, object]) -> None:
        number = os.open(os.path.join(self.folder, _JOURNAL), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(number, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(number)


def _put_back(path: str, version: Version, linked: dict[tuple[int, int], str]) -> None:
    stamp, now = version.stamp, stamp_of(path)
    if stamp.kind == "folder":
        if now.kind == "absent":
            os.mkdir(path)
        if stamp.mode != stamp_of(path).mode:
            os.chmod(path, stamp.mode)
    elif stamp.kind == "link":
        if now.kind == "link" and os.readlink(path) != version.target:
            os.remove(path)
        if not os.path.lexists(path):
            os.symlink(version.target, path)
    elif stamp.kind == "file" and version.copy:
        anchor = version.copy + _ANCHORED
        if os.path.lexists(anchor):
            os.replace(anchor, path)
        elif now.kind == "absent" and stamp.links_count > 1 and stamp.inode in linked:
            os.link(linked[stamp.inode], path)
        _write(path, version)
        linked.setdefault(stamp.inode, path)


def _write(path: str, version: Version) -> None:
    """In place: what has the file open, or mapped, sees the content."""
    stamp, now = version.stamp, stamp_of(path)
    # Two writes within one tick of the system's clock look alike, and one through mapped memory need not show.
    if not now.is_same_content(stamp) or not _are_equal(path, version.copy):
        if now.kind == "file" and not os.access(path, os.W_OK):
            os.chmod(path, stamp.mode | stat.S_IWUSR)
        with open(version.copy, "rb") as source, open(path, "r+b" if now.kind == "file" else "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.truncate()
    if stamp_of(path).mode != stamp.mode:
        os.chmod(path, stamp.mode)
    if stamp_of(path).changed_ns != stamp.changed_ns:
        os.utime(path, ns=(os.stat(path).st_atime_ns, stamp.changed_ns))


def abandoned_copies() -> dict[str, str]:
    """The files that a killed process has not put back, each with the path of its copy; other copies of dead processes are removed."""
    copies: dict[str, str] = {}
    parent = _parent()
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        pid, _, rest = folder.name.partition("-")
        started = rest.partition("-")[0]
        if not folder.is_dir() or not pid.isdigit() or _started(int(pid)) == started:
            continue
        lost = _not_put_back(folder) if (folder / _RERUNNING).exists() else {}
        copies |= lost
        if not lost:
            shutil.rmtree(folder, ignore_errors=True)
    return copies


def _not_put_back(folder: Path) -> dict[str, str]:
    last: dict[str, dict[str, object]] = {}
    with contextlib.suppress(OSError):
        for line in (folder / _JOURNAL).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "path" in entry:
                last[str(entry["path"])] = entry  # what stood there at the end comes after what stood there before
    lost: dict[str, str] = {}
    for path, entry in last.items():
        copy = str(entry["copy"])
        copy = copy + _ANCHORED if os.path.exists(copy + _ANCHORED) else copy
        if entry["kind"] == "file" and os.path.exists(copy) and not _are_equal(path, copy):
            lost[path] = copy
    return lost


def _are_equal(path: str, copy: str) -> bool:
    try:
        with open(path, "rb") as first, open(copy, "rb") as second:
            while True:
                block, other = first.read(1 << 20), second.read(1 << 20)
                if block != other:
                    return False
                if not block:
                    return True
    except OSError:
        return False


def _parent() -> Path:
    return Path(tempfile.gettempdir(), f"{_PARENT}-{os.getuid()}" if hasattr(os, "getuid") else _PARENT)


def _started(pid: int) -> str:
    """When a process began; empty if there is none."""
    import psutil  # noqa: PLC0415 - only where there are copies: loading the extension stays cheap

    try:
        return str(int(psutil.Process(pid).create_time()))
    except psutil.Error:
        return ""
