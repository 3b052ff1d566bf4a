"""The memory limits that hold for this process: container (cgroup v1, v2 or both), address space, ``MEM_LIMIT``, the whole machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchdebug_magics.machine.process import address_space_bytes, rss_bytes
from torchdebug_magics.machine.process_state import read

_KIB = 1024
_TOP_BYTES = 256
"""Of ``/proc/meminfo``: its first lines, which are all that is needed."""
_UNLIMITED = 1 << 60
"""Version 1 writes about 2^63 where there is no limit."""


@dataclass(frozen=True)
class Limit:
    """A limit, and how much of it is used by all that it counts, which may be more than this process."""

    limit_bytes: int
    used_bytes: int
    working_set_bytes: int | None
    """What is used without the file cache that the system would drop first; None where it is not told."""
    whose: str
    """Such as ``"container limit"``."""
    oom_kills_count: int | None = None
    """How many processes the system has killed for this limit so far."""

    @property
    def left_bytes(self) -> int:
        """What can still be allocated: file cache is given back before anything is killed."""
        used_bytes = self.used_bytes if self.working_set_bytes is None else self.working_set_bytes
        return self.limit_bytes - used_bytes


class Limits:
    """Finds out once where the limits stand; each reading is then a few small files."""

    def __init__(self, root: Path = Path("/"), *, counts_kills: bool = True) -> None:
        self._root = root
        self._counts_kills = counts_kills
        """Half of what a reading costs: not for who looks all the time."""
        self._groups: tuple[Group, ...] = tuple(groups(root))

    def all(self) -> list[Limit]:
        """Every limit that is set, and the machine itself."""
        return [*self._containers(), *_address_space(), *_promised(), *_host(self._root, counts_kills=self._counts_kills)]

    def binding(self) -> Limit | None:
        """The one that is reached first, if this goes on: with the least left. None where nothing is known."""
        return min(self.all(), key=lambda limit: limit.left_bytes, default=None)

    def _containers(self) -> Iterator[Limit]:
        for group in self._groups:
            limit_bytes = group.limit_bytes()
            used_bytes = None if limit_bytes is None else group.used_bytes()
            if limit_bytes is not None and used_bytes is not None:
                kills_count = group.oom_kills_count() if self._counts_kills else None
                yield Limit(limit_bytes, used_bytes, group.working_set_bytes(used_bytes), "container limit", kills_count)


def binding_limit(root: Path = Path("/")) -> Limit | None:
    """The limit that will end this process first, with the usage of that level."""
    return Limits(root).binding()


def smallest_limit(root: Path = Path("/")) -> Limit | None:
    """The limit that says how large this machine is for us, however much of it is used now."""
    return min(Limits(root).all(), key=lambda limit: limit.limit_bytes, default=None)


def _address_space() -> Iterator[Limit]:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft not in {resource.RLIM_INFINITY, -1}:
        yield Limit(soft, address_space_bytes(), None, "address space limit of this process")


def _promised() -> Iterator[Limit]:
    """What JupyterHub tells its servers; not always enforced, but where it is, by means that we cannot read."""
    text = os.environ.get("MEM_LIMIT", "")
    if text.isdigit() and int(text):
        yield Limit(int(text), rss_bytes(), None, "MEM_LIMIT of this server")


def _host(root: Path, *, counts_kills: bool = True) -> Iterator[Limit]:
    lines = (read(f"{root}/proc/meminfo", _TOP_BYTES) or "").splitlines()
    memory = {line.split()[0]: int(line.split()[1]) * _KIB for line in lines if line.startswith(("MemTotal:", "MemAvailable:"))}
    if len(memory) < 2:  # noqa: PLR2004 - both
        import psutil  # noqa: PLC0415 - only where the system has no /proc

        machine = psutil.virtual_memory()
        memory = {"MemTotal:": machine.total, "MemAvailable:": machine.available}
    total_bytes, available_bytes = memory["MemTotal:"], memory["MemAvailable:"]
    events = (read(f"{root}/proc/vmstat") or "").splitlines() if counts_kills else ()
    kills_count = next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), None)
    yield Limit(total_bytes, total_bytes - available_bytes, None, "the whole machine", kills_count)


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


@dataclass(frozen=True)
class MemoryPressure:
    """One look."""

    stalled_ratio: float
    """Of the last ten seconds, in which some process waited for memory; 0 where the system does not tell."""
    swapped_bytes: int
    """Of this process."""
    used_ratio: float
    """Of the limit that comes first."""
    whose: str


def memory_pressure() -> MemoryPressure:
    """From the system's pressure stall information, where it has any."""
    stalled = 0.0
    for file in ("/sys/fs/cgroup/memory.pressure", "/proc/pressure/memory"):
        text = read(file) or ""
        if text.startswith("some"):
            stalled = max(stalled, float(text.partition("avg10=")[2].split()[0]) / 100)
    status = (read("/proc/self/status") or "").splitlines()
    swapped = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmSwap:")), 0)
    limit = binding_limit()
    used = 0.0 if limit is None else 1 - limit.left_bytes / max(limit.limit_bytes, 1)
    return MemoryPressure(stalled, swapped, used, "" if limit is None else limit.whose)
