"""Everything of the user's that code can reach from some objects: as it is now, and back again.

Code that runs once more must leave no trace in what it only happens to touch: counters, lists, queues, files, whatever a hook fills.
Which of them it will touch cannot be told beforehand, so all is kept that can be reached, nearest first, while there is room.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FrameType, TracebackType
from typing import Any

import torch

from torchdebug_magics.probing.keepers import cost_bytes, keep

__all__ = ["Snapshot"]

_MOST_OBJECTS = 200_000
_MOST_BYTES = 256 << 20
_ATOMS = (int, float, complex, bool, str, bytes, type(None), type(...), range, slice)
_OPAQUE = frozenset({*_ATOMS, torch.dtype, torch.device, torch.Size, torch.layout, CodeType, FrameType, TracebackType})
_NOT_THE_USERS = frozenset({__name__.partition(".")[0], "IPython", "ipykernel", "ipywidgets", "traitlets", "zmq", "tornado", "logging"})
"""Packages whose objects run the notebook, or watch it: what they hold is not the step's, and goes on meanwhile."""


class Snapshot:
    """What was reachable from `roots` at one moment."""

    def __init__(self, roots: Iterable[object]) -> None:
        self._actions: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}
        """Also keeps them alive, so that no id is given away."""
        todo, room_bytes = deque(roots), _MOST_BYTES
        while todo and len(self._seen) < _MOST_OBJECTS:
            value = todo.popleft()
            if id(value) in self._seen or _is_opaque(value):
                continue
            self._seen[id(value)] = value
            room_bytes -= (cost := cost_bytes(value))
            if room_bytes < 0:
                room_bytes += cost
                continue
            todo.extend(one for one in self._keep(value) if type(one) not in _OPAQUE)

    def put_back(self) -> None:
        """Make all of it as it was; what resists is left."""
        for action in self._actions:
            with contextlib.suppress(Exception):
                action()

    def _keep(self, value: Any) -> Iterable[object]:
        leads: Iterable[object] = ()
        put_back = None
        with contextlib.suppress(Exception):  # a strange object is no reason not to look at the others
            leads, put_back = keep(value)
        if put_back is not None:
            self._actions.append(put_back)
        return leads


def _is_opaque(value: object) -> bool:
    kind = type(value)
    return (
        kind in _OPAQUE or (kind is BuiltinFunctionType and not _bound(value)) or str(kind.__module__).partition(".")[0] in _NOT_THE_USERS
    )


def _bound(function: Any) -> bool:
    """``hook = kept.append`` is a built-in function with the list inside it."""
    owner = function.__self__
    return owner is not None and type(owner).__name__ != "module"
