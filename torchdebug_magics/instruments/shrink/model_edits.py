"""Changes to a live model that can be taken back: whatever is replaced is kept, and put back into the same place, last first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchdebug_magics.instruments.shrink.report import StackRow
from torchdebug_magics.probing.modules import unwrapped

_ABSENT = object()


class Edits:
    """What was changed, in order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self.stacks: tuple[StackRow, ...] = ()
        """What was cut, for whoever asks to have it back."""

    def __len__(self) -> int:
        return len(self._undo)

    def put(self, table: MutableMapping[str, Any], name: str, value: object) -> None:
        """``table[name] = value``: an entry of a dict, or an attribute, as ``vars()`` holds it."""
        before = table.get(name, _ABSENT)

        def undo() -> None:
            if before is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = before

        self._undo.append(undo)
        table[name] = value

    def refill(self, table: MutableMapping[str, Any], entries: Mapping[str, Any]) -> None:
        """Let the very same table hold other entries."""
        before = dict(table)
        self._undo.append(lambda: _fill(table, before))
        _fill(table, entries)

    def then(self, undo: Callable[[], object]) -> None:
        """Call this when it is undone, too."""
        self._undo.append(undo)

    def undo(self, down_to: int = 0) -> None:
        """Take all back, or those after the first few."""
        while len(self._undo) > down_to:
            self._undo[-1]()
            self._undo.pop()


_OF_MODELS: WeakKeyDictionary[torch.nn.Module, Edits] = WeakKeyDictionary()


def edits_of(model: torch.nn.Module) -> Edits:
    """Those of a model, which end with it; a copy of it has none."""
    return _OF_MODELS.setdefault(unwrapped(model), Edits())


def _fill(table: MutableMapping[str, Any], entries: Mapping[str, Any]) -> None:
    table.clear()
    table.update(entries)
