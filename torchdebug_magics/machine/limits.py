"""The memory limits that hold for this process: container (cgroup v1, v2 or both), address space, ``MEM_LIMIT``, the whole machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchdebug_magics.machine.cgroups import Group, groups
from torchdebug_magics.machine.files import read
from torchdebug_magics.machine.process import address_space_bytes, rss_bytes

__all__ = ["Limit", "Limits", "binding_limit", "smallest_limit"]

_KIB = 1024
_TOP_BYTES = 256
"""Of ``/proc/meminfo``: its first lines, which are all that is needed."""


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
    try:
        total_bytes, available_bytes = memory["MemTotal:"], memory["MemAvailable:"]
    except KeyError:
        yield from _host_by_psutil()
        return
    yield Limit(total_bytes, total_bytes - available_bytes, None, "the whole machine", _host_kills(root) if counts_kills else None)


def _host_kills(root: Path) -> int | None:
    lines = (read(f"{root}/proc/vmstat") or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _host_by_psutil() -> Iterator[Limit]:
    try:
        import psutil  # noqa: PLC0415 - only where the system has no /proc
    except ImportError:
        return
    memory = psutil.virtual_memory()
    yield Limit(memory.total, memory.total - memory.available, None, "the whole machine")
