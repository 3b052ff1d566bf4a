"""A forward with edits, tried without computing; the user's model is as before when it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.shapes.asked.confirm import is_limit_of_fakes, real_error
from torchdebug_magics.instruments.shapes.repair.changed import ChangedInputs, ChangedOps, with_edits
from torchdebug_magics.instruments.shapes.run.forward import Forward, forward
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.shards import ranks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torchdebug_magics.instruments.shapes.repair.edit import Edit
    from torchdebug_magics.probing.dry_runs.inputs import Inputs

__all__ = ["Trials"]

_QUICK_FLOPS = 2e9
"""Up to here a trial that needs data is run on real tensors."""
_WAITING = 3
"""How many times longer than it computes all trials together may take."""


class Trials:
    """Runs one model with edits, at most so many times and for so long.

    The time is the processor's on this thread: a machine that is busy with other things finds the same fixes. A forward that waits, such as
    for a lock or a file, is kept from waiting for ever by a limit on the clock's.
    """

    def __init__(self, model: torch.nn.Module, inputs: Inputs, *, real: bool = False, most: int = 60, longest_s: float = 6.0) -> None:
        self.model = model
        self.inputs = inputs
        self.guard = Guard()
        """Errors of this package while fixes were tried."""
        self._real = real
        self._most = most
        self._left_s = longest_s
        self._until = time.monotonic() + _WAITING * longest_s
        self._slowest_s = 0.0

    @property
    def left(self) -> bool:
        """Whether one more may be run."""
        return self._most > 0 and self._slowest_s < self._left_s and time.monotonic() < self._until

    def allow(self, many: int) -> None:
        """So many more, for another question; the time stays what it is."""
        self._most = max(self._most, many)

    def run(self, edits: Sequence[Edit]) -> Forward | None:
        """The forward with these edits; None where the outcome is unknown."""
        self._most -= 1
        began = time.thread_time()
        try:
            return self._run(edits)
        finally:
            took_s = time.thread_time() - began
            self._left_s -= took_s
            self._slowest_s = max(self._slowest_s, took_s)

    def _run(self, edits: Sequence[Edit]) -> Forward | None:
        if self._real:
            return self._with(edits, None)
        run = self._with(edits, Fakes())
        if run is None or run.error is None:
            return self._with(edits, None) if run is not None and run.unchecked and self._is_quick(run) else run
        limited = is_limit_of_fakes(run.error)
        if not limited and not run.confirmed and run.failed is not None and run.failed.error is run.error:
            tried, error = real_error(run.failed)
            limited = tried and error is None
        if not limited:
            return run
        return self._with(edits, None) if self._is_quick(run) else None

    def _is_quick(self, run: Forward) -> bool:
        """Whether it may be run on real tensors; never one that would wait for other ranks."""
        parameters = list(self.model.parameters())
        return run.flops <= _QUICK_FLOPS and ranks_of(parameters) == 1 and not any(one.device.type == "meta" for one in parameters)

    def _with(self, edits: Sequence[Edit], fakes: Fakes | None) -> Forward | None:
        inputs: Any = self.inputs
        changes = [(name, change) for edit in edits for name, change in edit.inputs.items()]
        if changes:
            inputs = ChangedInputs(self.inputs, changes)
        try:
            with RandomState.kept(), with_edits(self.model, edits, fakes) as model:
                return forward(model, inputs, fakes, instead=ChangedOps([one for edit in edits for one in edit.ops]), trial=True)
        except Exception:  # noqa: BLE001 - an edit that cannot even be made, such as a permutation of too few dimensions
            return None
