"""Finds the first op at which a run goes another way than the one before it; and, to its end, all that such differences reach."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.instrument import Body
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder, Enough
from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, tensors
from torchdebug_magics.instruments.deterministic.report import Divergence
from torchdebug_magics.instruments.deterministic.twice.runs import FirstRun, Runs, Vary, nothing
from torchdebug_magics.probing.compiler import away_from_the_compiler
from torchdebug_magics.probing.modules import ModuleCalls, live_modules
from torchdebug_magics.probing.source.syntax import binding, nodes
from torchdebug_magics.probing.source.user_code import frames_above, location, owner
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.state.digest import of_plain, of_tensor
from torchdebug_magics.report import Location

Kind: TypeAlias = Literal["way", "given", "gave"]
"""Another op or line; the same with other plain arguments or outside data; the same on the same, with another result."""
_FLAT = frozenset({int, float, bool, str})
_MOST = 64
"""Members of a list or a dict that are looked at."""
_LEAVING = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal"})
"""They hand a number to Python, where it may be printed."""
_MOST_TIMES, _MOST_MORE = 5, 1_000
"""How many more ops than the first run another one may have: a loop may not end otherwise."""
_PASSING = ("_tensor.py", "_python_dispatch.py")
_ENTERING = "lift_fresh"
"""Data that enters torch is told as such."""


@dataclass(frozen=True, eq=False)
class Difference:
    """The first op that differs, as it was seen in the second run."""

    kind: Kind
    place: int
    op: Op | None
    """None where the second run ended before it."""
    location: Location | None
    """The user's line that it was seen at."""
    module: str | None
    phase: str
    names: dict[str, Any]
    """Variables of the frame that the op was called from, to name generators by."""
    module_kind: type | None = None
    """The class of the module."""
    is_training: bool = False
    """Whether the module is in training mode."""

    @property
    def op_name(self) -> str:
        """The dispatcher's name; empty where the second run ended."""
        return "" if self.op is None else self.op.plan.name


class RunComparison(DigestRecorder):
    """Compares a run with an earlier recording, op by op while it goes on, and ends it at the first difference."""

    def __init__(self, runs: Runs, earlier: Recording, *, to_its_end: bool = False, poison: bool = False) -> None:
        super().__init__(earlier.another(), runs.guard, runs.hooks, poison=poison)
        self.earlier = earlier
        self._to_its_end = to_its_end
        """Whether the run goes on after the difference: to end it kills the generators that it stands in."""
        self.difference: Difference | None = None
        self.results: dict[str, int] = {}
        self.plain_results: dict[str, int] = {}
        self._calls = ModuleCalls(live_modules(), runs.hooks)
        self._runs = runs

    def attach(self, stack: ExitStack, height: int | None = None) -> None:
        """Begin to compare."""
        self._calls.attach(stack)
        away_from_the_compiler(stack, self._runs.hooks, self._runs.guard)
        super().attach(stack, height)

    def over(self) -> None:
        """The run has ended by itself: note what it has left."""
        self.end()
        self.results, self.plain_results = results_of(self._runs.body, self.is_unwritten), plain_results_of(self._runs.body)

    def end(self) -> None:
        """It may have been shorter."""
        if not self.has_failed and self.difference is None and self.count < len(self.earlier):
            self.difference = Difference("way", self.count, None, None, None, "forward", {})

    def seen(self, op: Op) -> None:
        """Compare one more op."""
        if self.difference is not None:
            return
        kind = self.kind_of(op)
        if kind is not None:
            self.difference = self.described(kind, op)
            if not self._to_its_end:
                raise Enough

    def described(self, kind: Kind, op: Op) -> Difference:
        """The difference at the op that has just run; in a backward pass, with line and module of the forward that it belongs to."""
        running, phase = self._calls.current, "forward" if torch._C._current_autograd_node() is None else "backward"
        made = self.lines.of_node() if phase == "backward" else None
        line, module = made or (self.lines.here(sys._getframe()), None if running is None else running.path)
        frame = self.lines.user_frame(sys._getframe())
        names = {} if frame is None else {**frame.f_globals, **frame.f_locals}
        of_module = (None, False) if running is None else (type(running.module), running.module.training)
        return Difference(kind, op.place, op, None if line is None else line.location, module, phase, names, *of_module)

    def kind_of(self, op: Op) -> Kind | None:
        """How the op that has just run differs from that of the earlier run; None where it does not."""
        nodes, running = self.lines.nodes, self._calls.current
        if nodes.has_new_node():
            nodes.add((op.line, running.path if running is not None else ""))
        if op.place >= len(self.earlier):
            return "way"
        before, seen = self.earlier[op.place], op.seen
        if (before.op, before.line) != (seen.op, seen.line):
            return "way"
        if before.given != seen.given:
            return "given"
        if before.gave == seen.gave:
            return None
        index = op.args[op.plan.index_at : op.plan.index_at + 1] if op.plan.index_at > 0 else ()  # says which numbers are moved
        if op.empty is not None and op.plan.passes_on and not any(map(self.is_unwritten, tensors(index))):
            self.taint(op)  # it holds what nobody has written, and may never be read
            return None
        return "gave"


