"""All sources of random numbers, seeded and put back."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, SupportsIndex

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.deterministic.ritual.generators import Held
from torchdebug_magics.instruments.deterministic.ritual.queued import QueuedSeeds
from torchdebug_magics.instruments.deterministic.ritual.seedable import sow_numpy
from torchdebug_magics.probing.rng import RandomState

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.names import Named

__all__ = ["MOST", "Seeds", "checked_seed"]

MOST = 2**32 - 1
"""NumPy and PYTHONHASHSEED take no larger one."""


def checked_seed(seed: SupportsIndex) -> int:
    """The seed as a plain int; a `TorchDebugError` says which there are."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number <= MOST:
        msg = f"a seed must be an integer from 0 to {MOST} (the largest that NumPy accepts), not {seed!r}"
        raise TorchDebugError(msg)
    return number


class Seeds:
    """Python's, NumPy's, torch's on every device, and the user's own generators."""

    def __init__(self, seed: int, guard: Guard) -> None:
        self.seed = seed
        self._guard = guard
        self._before: RandomState | None = None
        self._held = Held((), guard)
        self._queued = QueuedSeeds()
        self._is_open = False

    def attach(self, stack: ExitStack, generators: Sequence[Named], *, keep: bool) -> None:
        """Seed all; unless `keep`, they go on from where they stood when the stack closes."""
        self._before = RandomState.take()
        self._queued.take()
        self._held = Held(generators, self._guard)
        self._is_open = True
        if not keep:
            stack.callback(self.put_back)
        self.sow()

    def sow(self) -> None:
        """Begin all anew, once more. CUDA is not started for it: torch seeds it when it starts."""
        random.seed(self.seed)
        if "numpy" in sys.modules:
            self._guard.run("seeding NumPy", sow_numpy, self.seed)
        torch.manual_seed(self.seed)
        self._held.seed(self.seed)

    def put_back(self) -> None:
        """As they were before; harmless the second time."""
        if self._before is not None and self._is_open:
            self._before.put_back()
            self._queued.put_back()
            self._held.put_back()
            self._is_open = False

    def are_back(self) -> bool:
        """Whether all stand where they stood."""
        return self._before is not None and self._before.holds() and self._queued.are_back() and self._held.is_back()
