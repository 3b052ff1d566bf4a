"""Compares a run with the first one to its end, and follows what differs from where it begins to what it reaches."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.deterministic.ops.values import tensors
from torchdebug_magics.instruments.deterministic.twice.compare import Comparison
from torchdebug_magics.instruments.deterministic.twice.results import results_of, tensors_left
from torchdebug_magics.probing.contents import memory_of
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.where import frames_above, owner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from torchdebug_magics.instruments.deterministic.ops.op import Op
    from torchdebug_magics.instruments.deterministic.ops.recording import Recording, Seen
    from torchdebug_magics.instruments.deterministic.twice.compare import Difference
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["Effect", "effect_of"]

_LEAVING = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal"})
"""They hand a number to Python, where it may be printed."""


_PASSING = ("_tensor.py", "_python_dispatch.py")
_ENTERING = "lift_fresh"
"""Data that enters torch is told as such."""


class Effect(Comparison):
    """Where each difference began, by the memory that holds its consequences; what is written over with equal numbers is forgotten."""

    def __init__(self, earlier: Recording, runs: Runs) -> None:
        super().__init__(earlier, live_modules(), runs.guard, runs.hooks, to_its_end=True)
        self.begins: list[Difference] = []
        """Every difference that follows from no other, in order."""
        self.reached: list[Difference] = []
        """Of these, the ones that reach Python, a name of the user's, the last op, or another way."""
        self.has_backward = False
        """Whether the run computes gradients."""
        self._holds: dict[int, Difference] = {}
        self._last: Difference | None = None
        self._is_over = False

    def _seen(self, seen: Seen, op: Op) -> None:
        if self._is_over:
            return
        kind = self.kind_of(seen, op)
        self.has_backward = self.has_backward or torch._C._current_autograd_node() is not None
        changed = [memory for tensor in (*tensors(op.result), *op.written) if (memory := memory_of(tensor))]
        if kind is None:
            if op.plan.is_view:
                return
            self._last = None
            for memory in changed:
                self._holds.pop(memory, None)
            return
        begin = min((self._holds[one] for one in self.recorder.inputs if one in self._holds), key=_place, default=None)
        if begin is None or op.plan.is_random:
            begin = self.described(kind, seen, op)
            self.begins.append(begin)
        elif begin.op is not None and begin.op.plan.is_view and begin.op.plan.base != _ENTERING:  # the op that computes with it says more
            begin = self._instead(begin, self.described("given", seen, op))
        self._last = begin
        self._holds |= dict.fromkeys(changed, begin)
        self._is_over = kind == "way"
        if self._is_over or (op.plan.base in _LEAVING and _is_asked_by_user(sys._getframe(1))):
            self.reached.append(begin)

    def _instead(self, begin: Difference, better: Difference) -> Difference:
        self.begins = [better if one is begin else one for one in self.begins]
        self._holds = {memory: better if one is begin else one for memory, one in self._holds.items()}
        return better

    def over(self) -> None:
        """The run has ended by itself."""
        self.end()
        if self.difference is not None:  # it was shorter
            self.begins.append(self.difference)
            self.reached.append(self.difference)
        elif self._last is not None:
            self.reached.append(self._last)

    def left(self, name_differs: Mapping[str, torch.Tensor]) -> None:
        """Tensors that the run has left otherwise, by name."""
        self.reached += [self._holds[memory_of(one)] for one in name_differs.values() if memory_of(one) in self._holds]


def effect_of(runs: Runs, earlier: Recording, results: Mapping[str, int]) -> Effect | None:
    """One more run, compared to its end; None where it could not be looked at."""
    effect = Effect(earlier, runs)

    def at_end() -> None:
        now = results_of(runs.body, effect.recorder.is_unwritten)
        held = dict(tensors_left(runs.body))
        effect.left({name: held[name] for name, digest in now.items() if name in held and results.get(name, digest) != digest})
        effect.over()

    error = runs.again(effect, at_end)
    if error is not None:
        effect.reached += effect.begins[:1]
    return None if effect.recorder.failed or (error is not None and not effect.begins) else effect


def _is_asked_by_user(frame: FrameType) -> bool:
    """Whether a number is handed to other code than torch's own, such as a DataLoader's, which makes nothing of it without workers."""
    files = (one.f_code.co_filename for one in frames_above(frame))
    asking = next((file for file in files if owner(file) != "own" and not file.endswith(_PASSING)), "")
    return owner(asking) != "torch" or asking.endswith("_tensor_str.py")


def _place(difference: Difference) -> int:
    return difference.place
