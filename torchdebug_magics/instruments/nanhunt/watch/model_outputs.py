"""What models return where no gradient will flow from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torchdebug_magics.probing.tensors import largest, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.nanhunt.causes.evidence import Context
    from torchdebug_magics.instruments.nanhunt.replay.bad_step import Outcome
    from torchdebug_magics.instruments.nanhunt.replay.investigate import Investigator
    from torchdebug_magics.instruments.nanhunt.watch.findings_tally import Tally
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.rerun.step import Entry
    from torchdebug_magics.probing.rerun.step_recorder import StepRecorder

__all__ = ["ModelOutputs"]

_HARMLESS_ENOUGH = 3


class ModelOutputs:
    """Looks at the output of each outermost module call, and learns which modules return infinities on purpose."""

    def __init__(
        self, tally: Tally, recorder: StepRecorder, investigator: Investigator, guard: Guard, context: Callable[[], Context]
    ) -> None:
        self._tally = tally
        self._recorder = recorder
        self._investigator = investigator
        self._guard = guard
        self._context = context
        self._harmless: dict[int, int] = {}

    def look(self, entry: Entry, output: Any, *, inside: bool) -> Outcome | None:
        """The outcome, where it is new."""
        step, tensors = self._recorder.step, list(tensors_in(output))
        if inside or any(tensor.requires_grad for tensor in tensors):
            step.grows_graph = True
            return None
        self._tally.forwards += 1
        outcome = None
        if not self._tally.is_full and not math.isfinite(largest(tensors)) and not self._is_harmless(entry):
            outcome = self._tally.add(self._investigator.output(step, entry, tensors, self._context()))
            self._tally.meant += outcome is None
        if not step.grows_graph:
            step.clear()
        return outcome

    def _is_harmless(self, entry: Entry) -> bool:
        """Whether this module's bad outputs were looked into and found to be meant, three times over."""
        count = self._harmless.get(id(entry.module), 0)
        self._harmless[id(entry.module)] = count + 1
        if count == _HARMLESS_ENOUGH:
            self._guard.note("a model returns intentional infinities (such as a mask): its outputs are no longer checked")
        return count >= _HARMLESS_ENOUGH
