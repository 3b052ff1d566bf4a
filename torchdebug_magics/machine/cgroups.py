"""The control groups (cgroups) that count this process's memory, from its own up to the outermost that can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchdebug_magics.machine.files import read

__all__ = ["Group", "groups"]

_UNLIMITED = 1 << 60
"""Version 1 writes about 2^63 where there is no limit."""


@dataclass(frozen=True)
class _Names:
    """What the files of one version are called."""

    limit: str
    used: str
    events: str
    inactive_file: str
    """A line of ``memory.stat`` that counts this group and all below it."""


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "memory.events", "inactive_file")


@dataclass(frozen=True)
class Group:
    """One level; each number is None where it cannot be read."""

    folder: str
    names: _Names

    def limit_bytes(self) -> int | None:
        """The limit set on this very level."""
        number = _number(f"{self.folder}/{self.names.limit}")
        return None if number is None or number >= _UNLIMITED else number

    def used_bytes(self) -> int | None:
        """What all processes of this level and below use, with the file cache that they filled."""
        return _number(f"{self.folder}/{self.names.used}")

    def working_set_bytes(self, used_bytes: int) -> int | None:
        """What stays when the system drops the file cache that nobody uses."""
        inactive_bytes = self._line("memory.stat", self.names.inactive_file)
        return None if inactive_bytes is None else max(0, used_bytes - inactive_bytes)

    def oom_kills_count(self) -> int | None:
        """How many processes were killed for want of memory here."""
        return self._line(self.names.events, "oom_kill")

    def _line(self, file: str, name: str) -> int | None:
        for line in (read(f"{self.folder}/{file}") or "").splitlines():
            key, _, value = line.partition(" ")
            if key == name and value.strip().isdigit():
                return int(value)
        return None


def groups(root: Path) -> Iterator[Group]:
    """Innermost first. A hybrid system has both versions, and memory is counted by the one that has the files."""
    mounts = list(_mounts(root))
    for line in (read(f"{root}/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        names = _V2 if not controllers else _V1 if "memory" in controllers.split(",") else None
        for found, mounted_root, mounted_at in mounts:
            if found is names:
                yield from _walk(root / mounted_at.lstrip("/"), _inside(path, mounted_root), names)


def _mounts(root: Path) -> Iterator[tuple[_Names, str, str]]:
    """(version, which group the mount shows as its top, where)."""
    for line in (read(f"{root}/proc/self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, (system, *_, options) = mount.split(), [*kind.split(), ""][:3]
        if system == "cgroup2":
            yield _V2, _unescaped(fields[3]), _unescaped(fields[4])
        elif system == "cgroup" and "memory" in options.split(","):
            yield _V1, _unescaped(fields[3]), _unescaped(fields[4])


def _inside(path: str, mounted_root: str) -> list[str]:
    """The names from the top of the mount down to our group; a path that names the host's tree says only that we are at the top."""
    if mounted_root != "/":
        path = path[len(mounted_root) :] if f"{path}/".startswith(f"{mounted_root}/") else ""
    parts = [part for part in path.split("/") if part]
    return [] if ".." in parts else parts


def _walk(top: Path, parts: list[str], names: _Names) -> Iterator[Group]:
    for depth in range(len(parts), -1, -1):
        folder = top.joinpath(*parts[:depth])
        if (folder / names.used).exists():
            yield Group(str(folder), names)


def _unescaped(path: str) -> str:
    return path.replace("\\040", " ")


def _number(path: str) -> int | None:
    text = read(path) or ""
    return int(text) if text.isdigit() else None
