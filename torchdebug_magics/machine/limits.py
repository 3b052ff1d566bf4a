"""The memory limits that hold for this process: container (cgroup v1, v2 or both), address space, ``MEM_LIMIT``, the whole machine.

And a guard that interrupts the running cell before the system kills the kernel.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchdebug_magics.errors import TorchDebugError, refuse
from torchdebug_magics.format import byte_size
from torchdebug_magics.machine.guard_interrupt import Interrupt, interrupt_main
from torchdebug_magics.machine.process import address_space_bytes, rss_bytes
from torchdebug_magics.machine.process_state import read
from torchdebug_magics.machine.sampler import Sampler

_KIB = 1024
GUARD_EVERY_S = 0.05
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
        self._levels = tuple(_levels(root))

    def all(self) -> list[Limit]:
        """Every limit that is set, and the machine itself."""
        return [*self._containers(), *_address_space(), *_promised(), *_host(self._root, counts_kills=self._counts_kills)]

    def binding(self) -> Limit | None:
        """The one that is reached first, if this goes on: with the least left. None where nothing is known."""
        return min(self.all(), key=lambda limit: limit.left_bytes, default=None)

    def _containers(self) -> Iterator[Limit]:
        for folder, names in self._levels:
            limit_bytes, used_bytes = (_number(f"{folder}/{name}") for name in (names.limit, names.used))
            if limit_bytes is not None and limit_bytes < _UNLIMITED and used_bytes is not None:
                inactive_bytes = _line(f"{folder}/memory.stat", names.inactive_file)
                working_bytes = None if inactive_bytes is None else max(0, used_bytes - inactive_bytes)
                kills_count = _line(f"{folder}/{names.events}", "oom_kill") if self._counts_kills else None
                yield Limit(limit_bytes, used_bytes, working_bytes, "container limit", kills_count)


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
    kills_count = _line(f"{root}/proc/vmstat", "oom_kill") if counts_kills else None
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


def _levels(root: Path) -> Iterator[tuple[str, _Names]]:
    """The folder and the file names of each level, innermost first. A hybrid system has both versions: one of them counts memory."""
    mounts = list(_mounts(root))
    for line in (read(f"{root}/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        names = _V2 if not controllers else _V1 if "memory" in controllers.split(",") else None
        for mounted_names, mounted_root, mounted_at in mounts:
            if mounted_names is names:
                parts = _inside(path, mounted_root)
                folders = (root.joinpath(mounted_at.lstrip("/"), *parts[:depth]) for depth in range(len(parts), -1, -1))
                yield from ((str(folder), names) for folder in folders if (folder / names.used).exists())


def _mounts(root: Path) -> Iterator[tuple[_Names, str, str]]:
    """(version, which group the mount shows as its top, where)."""
    for line in (read(f"{root}/proc/self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, (system, *_, options) = mount.split(), [*kind.split(), ""][:3]
        if system == "cgroup2" or (system == "cgroup" and "memory" in options.split(",")):
            top, place = (field.replace("\\040", " ") for field in fields[3:5])
            yield _V2 if system == "cgroup2" else _V1, top, place


def _inside(path: str, mounted_root: str) -> list[str]:
    """The names from the top of the mount down to our group; a path that names the host's tree says only that we are at the top."""
    if mounted_root != "/":
        path = path[len(mounted_root) :] if f"{path}/".startswith(f"{mounted_root}/") else ""
    parts = [part for part in path.split("/") if part]
    return [] if ".." in parts else parts


def _number(path: str) -> int | None:
    text = read(path) or ""
    return int(text) if text.isdigit() else None


def _line(path: str, name: str) -> int | None:
    """The number after a name, in a file of such lines; None where it cannot be read."""
    found = (line.partition(" ") for line in (read(path) or "").splitlines())
    return next((int(value) for key, _, value in found if key == name and value.strip().isdigit()), None)


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


class MemoryGuard:
    """Looks at every limit; each crossing interrupts once.

    What was allocated stays, so that usage is still above the guard afterwards: then it is raised to half of what is left, and one
    can clean up in the next cell.
    """

    def __init__(self, ratio: float, limits: Limits) -> None:
        self.ratio = ratio
        self.interrupts: tuple[Interrupt, ...] = ()
        self._limits = limits
        self._raised: dict[str, float] = {}
        self._interrupted_at: tuple[int, int] | None = None

    @property
    def reason(self) -> str:
        """Why it has interrupted last; empty where it has not."""
        return str(self.interrupts[-1]) if self.interrupts else ""

    def refuse_if_passed(self) -> None:
        """A guard that would step in at once is a mistake."""
        for limit in self._passed():
            used = f"{byte_size(_used(limit))} of {byte_size(limit.limit_bytes)} ({limit.whose}) are used already"
            msg = f"the guard is set to {self.ratio:.0%}, but {used}: free memory (see `%memclean`), or raise the guard"
            raise TorchDebugError(msg)

    def watching(self) -> Sampler:
        """A thread that looks, for who has none of their own."""
        return Sampler(self.look, name="guard", every_s=GUARD_EVERY_S)

    def look(self) -> None:
        """Called by a thread, again and again."""
        if self._interrupted_at is not None:
            self._once_more()
        for limit in self._passed():
            if interrupt_main():
                used_bytes = _used(limit)
                self.interrupts += (Interrupt(used_bytes, limit.limit_bytes, limit.whose, self.ratio),)
                self._raised[limit.whose] = (1 + used_bytes / limit.limit_bytes) / 2
                self._interrupted_at = _place()
                return

    def _once_more(self) -> None:
        """A signal that falls just before a sleep begins does not wake it: Python sees it at the sleep's end. A second one does."""
        if self._interrupted_at == _place() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            interrupt_main()
        self._interrupted_at = None

    def _passed(self) -> Iterable[Limit]:
        for limit in self._limits.all():
            used_ratio = _used(limit) / limit.limit_bytes
            if used_ratio < self.ratio:
                self._raised.pop(limit.whose, None)
            elif used_ratio >= self._raised.get(limit.whose, self.ratio):
                yield limit


def guard_ratio(text: str | float) -> float:
    """``"90%"`` or ``0.9``."""
    try:
        ratio = float(text.removesuffix("%")) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except ValueError:
        ratio = 0.0
    refuse(not 0 < ratio < 1, f"--guard takes a share of the memory limit, such as 90%, not {text!r}")
    return ratio


def _used(limit: Limit) -> int:
    return limit.limit_bytes - limit.left_bytes


def _place() -> tuple[int, int] | None:
    """Where the main thread is, as a number: to hold its frame would hold its variables."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented, whatever its name says
    return None if frame is None else (id(frame), frame.f_lasti)
