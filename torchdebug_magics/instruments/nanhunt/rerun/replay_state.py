"""A replay leaves the world as it found it: what is put aside before it, and put back after it, whatever happens in between.

What the user has hung into a step runs again in the replay: hooks of modules and tensors, and modes. They cannot be left out, as a
hook may change an output, and a mode any result: the replay would be that of another step. What they *did* is undone instead, with
everything else that can be reached from them: a counter counts on from where it was, a list of activations holds those of the run.
What leaves the process, a line written to a file or a request, is the matter of `probing.outside`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.instruments.nanhunt.rerun.step import Step
from torchdebug_magics.probing.outside.surroundings import used_by_other_threads
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.contents import Writes, write_into
from torchdebug_magics.probing.state.kept_state import listening
from torchdebug_magics.probing.state.snapshot import Snapshot
from torchdebug_magics.probing.unsent_collectives import LoneRerun


class ReplayState:
    """Everything that a replay may change, as it is now; the step's start in its place, and back again.

    `reached`: objects that the replayed code begins from. `before`: torch's random state before the first statement. `guard` notes what
    could not be put back. No context manager: an interrupt at the edge of one leaves it open, and this must never stay half done.
    """

    def __init__(
        self,
        step: Step,
        before: torch.Tensor | None,
        leaves: Iterable[torch.Tensor],
        modules: list[torch.nn.Module],
        reached: Iterable[object],
        guard: Guard,
    ) -> None:
        self._step, self._before, self._guard = step, before, guard
        self.alone = LoneRerun()
        self.alone.refuse(modules)
        self._leaves = list(leaves)
        written = [target for state in step.python for target in state.reached]
        self._kept = Snapshot([*written, *reached, *modules, *self._leaves, *listening()])
        buffers = (buffer for module in modules for inner in module.modules() for buffer in inner._buffers.values())
        for tensor in (*buffers, *(tensor for entry in step.entries for tensor, _ in entry.copies)):
            if tensor is not None and not is_lazy(tensor):
                self._kept.contents.keep(tensor)
        self.writes = Writes(self._kept.contents)
        self._others = used_by_other_threads()

    def start(self) -> None:
        """All as it was when the step began."""
        self.alone.start()
        for leaf in self._leaves:
            leaf.grad = None
        for kept in self._step.buffers:
            kept.put_back()
        for state in self._step.python:
            state.put_back(self._guard, self._others)
        if self._step.entries:
            self._step.entries[0].random.put_back()
        if self._before is not None:
            torch.set_rng_state(self._before)
        for entry in self._step.entries:
            for tensor, copy in entry.copies:
                write_into(tensor, copy)

    def undo(self) -> None:
        """All as it was when this was made. May be done twice, where an interrupt has ended the first time."""
        self._kept.put_back(self._guard, self._others)
        self.alone.put_back()
