"""The user's own modules that a run imports first: a later run imports them anew, as the first one did."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from torchdebug_magics.probing.where import owner

__all__ = ["Imported"]


class Imported:
    """What a module keeps began with its import: were it there already, a later run would find what the first one has left in it."""

    def __init__(self) -> None:
        self._before = frozenset(sys.modules)
        self._first: dict[str, ModuleType] = {}

    def over(self) -> None:
        """The first run has ended: what it has imported is kept for the end."""
        self._first = self._new()
        self.drop()

    def drop(self) -> None:
        """As it was before any run."""
        for name in self._new():
            del sys.modules[name]

    def finish(self) -> None:
        """As the first run has left it. Harmless the second time."""
        if self._first:
            self.drop()
            sys.modules.update(self._first)
        self._first = {}  # last: what an interrupt cut short is finished by another call

    def _new(self) -> dict[str, ModuleType]:
        return {name: one for name, one in list(sys.modules.items()) if name not in self._before and _is_users(one)}


def _is_users(module: ModuleType) -> bool:
    """Whether it is written in Python, by the user. What is written in C, or gives torch new ops, may not be loaded a second time."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or owner(file) != "user":
        return False
    return not any(isinstance(one, torch.library.Library) for one in list(vars(module).values()))
