"""What a session leaves behind: plain, frozen data that pins no memory, pickles, and prints as one sentence."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

__all__ = ["Gauge", "Location", "Mark", "Report", "Sharding", "own_traceback"]


@dataclass(frozen=True, kw_only=True)
class Location:
    """A line of the user's code, numbered as the user sees it."""

    cell: int | None
    """The ``n`` of ``In[n]``, or None outside a notebook cell."""
    file: str
    line: int
    """1-based, in the cell or file as it is shown."""
    function: str
    source: str
    """The text of that line, stripped; empty where it is not at hand."""

    def __str__(self) -> str:
        if self.cell is not None:
            return f"In[{self.cell}] line {self.line}"
        name = self.file.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line}" + (f" in {self.function}" if self.function.isidentifier() else "")


def own_traceback(calls: Iterable[Location], ends_in: str) -> list[str]:
    """Lines that stand for a traceback: the user's own calls, the outermost first, then what came of them."""
    shown = [f"  {call}" + (f": {call.source}" if call.source else "") for call in calls]
    return ["Traceback of your own code (most recent call last):", *shown, ends_in]


@dataclass(frozen=True)
class Sharding:
    """A tensor that several ranks hold together, and the part that one process has."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    local_shape: tuple[int, ...]
    """Of the part in this process."""
    placements: tuple[str, ...]
    """One for each dimension of the device mesh, such as ``"Shard(0)"`` or ``"Replicate()"``."""

    def __str__(self) -> str:
        whole, here = (" x ".join(map(str, sizes)) or "()" for sizes in (self.shape, self.local_shape))
        return f"{whole} as {', '.join(self.placements)}: {here} here"


@dataclass(frozen=True)
class Gauge:
    """How much of one memory is used, such as a GPU's or a container's."""

    label: str
    used_bytes: int
    limit_bytes: int | None
    """None where there is none, or none is known."""
    parts: tuple[tuple[str, int], ...] = ()
    """What `used_bytes` is made of, by name."""
    note: str = ""
    """What the numbers do not say, or why there are none."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The memory at one moment that the user has named. What is of a device is None where none is in use."""

    label: str
    rank: int | None
    """Of this process in a distributed job."""
    rss_bytes: int
    limit: str
    """Whose limit comes nearest, such as ``"container limit"``; empty where none is known."""
    limit_used_bytes: int | None
    """By all that it counts."""
    limit_bytes: int | None
    device: str = ""
    """Torch's current one."""
    allocated_bytes: int | None = None
    max_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    max_reserved_bytes: int | None = None
    max_is_new: bool = False
    """Whether the peak of what was allocated lies between the mark before and this one; else it is older, as counters are not reset."""
    driver_bytes: int | None = None
    """In use on the whole device, as its driver says."""
    unaccounted_bytes: int | None = None
    """Of that, neither torch's nor, where the driver tells, another process's: the context, NCCL, other libraries."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Base of every instrument's report."""

    problems: tuple[str, ...] = ()
    """What the instrument could not do or see, a line each."""

    @property
    def verdict(self) -> str:
        """One sentence that a person can act on."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.verdict

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers, the verdict first; bytes are written as base64."""
        return {"verdict": self.verdict, **_plain(self)}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Strict JSON: non-finite numbers are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, complex ones as text."""
        return json.dumps(_json_safe(self.to_dict()), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