def results_of(body: Body, is_unwritten: Callable[[torch.Tensor], bool]) -> dict[str, int]:
    """A digest of each tensor that a name of the user's leads to; memory that nobody has written has none."""
    return {name: of_tensor(tensor) for name, tensor in tensors_left(body) if not is_lazy(tensor) and not is_unwritten(tensor)}


def plain_results_of(body: Body) -> dict[str, int]:
    """A digest of each number, text and flat list that a name of the user's holds."""
    held = {name: value for name, value in body.left().items() if not name.startswith("_")}
    parts = {name: [value] if (members := _members(value)) is None else members for name, value in held.items()}
    return {name: of_plain(value) for name, value in held.items() if all(type(part) in _FLAT for part in parts[name])}


def _members(value: object) -> list[object] | None:
    """The first ones of a list or a tuple."""
    return list(value)[:_MOST] if type(value) in {list, tuple} else None  # type: ignore[call-overload]  # one of the two


def tensors_left(body: Body) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor that a name of the user's leads to, after a run."""
    return (tensor for name, value in body.left().items() for tensor in _tensors(name, value))


def different(first: Mapping[str, int], second: Mapping[str, int], body: Body) -> Divergence | None:
    """The first tensor that is another one after the second run."""
    name = next((name for name, digest in first.items() if second.get(name, digest) != digest), None)
    if name is None:
        return None
    root = name.partition(".")[0].partition("[")[0]
    lines = [node.lineno for node in nodes(ast.Name, *body.statements) if root in binding(node)]
    at = location(body.file, max(lines), "<module>") if lines else None
    why = f"`{name}` differs although all recorded ops agree: it was computed unseen, in a thread or in compiled code"
    return Divergence(op="", module=None, location=at, occurrence=1, cause="outside_data", explanation=why, fix="")


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{name}.{path}", one) for part in (value.named_parameters(), value.named_buffers()) for path, one in part)
    elif (members := _members(value)) is not None:
        yield from ((f"{name}[{place}]", one) for place, one in enumerate(members) if isinstance(one, torch.Tensor))
    elif isinstance(value, dict):
        named = list(value.items())[:_MOST]
        yield from ((f"{name}[{key!r}]", one) for key, one in named if isinstance(key, (str, int)) and isinstance(one, torch.Tensor))


