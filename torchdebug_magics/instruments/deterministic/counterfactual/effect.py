"""Compares a run with the first one to its end, and follows what differs from where it begins to what it reaches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import FrameType

import torch

from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, Seen, tensors
from torchdebug_magics.instruments.deterministic.twice.body import Enough
from torchdebug_magics.instruments.deterministic.twice.run_comparison import (
    Difference,
    RunComparison,
    plain_results_of,
    results_of,
    tensors_left,
)
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.source.user_code import frames_above, location, owner
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.report import Location

_LEAVING = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal"})
"""They hand a number to Python, where it may be printed."""
_MOST_TIMES, _MOST_MORE = 5, 1_000
"""How many more ops than the first run another one may have: a loop may not end otherwise."""
_PASSING = ("_tensor.py", "_python_dispatch.py")
_ENTERING = "lift_fresh"
"""Data that enters torch is told as such."""


class Effect(RunComparison):
    """Where each difference began, by the memory that holds its consequences; what is written over with equal numbers is forgotten."""

    def __init__(self, earlier: Recording, runs: Runs) -> None:
        super().__init__(earlier, live_modules(), runs.guard, runs.hooks, to_its_end=True)
        self.begins: list[Difference] = []
        """Every difference that follows from no other, in order."""
        self.reached: list[Difference] = []
        """Of these, the ones that reach Python, a name of the user's, the last op, or another way."""
        self.way: Difference | None = None
        """Where the runs went different ways: from there on only what they leave is compared."""
        self.error: BaseException | None = None
        """What the run raised."""
        self.prints: Location | None = None
        """Where the run prints another number, though none of its ops differs."""
        self.suspects: dict[int, frozenset[int]] = {}
        """By the place of a beginning, the storages that its op was given, less those that were written over with equal numbers."""
        self._settled: set[int] = set()
        self._most_ops = _MOST_TIMES * len(earlier) + _MOST_MORE
        self.has_backward = False
        """Whether the run computes gradients."""
        self.differing: dict[str, type] = {}
        """Tensors that the run has left otherwise, by name, with the type of the variable that leads to each."""
        self._holds: dict[int, Difference] = {}
        self._last: Difference | None = None
        self._is_over = False
        self._handed: set[tuple[int, int, int]] | None = None

    def _seen(self, seen: Seen, op: Op) -> None:
        if op.place > self._most_ops:
            self.reached += [self.way] if self.way is not None else []
            raise Enough
        if self._is_over:
            self._look_at_handed(seen, op)
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
            self._settled.update(changed)
            return
        begin = min(
            (self._holds[number] for number in self.recorder.inputs if number in self._holds), key=attrgetter("place"), default=None
        )
        if begin is None or op.plan.is_random:
            begin = self.described(kind, seen, op)
            self.begins.append(begin)
            self.suspects[begin.place] = frozenset(self.recorder.inputs - self._settled)
        elif begin.op is not None and begin.op.plan.is_view and begin.op.plan.base != _ENTERING:  # the op that computes with it says more
            begin = self._instead(begin, self.described("given", seen, op))
        self._last = begin
        self._holds |= dict.fromkeys(changed, begin)
        self._is_over = kind == "way"
        if self._is_over:
            self.way, self._last = begin, None
        elif op.plan.base in _LEAVING and _is_asked_by_user(sys._getframe(1)):
            self.reached.append(begin)

    def _look_at_handed(self, seen: Seen, op: Op) -> None:
        """After the runs have gone different ways: a number that Python gets at a line where it never got that one in the first run."""
        if op.plan.base not in _LEAVING or not _is_asked_by_user(sys._getframe(2)) or self.way is None:
            return
        if self._handed is None:
            seen_first = (self.earlier[place] for place in range(len(self.earlier)))
            self._handed = {(one.op, one.line, one.gave) for one in seen_first}
        if (seen.op, seen.line, seen.gave) not in self._handed:
            self.reached.append(self.way)

    def _instead(self, begin: Difference, better: Difference) -> Difference:
        self.begins = [better if one is begin else one for one in self.begins]
        self._holds = {memory: better if one is begin else one for memory, one in self._holds.items()}
        self.suspects[better.place] = self.suspects.get(begin.place, frozenset())
        return better

    def over(self) -> None:
        """The run has ended by itself."""
        self.end()
        if self.difference is not None:  # it was shorter
            self.begins.append(self.difference)
            self.way = self.difference
        elif self._last is not None:
            self.reached.append(self._last)

    def left(self, differing: Iterable[torch.Tensor | None]) -> None:
        """What the run has left otherwise by name, after its end: a tensor, or None for a plain value."""
        unknown = self.way or next(iter(self.begins), None)
        for one in differing:
            begin = unknown if one is None else self._holds.get(memory_of(one), unknown if self.way is not None else None)
            self.reached += [begin] if begin is not None else []


def effect_of(runs: Runs, earlier: Recording, results: Mapping[str, int], *, hears: bool = False) -> Effect | None:
    """One more run, compared to its end, by what it prints, too, if it `hears`; None where it could not be looked at."""
    effect = Effect(earlier, runs)

    def at_end() -> None:
        now = results_of(runs.body, effect.recorder.is_unwritten) | plain_results_of(runs.body)
        held = dict(tensors_left(runs.body))
        effect.over()
        names = [name for name, digest in now.items() if results.get(name, digest) != digest]
        variables = runs.body.left()
        effect.differing = {name: type(variables.get(name.partition(".")[0])) for name in names}
        effect.left(held.get(name) for name in names)

    effect.error = runs.again(effect, at_end)
    if effect.error is not None:
        effect.reached += effect.begins[:1]
    elif hears and not effect.reached and not effect.recorder.has_failed:
        effect.prints = _printed_otherwise(runs)
    return None if effect.recorder.has_failed else effect


def _printed_otherwise(runs: Runs) -> Location | None:
    """The first line that has printed another number, does so again, and does not in a run with nothing otherwise: no clock then."""
    heard = runs.heard
    found = set(heard.other_numbers(runs.second_heard))
    if found and runs.unwatched() is None:
        found -= set(runs.heard.other_numbers(heard))
    if found:
        with runs.otherwise():
            found = found - set(runs.heard.other_numbers(runs.second_heard)) if runs.unwatched() is None else set()
    place = heard.lines[min(found)][0] if found else None
    return None if place is None else location(*place)


def _is_asked_by_user(frame: FrameType) -> bool:
    """Whether a number is handed to other code than torch's own, such as a DataLoader's, which makes nothing of it without workers."""
    files = (frame.f_code.co_filename for frame in frames_above(frame))
    asking = next((file for file in files if owner(file) != "own" and not file.endswith(_PASSING)), "")
    return owner(asking) != "torch" or asking.endswith("_tensor_str.py")
