"""A retry inside ``except``: until that block ends, the error's traceback holds every variable of the call that failed."""

from __future__ import annotations

import sys
import traceback
from contextlib import closing
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.findings import Undeleted
from torchdebug_magics.probing.holders import find_holders
from torchdebug_magics.probing.holders.roots import roots
from torchdebug_magics.probing.holders.walk import Walk, undisturbed
from torchdebug_magics.probing.where import frames_above, is_user_code, locate

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType

    from torchdebug_magics.instruments.memtrace.ledger.blocks import Ledger

__all__ = ["HandledErrors"]

_MOST_LOOKS = 3
_MOST_VISITS = 300_000
_LEAST_BYTES = 64 << 10
_LARGE_PART = 0.25
_FIX = (
    "retry after the `except` block, not in it: set a flag there, `failed = True`, and write `if failed:` after it. "
    "Until the block ends, the error's traceback keeps the variables of the failed call"
)


class HandledErrors:
    """Looks, where a model is called while an error is handled, at what nothing but that error holds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._looks = 0
        self._latest = 0
        """The id of the error that was looked at."""
        self._most: Undeleted | None = None

    def look(self) -> None:
        """A model is called."""
        error = sys.exc_info()[1]
        if error is None or id(error) == self._latest or self._looks == _MOST_LOOKS:
            return
        self._latest, self._looks = id(error), self._looks + 1
        frame = _handling(error)
        self._ledger.settle()
        sizes = {block.ref.key: block.bytes for block in self._ledger.live.values() if block.ref is not None}
        held = {} if frame is None else find_holders(_only_by(error, sizes)).paths
        size_bytes = sum(sizes[key] for key in held)
        if frame is not None and size_bytes >= max(_LEAST_BYTES, 0 if self._most is None else self._most.live_bytes + 1):
            path = held[max(held, key=lambda key: sizes[key])]
            self._most = Undeleted(name="", location=locate(frame), live_bytes=size_bytes, holder=path, fix=_FIX)

    def found(self, peak_bytes: int) -> Undeleted | None:
        """What a retry found held, where it is much of what there was."""
        return self._most if self._most is not None and self._most.live_bytes >= _LARGE_PART * peak_bytes else None


def _handling(error: BaseException) -> FrameType | None:
    """The call of the user's that handles it: the innermost that runs and that it came by."""
    raised = {id(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}
    return next((frame for frame in frames_above(sys._getframe()) if id(frame) in raised and is_user_code(frame.f_code)), None)


def _only_by(error: BaseException, wanted: Collection[int]) -> set[int]:
    """Of these storages those to which no name leads but by way of the error."""
    with undisturbed(), closing(Walk([root for root in roots() if root.value is not error], wanted, _MOST_VISITS)) as walk:
        return set(wanted) - set(walk.holders) if walk.is_whole else set()
