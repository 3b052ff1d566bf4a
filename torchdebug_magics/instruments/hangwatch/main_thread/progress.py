"""Whether the main thread goes on, as a look from another thread can tell; where it stands, what slows it down, and what it writes."""

from __future__ import annotations

import ast
import heapq
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.hangwatch.main_thread.endless import Rounds
from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import cell_frames
from torchdebug_magics.instruments.hangwatch.waits.thread_waits import COMPILERS
from torchdebug_magics.probing.source.call_sites import function_node, line_of, names_of
from torchdebug_magics.probing.source.syntax import loops_around, names_in, nodes, targets_of
from torchdebug_magics.probing.source.user_code import frames_above, is_module_code, is_user_code, locate, owner
from torchdebug_magics.report import Location

_MOST_POSITIONS = 4096
_MOST_FRAMES = 40
_RATE_OVER = 40
"""Looks."""
_LOADER = "torch.utils.data.dataloader"
_BACKWARD = "_engine_run_backward"
_LONG_S, _EVERY_S = 0.5, 2.0
"""A pass that takes so long is looked at, and again after so long."""
_LEAST_STEPS = 2
_LEAST_PASSES = 3
_GROWS, _GROWS_S, _SAME = 1.5, 0.75, 0.1
"""Over the median of the passes before, and over the shortest, as looks measure each to half a second; while steps are as large."""
_MOST_NODES, _MOST_HELD = 5_000, 64
_MOST_PASSES = 16
_BREAKS = frozenset({"detach", "detach_", "data", "item"})
"""Attributes of a tensor that leave its graph behind."""
_TAIL = 4000


@dataclass
class _Pass:
    number: int
    """Of the node in which the graph ends."""
    began_s: float
    """When a look met it first."""
    took_s: float = 0.0


class BackwardPasses:
    """Those that looks have met."""

    def __init__(self) -> None:
        self.began_s = 0.0
        """When the one that runs was met first; 0 while none runs."""
        self.carrier: tuple[str, str] | None = None
        """(variable that keeps the graphs of earlier steps, how to detach it), once a pass goes through them."""
        self.carried_at: Location | None = None
        """The line that called backward then."""
        self._met: dict[object, deque[_Pass]] = {}
        """By the line that calls backward."""
        self._looked_s = 0.0

    def look(self, backward: FrameType | None, now_s: float) -> None:
        """Note the pass that runs: `backward` is the frame that waits for the engine."""
        held = {} if backward is None else names_of(backward)
        _, keeps_graph, create_graph, inputs = (*held.get("args", ()), *[None] * 4)[:4]
        with torch._C.DisableTorchFunctionSubclass():  # nothing of the user's is called
            roots = [root for one in held.get("t_outputs", ()) if (root := getattr(one, "grad_fn", None)) is not None]
        user = next((frame for frame in frames_above(backward) if is_user_code(frame.f_code)), None)
        if not roots or user is None or create_graph or inputs:  # gradients of gradients, or of some inputs: earlier steps on purpose
            self.began_s = 0.0
            return
        root = max(roots, key=_number)
        met = self._met.setdefault((id(user.f_code), user.f_lasti), deque(maxlen=_MOST_PASSES))
        if not met or met[-1].number != _number(root) or not self.began_s:
            met.append(_Pass(_number(root), now_s))
        self.began_s, met[-1].took_s = met[-1].began_s, now_s - met[-1].began_s
        is_time = met[-1].took_s >= _LONG_S and now_s - self._looked_s >= _EVERY_S
        if self.carrier is None and keeps_graph and is_time:
            self._looked_s, where, carrier = now_s, locate(user), _carrier(user)  # before the pass may end
            found = goes_through_earlier(root, [one.number for one in met][:-1])
            if found or (found is None and carrier[0] and _take_longer(met)):
                self.carrier, self.carried_at = carrier, where


def goes_through_earlier(root: Any, earlier: Sequence[int]) -> bool | None:
    """Whether a graph holds nodes of at least two earlier steps; `earlier` are the numbers with which those ended, ascending.

    None where the graph is too large for an answer: PyTorch keeps a handle for each node that Python has seen, and the kernel crashes when
    a graph with many of them is freed. Always goes on to the oldest node that is known.
    """
    steps: set[int] = set()
    met = {_number(root)}
    known = [(_number(root), root)]
    while known and len(met) < _MOST_NODES and len(steps) < _LEAST_STEPS:
        number, node = heapq.heappop(known)
        steps |= {step} if 0 < (step := bisect_left(earlier, number)) < len(earlier) else set()
        for inner, _ in node.next_functions:
            if inner is not None and number > (its := _number(inner)) not in met:  # what accumulates a gradient has the highest number
                met.add(its)
                heapq.heappush(known, (its, inner))
        if len(known) > 2 * _MOST_HELD:
            known = heapq.nsmallest(_MOST_HELD, known)
    return True if len(steps) >= _LEAST_STEPS else None if known else False


