"""A forward with edits, tried without computing; the user's model is as before when it ends."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.confirm import is_limit_of_fakes, real_error
from torchdebug_magics.instruments.shapes.faking import Fakes
from torchdebug_magics.instruments.shapes.forward import Forward, forward
from torchdebug_magics.instruments.shapes.leaves import rebuilt
from torchdebug_magics.instruments.shapes.repair.changed import SMALL, ChangedInputs, ChangedOps, with_edits
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.rng import RandomState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.shapes.inputs import Inputs
    from torchdebug_magics.instruments.shapes.repair.edit import Edit
    from torchdebug_magics.instruments.shapes.repair.facts import Facts

__all__ = ["Trials", "tried_on_op"]

_QUICK_FLOPS = 2e9
"""Up to here a trial that needs data is run for real."""
_WAITING = 3
"""How many times longer than it computes all trials together may take."""


class Trials:
    """Runs one model with edits, at most so many times and for so long.

    The time is the processor's on this thread: a machine that is busy with other things finds the same fixes. A forward that waits, such as
    for a lock or a file, is kept from waiting for ever by a limit on the clock's.
    """

    def __init__(self, model: torch.nn.Module, inputs: Inputs, *, real: bool = False, most: int = 40, longest_s: float = 6.0) -> None:
        self.model = model
        self.inputs = inputs
        self.guard = Guard()
        """What of ours failed on the way."""
        self._real = real
        self._most = most
        self._left_s = longest_s
        self._until = time.monotonic() + _WAITING * longest_s
        self._slowest_s = 0.0

    @property
    def left(self) -> bool:
        """Whether one more may be run."""
        return self._most > 0 and self._slowest_s < self._left_s and time.monotonic() < self._until

    def run(self, edits: Sequence[Edit]) -> Forward | None:
        """The forward with these edits; None where it cannot be told how it would go."""
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
        """Whether it may be run for real."""
        return run.flops <= _QUICK_FLOPS and not any(one.device.type == "meta" for one in self.model.parameters())

    def _with(self, edits: Sequence[Edit], fakes: Fakes | None) -> Forward | None:
        inputs: Any = self.inputs
        changes = [(name, change) for edit in edits for name, change in edit.inputs.items()]
        if changes:
            inputs = ChangedInputs(self.inputs, changes)
        before = RandomState.take()
        try:
            with with_edits(self.model, edits, fakes) as model:
                return forward(model, inputs, fakes, instead=ChangedOps([one for edit in edits for one in edit.ops]), trial=True)
        except Exception:  # noqa: BLE001 - an edit that cannot even be made, such as a permutation of too few dimensions
            return None
        finally:
            before.put_back()


def tried_on_op(facts: Facts, edit: Edit) -> bool | None:
    """Whether an op outside every model comes through with an edit, on fakes made of its operands; None where that cannot be told."""
    if len(edit.ops) != 1 or edit.modules or edit.calls or edit.inputs or edit.parameters or edit.buffers or edit.attributes:
        return None
    edited = edit.ops[0]
    known = facts.values

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        values = known(tensor) if not tensor.is_floating_point() else None
        return values if values is not None else torch.zeros(tensor.shape, dtype=tensor.dtype)

    if sum(one.tensor.numel() for one in facts.operands) > SMALL:
        return None
    before = RandomState.take()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            edited.run(facts.func, rebuilt(facts.args, stand_in), rebuilt(dict(facts.kwargs), stand_in))
    except Exception:  # noqa: BLE001 - whatever torch says of the changed operands
        return False
    finally:
        before.put_back()
    return True
