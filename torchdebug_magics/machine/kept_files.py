"""What stands at a path, copied before it is changed, and put back; the copies of a process that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["absent", "folder", "file", "link", "other"]
_KINDS: Mapping[int, Kind] = {stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
_PARENT = "torchdebug_magics-copies"
_JOURNAL, _RERUNNING = "journal.jsonl", "rerunning"
_ROOM_RATIO = 0.1
"""Of a disk, what copies leave free."""
_MOST_BYTES = 16 << 30
"""Of all copies together."""
_ANCHORED = ".inode"
_BLOCK_BYTES = 1 << 20
_FIRST_DESCRIPTOR = 500
"""Of ours: the user's files get the numbers that they would get without us."""
_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True)
class Stamp:
    """Tells two states of a path apart without reading them."""

    kind: Kind
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
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
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
        self._alive = -1
        """A descriptor of the folder: while its lock is held, the process that uses the copies lives."""
        self._numbers = itertools.count()
        self._cache: dict[str, Version] = {}
        self._anchors: dict[str, str] = {}
        """Where files are that were moved away, by their copies."""
        self._read_bytes = self._copied_bytes = 0
        self.is_kept = False
        """Whether a file could not be put back, so that its copy must stay."""

    @property
    def folder(self) -> str:
        """Where the copies are; made when first asked for."""
        if not self._folder:
            parent = _parent()
            for _ in range(3):  # another process may remove the empty parent meanwhile, or the folder that is not yet locked
                parent.mkdir(mode=0o700, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    folder = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent)
                    number = os.open(folder, os.O_RDONLY)
                    self._alive = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
                    os.close(number)
                    fcntl.flock(self._alive, fcntl.LOCK_EX)
                    if os.path.isdir(folder):
                        self._folder = folder
                        break
                    os.close(self._alive)
            else:
                msg = f"no folder for copies could be made in {parent}"
                raise OSError(msg)
        return self._folder

    def is_own(self, path: str) -> bool:
        """Whether a path is one of a copy."""
        return bool(self._folder) and path.startswith(self._folder)

    def begin_anew(self) -> None:
        """What was noted so far is put back: the journal begins again. Copies of files that did not change are used again."""
        if self._folder:
            Path(self._folder, _JOURNAL).unlink(missing_ok=True)
        self._read_bytes = 0

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
        self._append({"phase": phase, "path": path, **asdict(version)})

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
            for entry in _entries(lines):
                if "act" in entry:
                    yield "act", entry["act"], None
                else:
                    stamp = Stamp(**{**entry["stamp"], "inode": tuple(entry["stamp"]["inode"])})
                    yield entry["phase"], entry["path"], Version(stamp, entry["copy"], entry["target"])

    def anchor(self, path: str, version: Version) -> None:
        """Move the file away without a new inode, so that what has it open still has it."""
        if not version.copy or stamp_of(path).inode != version.stamp.inode:
            return
        beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}{_ANCHORED}-{os.getpid()}")
        for place in (version.copy + _ANCHORED, beside):  # beside it, where the copies are on another file system
            with contextlib.suppress(OSError):
                os.rename(path, place)
                self._anchors[version.copy] = place
                return

    def is_away(self, version: Version) -> bool:
        """Whether the file was moved away by `anchor`."""
        return version.copy in self._anchors

    def rerunning(self, *, is_begun: bool) -> None:
        """Files are about to be other than the user has left them, or are so no more."""
        if is_begun:
            Path(self.folder, _RERUNNING).touch()
        elif self._folder and not self.is_kept:
            Path(self._folder, _RERUNNING).unlink(missing_ok=True)

    def known(self, path: str, stamp: Stamp) -> Version:
        """The version that had this stamp; without a copy if none was made."""
        version = self._cache.get(path)
        return version if version is not None and version.stamp.is_same(stamp) else Version(stamp)

    def put_back(self, versions: Mapping[str, Version]) -> list[str]:
        """Make all paths as they were in `versions`; the paths for which that failed."""
        failed: list[str] = []
        for path in sorted(versions, reverse=True):  # what is in a folder goes before the folder
            if stamp_of(path).kind not in {versions[path].stamp.kind, "absent", "other"}:  # never a socket or a pipe
                try:
                    os.rmdir(path) if stamp_of(path).kind == "folder" else os.remove(path)
                except OSError:
                    failed.append(path)
        linked: dict[tuple[int, int], str] = {}
        for path in sorted(versions):
            try:
                self._put_back(path, versions[path], linked)
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
        self.is_kept = True
        return version.copy

    def close(self) -> None:
        """All is put back: remove the copies."""
        if self._folder and not self.is_kept:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # others have copies there
                _parent().rmdir()
        if self._alive >= 0:
            os.close(self._alive)
        self._folder, self._alive, self.is_kept = "", -1, False
        self._read_bytes = self._copied_bytes = 0
        self._cache.clear()
        self._anchors.clear()

    def _copied(self, path: str) -> str:
        place = os.path.join(self.folder, f"{os.getpid()}-{next(self._numbers)}-{os.path.basename(path)[-100:]}")
        with open(place, "wb") as file:
            for block in _blocks(path):
                # A hole stays a hole.
                file.write(block) if any(block) else file.seek(len(block), os.SEEK_CUR)
                self._copied_bytes += len(block)
            file.truncate()
        return place

    def _has_room(self, size_bytes: int) -> bool:
        if not size_bytes:
            return True
        if self._copied_bytes + size_bytes > _MOST_BYTES:
            return False
        usage = shutil.disk_usage(self.folder)
        return usage.free - size_bytes > min(_ROOM_RATIO * usage.total, 1 << 30)

    def _append(self, entry: dict[str, object]) -> None:
        number = os.open(os.path.join(self.folder, _JOURNAL), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(number, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(number)

    def _put_back(self, path: str, version: Version, linked: dict[tuple[int, int], str]) -> None:
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
            anchor = self._anchors.pop(version.copy, "")
            if anchor:
                os.replace(anchor, path)
            elif now.kind == "absent" and stamp.links_count > 1 and stamp.inode in linked:
                os.link(linked[stamp.inode], path)
            _write(path, version)
            linked.setdefault(stamp.inode, path)


def _write(path: str, version: Version) -> None:
    """In place, if it is the same file: what has it open, or mapped, sees the content. Another file there may have other names."""
    stamp, now = version.stamp, stamp_of(path)
    # Two writes within one tick of the system's clock look alike, and one through mapped memory need not show.
    if now.kind != "file" or not now.is_same_content(stamp) or not _are_equal(path, version.copy):
        if now.kind == "file" and now.inode == stamp.inode:
            _overwrite(path, version)
        else:
            beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}-{os.getpid()}")
            shutil.copyfile(version.copy, beside)
            os.replace(beside, path)
    if stamp_of(path).mode != stamp.mode:
        os.chmod(path, stamp.mode)
    if stamp_of(path).changed_ns != stamp.changed_ns:
        os.utime(path, ns=(os.stat(path).st_atime_ns, stamp.changed_ns))


def _overwrite(path: str, version: Version) -> None:
    own = _own_descriptor(path, for_writing=True)
    if own is None and not os.access(path, os.W_OK):
        os.chmod(path, version.stamp.mode | stat.S_IWUSR)
    number = os.open(path, os.O_RDWR) if own is None else own
    readable = _own_descriptor(path, for_writing=False)
    try:
        place = 0
        with open(version.copy, "rb") as source:
            while block := source.read(_BLOCK_BYTES):
                # What the file has already is not written: holes stay.
                is_there = readable is not None and os.pread(readable, len(block), place) == block
                written = len(block) if is_there else 0
                while written < len(block):
                    written += os.pwrite(number, block[written:], place + written)
                place += len(block)
        os.ftruncate(number, place)
    finally:
        if own is None:
            os.close(number)


def _blocks(path: str) -> Iterator[bytes]:
    """The content of a file, read through a descriptor of this process if there is one.

    To open and close it would drop the locks that the process has on it, as a database does.
    """
    own = _own_descriptor(path, for_writing=False)
    number = os.open(path, os.O_RDONLY) if own is None else own
    try:
        place = 0
        while block := os.pread(number, _BLOCK_BYTES, place):
            yield block
            place += len(block)
    finally:
        if own is None:
            os.close(number)


def _own_descriptor(path: str, *, for_writing: bool) -> int | None:
    inode = stamp_of(path).inode
    wanted = {os.O_RDWR, os.O_WRONLY if for_writing else os.O_RDONLY}
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(int(name))
            flags = fcntl.fcntl(int(name), fcntl.F_GETFL)
            # With O_APPEND, Linux writes at the end wherever it is told to.
            is_fit = flags & os.O_ACCMODE in wanted and not (for_writing and flags & os.O_APPEND)
            if (status.st_dev, status.st_ino) == inode and is_fit:
                return int(name)
    return None


def abandoned_copies() -> dict[str, str]:
    """The files that a killed process has not put back, each with the path of its copy; other copies of dead processes are removed."""
    copies: dict[str, str] = {}
    folders: list[Path] = []
    with contextlib.suppress(OSError):  # there are none, or another kernel has just removed the last
        folders = sorted(_parent().iterdir())
    for folder in folders:
        with _locked(folder) as is_abandoned:
            if folder.is_dir() and is_abandoned:
                lost = _not_put_back(folder) if (folder / _RERUNNING).exists() else {}
                copies |= lost
                if not lost:
                    shutil.rmtree(folder, ignore_errors=True)
    return copies


def _not_put_back(folder: Path) -> dict[str, str]:
    last: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError):
        for entry in _entries((folder / _JOURNAL).read_bytes()):
            if "path" in entry:
                last[str(entry["path"])] = entry  # what stood there at the end comes after what stood there before
    lost: dict[str, str] = {}
    for path, entry in last.items():
        copy = str(entry["copy"])
        copy = copy + _ANCHORED if os.path.exists(copy + _ANCHORED) else copy
        if entry["stamp"]["kind"] == "file" and os.path.exists(copy) and not _are_equal(path, copy):
            lost[path] = copy
    return lost


def _entries(lines: bytes) -> Iterator[dict[str, Any]]:
    """The entries of a journal; the last one may be torn."""
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether no process uses the copies in a folder; none begins to as long as this lasts."""
    number, is_free = -1, False
    with contextlib.suppress(OSError):  # it is gone, or locked
        number = os.open(folder, os.O_RDONLY)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    try:
        yield is_free
    finally:
        if number >= 0:
            os.close(number)


def _are_equal(path: str, copy: str) -> bool:
    try:
        return all(block == other for block, other in zip_longest(_blocks(path), _blocks(copy)))
    except OSError:
        return False


def _parent() -> Path:
    return Path(tempfile.gettempdir(), f"{_PARENT}-{os.getuid()}" if hasattr(os, "getuid") else _PARENT)