def _take_longer(passes: Sequence[_Pass]) -> bool:
    """Whether a pass takes longer than those before, though each step has created as many nodes."""
    *before, latest = [done.took_s for done in passes] or [0.0]
    sizes = [after.number - one.number for one, after in pairwise(passes)]
    if len(before) < _LEAST_PASSES - 1 or any(size % min(sizes) > _SAME * min(sizes) for size in sizes):
        return False
    return latest >= max(_GROWS * median(before), min(before) + _GROWS_S, *before)


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _carrier(frame: FrameType) -> tuple[str, str]:
    """The variable that the loop around a frame makes from itself, or the attribute of a module that holds a graph; its repair."""
    names = names_of(frame)
    held = [(name, names.get(name)) for name in _carried(frame)]
    for name, root in list(names.items()):
        if isinstance(root, torch.nn.Module):
            inside = ((path, *item) for path, module in list(torch.nn.Module.named_modules(root)) for item in list(vars(module).items()))
            held += [(".".join(filter(None, (name, path, key))), value) for path, key, value in inside if not key.startswith("_")]
    for name, value in held:
        if _has_graph(value):
            return name, f"write `{name} = {name}.detach()`"
        if isinstance(value, (tuple, list)) and any(map(_has_graph, value)):
            return name, f"write `{name} = {type(value).__name__}(one.detach() for one in {name})`"
    return "", "detach what one step passes to the next, as in `h = h.detach()`,"


def _carried(frame: FrameType) -> Iterator[str]:
    """Names to which the loop gives a value made from the same name, and no other: ``h = cell(x, h)``, ``total += loss``."""
    loops = loops_around(function_node(frame.f_code), line_of(frame))
    carried: dict[str, bool] = {}
    for statement in nodes((ast.Assign, ast.AugAssign), *loops[:1]):
        used = names_in(statement.value)
        is_cut = any(node.attr in _BREAKS for node in nodes(ast.Attribute, statement.value))
        for name in names_in(*targets_of(statement)):
            goes_on = isinstance(statement, ast.AugAssign) or (name in used and not is_cut)
            carried[name] = carried.get(name, True) and goes_on
    return (name for name in sorted(carried) if carried[name])


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _values(users: Sequence[FrameType]) -> int:
    """Another one whenever a name of the user's stands for another object than before."""
    spaces = [(names_of(frame), frame.f_code) for frame in users]
    held = [[names.get(name) for name in code.co_names] if is_module_code(code) else [*names.values()] for names, code in spaces]
    return hash(tuple(id(value) for values in held for value in values))


