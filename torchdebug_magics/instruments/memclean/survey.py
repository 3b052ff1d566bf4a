"""What an old error, the outputs and the debugger hold, and what freeing each of them would release."""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torchdebug_magics.instruments.memclean.census import size_of
from torchdebug_magics.instruments.memclean.report import Holding
from torchdebug_magics.probing.holders.found import roots_of
from torchdebug_magics.probing.holders.roots import Rank, Root, roots
from torchdebug_magics.probing.holders.tensor_holders import storages_of
from torchdebug_magics.probing.holders.walk import Walk, undisturbed
from torchdebug_magics.probing.where import is_user_code, location

__all__ = ["Survey", "survey"]

_MOST_VISITS = 1_000_000
_MOST_OTHERS = 5
_NUMBERED = re.compile(r"(?:Out\[|_|user_ns_hidden\['_)(\d+)")
_PARTS = {Rank.ERROR: "exception", Rank.DEBUGGER: "debugger", Rank.OUTPUT: "out", Rank.SESSION: "session"}
_WHATS = {"debugger": "the closed debugger", "session": "the last torchdebug_magics session"}
_COSTS = {
    "exception": "`%debug` will no longer work on that error",
    "debugger": "the debugger will be discarded",
    "session": "`torchdebug_magics.last_session()` will be None",
}


@dataclass
class Survey:
    """What was found; of the tensors, only weak references."""

    holdings: tuple[Holding, ...] = ()
    together_bytes: int = 0
    by_part: dict[str, int] = field(default_factory=dict)
    is_whole: bool = True
    storages: list[weakref.ref[Any]] = field(default_factory=list)
    """All that have a name, to be looked at again."""


def survey() -> Survey:
    """Look; nothing is changed."""
    with undisturbed(), closing(Walk(roots(), None, _MOST_VISITS)) as walk:
        held_at, is_whole = roots_of(walk)
        names = _output_names(walk)
        found = Survey(is_whole=is_whole)
        tally = _Tally()
        for address, numbers in walk.holders.items():
            storage = next(one for one in storages_of(walk.objects[numbers[0]]) if one._cdata == address)
            found.storages.append(weakref.ref(storage))
            tally.add(held_at[address], names, size_of(storage), str(storage.device))
    found.together_bytes, found.by_part = tally.together_bytes, dict(tally.by_part)
    ordered = sorted(tally.held, key=lambda name: (-tally.alone[name], -tally.held[name], name))
    found.holdings = tuple(_holding(name, tally) for name in ordered)
    return found


class _Tally:
    """Bytes by holder."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.alone: Counter[str] = Counter()
        self.by_part: Counter[str] = Counter()
        self.together_bytes = 0
        self.devices: dict[str, set[str]] = {}
        self.others: dict[str, dict[str, None]] = {}

    def add(self, held_at: Iterable[Root], names: dict[str, str], size: int, device: str) -> None:
        """One storage, and the roots that hold it."""
        others = [root.label for root in held_at if root.rank not in _PARTS]
        holders = {names.get(root.label, _PARTS[root.rank]) for root in held_at if root.rank in _PARTS}
        parts = {_part(name) for name in holders}
        for name in holders:
            self.held[name] += size
            self.alone[name] += size if len(holders) == 1 and not others else 0
            self.devices.setdefault(name, set()).add(device)
            self.others.setdefault(name, {}).update(dict.fromkeys(others))
        if parts and not others:
            self.together_bytes += size
            if len(parts) == 1:
                self.by_part[parts.pop()] += size


def _part(name: str) -> str:
    return name if name in _PARTS.values() else "out"


def _output_names(walk: Walk) -> dict[str, str]:
    """``_3``, ``_`` and their like are names of the same output: ``Out[3]``."""
    names: dict[str, str] = {}
    for found in walk.roots.values():
        outputs = [root.label for root in found if root.rank is Rank.OUTPUT]
        numbers = [match[1] for match in map(_NUMBERED.match, outputs) if match]
        names.update(dict.fromkeys(outputs, f"Out[{numbers[0]}]" if numbers else "_"))
    return names


def _holding(name: str, tally: _Tally) -> Holding:
    part = _part(name)
    what = _error() if part == "exception" else _WHATS.get(part, f"`{name}`")
    cost = _COSTS.get(part, f"`{name}` will be gone")
    return Holding(
        name=name,
        part=part,
        what=what,
        held_bytes=tally.held[name],
        alone_bytes=tally.alone[name],
        devices=tuple(sorted(tally.devices[name])),
        cost=cost,
        others=tuple(tally.others[name])[:_MOST_OTHERS],
    )


def _error() -> str:
    """The last error, by the cell or the line of the user's in which it began."""
    trace = getattr(sys, "last_traceback", None)
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_code(code):
            where = location(code.co_filename, trace.tb_lineno, code.co_name)
            return f"the error of {f'In[{where.cell}]' if where.cell is not None else where}"
        trace = trace.tb_next
    return "an old error"
