"""What a process wrote down of itself, a moment before it was killed.

The file is mapped into memory: the system keeps its last state whatever happens to the process, and a write costs no call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from torchdebug_magics.format import byte_size
from torchdebug_magics.machine.limits import Limits

_SIZE = 4096
_NEARLY_FULL = 0.9


@dataclass(frozen=True)
class Entry:
    """The latest state."""

    place: str
    """Such as ``"In[7] line 12"``; empty where no cell ran."""
    rss_bytes: int
    used_bytes: int
    """Of the limit, by all that it counts."""
    limit_bytes: int
    whose: str
    growth_bytes_per_s: int
    oom_kills_count: int | None
    standing: str = ""
    """Why the cell did not go on; empty where it did."""

    @property
    def was_nearly_full(self) -> bool:
        """Whether little of the limit was left."""
        return self.used_bytes >= _NEARLY_FULL * self.limit_bytes

    def was_killed_for_memory(self, kills_count: int | None) -> bool:
        """Whether the system has killed somebody for this limit since."""
        return kills_count is not None and self.oom_kills_count is not None and kills_count > self.oom_kills_count


class BlackBox:
    """Open while something is worth to be written down; a clean end removes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = os.getpid()
        self._map: mmap.mmap | None = None

    def __enter__(self) -> Self:
        with self._path.open("wb+") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._path.chmod(0o600)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._map is not None and os.getpid() == self._owner:  # a forked worker has the same map, and another life
            self._map.close()
            self._map = None
            self._path.unlink(missing_ok=True)

    def write(self, entry: Entry) -> None:
        """Instead of what was written before."""
        text = json.dumps(dataclasses.asdict(entry)).encode()[: _SIZE - 1]
        if self._map is not None:
            self._map[: len(text) + 1] = text + b"\0"


def last_words(path: Path, root: Path = Path("/")) -> str:
    """One sentence on how the process that left this file ended; empty where there is nothing to tell. The file is removed.

    To be asked by who has taken that process's place: it is not checked whether it still runs.
    """
    entry = _left_at(path)
    if entry is None:
        return ""
    kills = [limit.oom_kills_count for limit in Limits(root).all() if limit.whose == entry.whose]
    for_memory = any(map(entry.was_killed_for_memory, kills))
    if not (entry.place or entry.standing or for_memory or entry.was_nearly_full):
        return ""  # stopped while it was idle
    if entry.standing and not for_memory:
        return f"The kernel before this one was ended while it hung{f' in {entry.place}' if entry.place else ''}. {entry.standing}"
    used = f"{byte_size(entry.used_bytes)} of {byte_size(entry.limit_bytes)} ({entry.whose})"
    where = f" in {entry.place}" if entry.place else ""
    if not (for_memory or entry.was_nearly_full):
        return f"The kernel before this one ended{where} without a word, with {used}: memory was hardly the reason."
    how = "was killed by the system for want of memory" if for_memory else "died"
    growing = f", growing {byte_size(entry.growth_bytes_per_s)} a second" if entry.growth_bytes_per_s > 0 else ""
    return f"The kernel before this one {how}{where} with {used}{growing}."


def _left_at(path: Path) -> Entry | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        entry = Entry(**json.loads(data.partition(b"\0")[0]))
    except (ValueError, TypeError):  # nothing was written yet, or half of it
        entry = None
    with contextlib.suppress(OSError):
        path.unlink()
    return entry