class Effect(RunComparison):
    """Where each difference began, by the memory that holds its consequences; what is written over with equal numbers is forgotten."""

    def __init__(self, runs: Runs, first: FirstRun) -> None:
        super().__init__(runs, first.recording, to_its_end=True)
        self._results_before = first.results
        self.beginnings: list[Difference] = []
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
        self._most_ops = _MOST_TIMES * len(first.recording) + _MOST_MORE
        self.has_backward = False
        """Whether the run computes gradients."""
        self.differing: dict[str, type] = {}
        """Tensors that the run has left otherwise, by name, with the type of the variable that leads to each."""
        self._holds: dict[int, Difference] = {}
        self._last: Difference | None = None
        self._handed: set[tuple[int, int, int]] | None = None

    @property
    def first(self) -> Difference | None:
        """The earliest that reaches the results."""
        return min(self.reached, key=attrgetter("place"), default=None)

    def seen(self, op: Op) -> None:
        """Compare one more op, and follow what differs."""
        if op.place > self._most_ops:
            self.reached += [self.way] if self.way is not None else []
            raise Enough
        if self.way is not None:
            self._look_at_handed(op)
            return
        kind = self.kind_of(op)
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
        begin = min((self._holds[number] for number in self.inputs if number in self._holds), key=attrgetter("place"), default=None)
        if begin is None or op.plan.is_random:
            begin = self.described(kind, op)
            self.beginnings.append(begin)
            self.suspects[begin.place] = frozenset(self.inputs - self._settled)
        elif begin.op is not None and begin.op.plan.is_view and begin.op.plan.base != _ENTERING:  # the op that computes with it says more
            begin = self._instead(begin, self.described("given", op))
        self._last = begin
        self._holds |= dict.fromkeys(changed, begin)
        if kind == "way":
            self.way, self._last = begin, None
        elif op.plan.base in _LEAVING and _is_asked_by_user(sys._getframe(1)):
            self.reached.append(begin)

    def _look_at_handed(self, op: Op) -> None:
        """After the runs have gone different ways: a number that Python gets at a line where it never got that one in the first run."""
        if op.plan.base not in _LEAVING or not _is_asked_by_user(sys._getframe(2)) or self.way is None:
            return
        if self._handed is None:
            self._handed = {(first.op, first.line, first.gave) for first in self.earlier}
        if (op.seen.op, op.seen.line, op.seen.gave) not in self._handed:
            self.reached.append(self.way)

    def _instead(self, begin: Difference, better: Difference) -> Difference:
        self.beginnings = [better if one is begin else one for one in self.beginnings]
        self._holds = {memory: better if one is begin else one for memory, one in self._holds.items()}
        self.suspects[better.place] = self.suspects.get(begin.place, frozenset())
        return better

    def over(self) -> None:
        """What the run has left by name may be other tensors and plain values."""
        super().over()
        if self.difference is not None:  # it was shorter
            self.beginnings.append(self.difference)
            self.way = self.difference
        elif self._last is not None:
            self.reached.append(self._last)
        tensors, variables = dict(tensors_left(self._runs.body)), self._runs.body.left()
        now = self.results | self.plain_results
        names = [name for name, digest in now.items() if self._results_before.get(name, digest) != digest]
        self.differing = {name: type(variables.get(name.partition(".")[0])) for name in names}
        unknown = self.way or next(iter(self.beginnings), None)
        for name in names:
            begin = self._holds.get(memory_of(tensors[name]), self.way) if name in tensors else unknown
            self.reached += [begin] if begin is not None else []


def effect_of(
    runs: Runs, vary: Vary = nothing, *, first: FirstRun | None = None, from_end: bool = False, hears: bool = False
) -> Effect | None:
    """One more run after `vary`, compared with the first to its end, by what it prints, too, if it `hears`.

    None where it could not be looked at.
    """
    effect = Effect(runs, first or runs.first)
    effect.error = runs.again(effect, effect.over, vary, from_end=from_end)
    if effect.error is not None:
        effect.reached += effect.beginnings[:1]
    elif hears and not effect.reached and not effect.has_failed:
        effect.prints = _printed_otherwise(runs, vary, from_end=from_end)
    return None if effect.has_failed else effect


def _printed_otherwise(runs: Runs, vary: Vary, *, from_end: bool) -> Location | None:
    """The first line that has printed another number, does so again, and does not in a run with nothing otherwise: no clock then."""
    heard = runs.heard
    found = set(heard.other_numbers(runs.second_heard))
    if found and runs.unwatched(vary, from_end=from_end) is None:
        found -= set(runs.heard.other_numbers(heard))
    if found:
        found = found - set(runs.heard.other_numbers(runs.second_heard)) if runs.unwatched() is None else set()
    place = heard.lines[min(found)][0] if found else None
    return None if place is None else location(*place)


def _is_asked_by_user(frame: FrameType) -> bool:
    """Whether a number is handed to other code than torch's own, such as a DataLoader's, which makes nothing of it without workers."""
    files = (frame.f_code.co_filename for frame in frames_above(frame))
    asking = next((file for file in files if owner(file) != "own" and not file.endswith(_PASSING)), "")
    return owner(asking) != "torch" or asking.endswith("_tensor_str.py")