@dataclass
class Progress:
    """What is known of the main thread from looks that cost some tens of microseconds."""

    steps: int = 0
    """Of optimizers: counted by a hook."""
    written: int = 0
    """Characters of output."""
    last_s: float = field(default_factory=time.monotonic)
    """When there was progress last."""
    rested_s: float = field(default_factory=time.monotonic)
    """Since when the innermost frame stands at the same instruction."""
    new_line_s: float = field(default_factory=time.monotonic)
    """When the user's code was last at a line at which it had not been, or an optimizer stepped, or something was written."""
    starved_s: float = 0.0
    """The part of the time since then in which the main thread, or a process of the cell, had no core."""
    longest_s: float = 0.0
    is_idle: bool = False
    """Whether the main thread runs no code of the user's."""
    looks_at: Counter[str] = field(default_factory=Counter)
    """How many looks found the main thread in a DataLoader, and so on."""
    doing: Counter[str] = field(default_factory=Counter)
    """The same since the last progress."""
    tracer: tuple[str, str, str] | None = None
    """What traces the main thread: its name, its usual price, and how to be without."""
    passes: BackwardPasses = field(default_factory=BackwardPasses)
    rounds: Rounds = field(default_factory=Rounds)
    _paces: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_OVER))
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _latest: tuple[int, int, tuple[tuple[int, int], ...]] = (0, 0, ())
    _values: int = 0
    _at: tuple[int, int] = (0, 0)

    @property
    def still_s(self) -> float:
        """How long there was no progress, until now."""
        return 0.0 if self.is_idle else time.monotonic() - self.last_s

    @property
    def rate(self) -> float | None:
        """Optimizer steps per second over the latest looks; None where none was seen."""
        (first_s, first), (last_s, last) = (self._paces[0], self._paces[-1]) if self._paces else ((0.0, 0), (0.0, 0))
        return (last - first) / (last_s - first_s) if last > first else None

    def step(self, *_: Any) -> None:
        """Called after each step of an optimizer."""
        self.steps += 1

    def look(self) -> FrameType | None:
        """Note where the main thread stands; the innermost frame of the user's."""
        now_s = time.monotonic()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return None
        at = (id(frame.f_code), frame.f_lasti)
        if at != self._at:
            self._at, self.rested_s = at, now_s
        users = [frame for frame in (*cell_frames(frame), *frames_above(frame)) if is_user_code(frame.f_code)][:_MOST_FRAMES]
        self._count(frame)
        was_idle, self.is_idle = self.is_idle, not users
        if self.is_idle or was_idle:
            self.rounds = Rounds()
            self.went_on(now_s)
            return users[0] if users else None
        places = tuple((id(user.f_code), user.f_lasti) for user in users)
        latest = (self.steps, self.written, places)
        lines = {(id(user.f_code), -line_of(user)) for user in users}
        is_new = latest[:2] != self._latest[:2] or not self._seen.issuperset(lines)
        before, self._values = self._values, _values(users)
        if is_new or not self._seen.issuperset(places) or self._values != before:
            self.went_on(now_s, is_new=is_new)
        self.rounds.look(users, now_s, is_news=latest[:2] != self._latest[:2])
        self._seen.update(places, lines)
        self._latest = latest
        self.passed(now_s - self.last_s - self.starved_s)
        self._paces.append((now_s, self.steps))
        return users[0]

    def passed(self, seconds_s: float) -> None:
        """So long, no progress was seen."""
        self.longest_s = max(self.longest_s, seconds_s)

    def went_on(self, now_s: float, *, is_new: bool = True) -> None:
        """There was progress, `is_new` at a line that was not seen before: here, or in all processes that the main thread waits for."""
        if now_s <= self.last_s:
            return
        self.passed(0.0 if self.is_idle else now_s - self.last_s - self.starved_s)
        self.last_s, self.starved_s = now_s, 0.0
        self.doing.clear()
        if is_new:
            self.new_line_s = now_s
            if len(self._seen) > _MOST_POSITIONS:
                self._seen.clear()

    def _count(self, frame: FrameType) -> None:
        label, backward = "python", None
        for depth, one in enumerate(frames_above(frame)):
            if is_user_code(one.f_code) or depth > _MOST_FRAMES:
                break
            module = one.f_globals.get("__name__") or ""
            if module == _LOADER:
                label = "batch"
            elif f"{module}.".startswith(COMPILERS):
                label = "compiling"
            elif one.f_code.co_name == _BACKWARD:
                backward = one
        self.looks_at[label] += 1
        self.doing[label] += 1
        self.passes.look(backward, time.monotonic())


def installed_tracer(frame: FrameType | None) -> tuple[str, str, str] | None:
    """(what, its usual price, how to be without) for the thread that a frame belongs to; None where nothing is on."""
    for one in frames_above(frame):
        if one.f_trace is not None and owner(one.f_code.co_filename) in {"user", "torch", "library"}:
            name = getattr(one.f_trace, "__qualname__", type(one.f_trace).__name__)
            return f"a trace function (`sys.settrace`: {name})", "each Python line takes 2x to 20x as long", "call `sys.settrace(None)`"
    if torch.is_anomaly_enabled():
        repair = "call `torch.autograd.set_detect_anomaly(False)`; `%%nanhunt` finds NaN without it"
        return "anomaly mode", "a training step takes 2x to 3x as long", repair
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return "PyTorch's profiler", "small ops take 2x to 5x as long", "profile a few steps only, with `schedule=`"
    return None


class OutputMeter:
    """Stands before the `write` of both streams between `attach` and the end of the stack."""

    def __init__(self) -> None:
        self.written = 0
        """Characters."""
        self.tail = ""
        """The last of them."""
        self._counts: list[tuple[Any, _Counting]] = []

    def attach(self, stack: ExitStack) -> None:
        """From now on; a stream that does not allow it is not counted."""
        stack.callback(self.detach)
        for stream in (sys.stdout,) if sys.stdout is sys.stderr else (sys.stdout, sys.stderr):
            held = getattr(stream, "__dict__", None)
            if isinstance(held, dict):
                counting = _Counting(self, stream.write, held.get("write"))
                self._counts.append((stream, counting))
                held["write"] = counting

    def detach(self) -> None:
        """Take them away again, also from below those that came later. Harmless the second time."""
        for stream, counting in self._counts:
            counting.is_open = False
            top = stream.__dict__.pop("write", None)
            while isinstance(top, _Counting) and not top.is_open:
                top = top.before
            if top is not None:
                stream.__dict__["write"] = top
        self._counts.clear()


@dataclass(eq=False)
class _Counting:
    """A `write` that counts; once closed, it only hands on."""

    meter: OutputMeter
    write: Callable[..., Any]
    before: Any
    """What stood in the stream's own dict, or None."""
    is_open: bool = True

    def __call__(self, *texts: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        if self.is_open and texts and isinstance(texts[0], str):
            meter = self.meter
            meter.written += len(texts[0])
            meter.tail = (meter.tail + texts[0][-_TAIL:])[-_TAIL:]
        return self.write(*texts, **named)
