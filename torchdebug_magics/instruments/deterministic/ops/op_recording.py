"""One run, op by op: which op at which line, what came into it from outside, and what it gave."""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.probing.lines import Line

__all__ = ["Recording", "Seen"]


class Seen(NamedTuple):
    """One op of a run, by numbers: about 30 bytes where it is kept."""

    op: int
    line: int
    given: int
    """Of its plain arguments, and of tensors that no op before it made."""
    gave: int
    """Of what it returned, or wrote."""


@dataclass
class Recording:
    """What was seen so far; `ops` and `lines` are shared by recordings that are to be compared."""

    ops: dict[str, int] = field(default_factory=dict)
    """Name -> number."""
    lines: dict[tuple[str, int], int] = field(default_factory=dict)
    """(file, line) -> number; 0 is no line of the user's."""
    places: list[Line | None] = field(default_factory=lambda: [None])
    """Number -> line."""
    lent: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = field(default_factory=dict)
    """Address -> the storage there, and whether others may write to it."""
    _ops: array[int] = field(default_factory=lambda: array("I"))
    _lines: array[int] = field(default_factory=lambda: array("I"))
    _given: array[int] = field(default_factory=lambda: array("Q"))
    _gave: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self._ops)

    def __getitem__(self, place: int) -> Seen:
        return Seen(self._ops[place], self._lines[place], self._given[place], self._gave[place])

    def add(self, seen: Seen) -> None:
        """One more op."""
        self._ops.append(seen.op)
        self._lines.append(seen.line)
        self._given.append(seen.given)
        self._gave.append(seen.gave)

    def another(self) -> Recording:
        """An empty one with the same numbers for ops and lines, to be compared with this one."""
        return Recording(self.ops, self.lines, self.places, self.lent)

    def is_lent(self, storage: torch.UntypedStorage, memory: int) -> bool:
        """Whether others may write to it at any time, such as an array of NumPy's; a later run says of it what the first one has said."""
        known = self.lent.get(memory)
        if known is not None and known[0]() is storage:
            return known[1]
        is_lent = storage.device.type == "cpu" and not storage.resizable() and not storage.is_shared()
        self.lent[memory] = weakref.ref(storage), is_lent
        return is_lent

    def number_of_op(self, name: str) -> int:
        """The same for the same name."""
        return self.ops.setdefault(name, len(self.ops))

    def number_of_line(self, line: Line | None) -> int:
        """The same for the same line of the same file, whichever code object it is in."""
        if line is None:
            return 0
        number = self.lines.get((line.file, line.line))
        if number is None:
            number = self.lines[line.file, line.line] = len(self.places)
            self.places.append(line)
        return number

    def op_name(self, number: int) -> str:
        """The name behind a number."""
        return next(name for name, known in self.ops.items() if known == number)

    def occurrence(self, place: int) -> int:
        """Which call of that op at that line it is, 1-based."""
        op, line = self._ops[place], self._lines[place]
        return sum(1 for at in range(place + 1) if self._ops[at] == op and self._lines[at] == line)
