"""``%%shapes``: the modules that a cell calls, followed while they run on real tensors.

The first call of each model, and of each new shape of its input, is followed op by op; the others are only counted, so that a training
loop runs at its speed. So are the cell's own ops from there until the loop turns, in which what the models gave may broadcast by accident:
a loss before the backward pass, a metric after the step.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from types import CodeType, TracebackType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.fx import GraphModule

from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.shapes.follow.module_calls import Calls, shapes
from torchdebug_magics.instruments.shapes.follow.origins import Origins
from torchdebug_magics.instruments.shapes.follow.parameters import Parameters
from torchdebug_magics.instruments.shapes.follow.saved import Saved
from torchdebug_magics.instruments.shapes.forward_table import counted, of_cell
from torchdebug_magics.instruments.shapes.outline import layout
from torchdebug_magics.instruments.shapes.postmortem import after_error
from torchdebug_magics.instruments.shapes.report import ShapesReport
from torchdebug_magics.probing.compiler import CompiledCalls
from torchdebug_magics.probing.dispatch import enter, is_free, take_function_mode_off
from torchdebug_magics.probing.dry_runs.arithmetic import Arithmetic
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import is_compiled, unwrapped
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import frames_above, user_frame

_COMPILERS = ("/torch/_dynamo/", "/torch/_functorch/", "/torch/_inductor/")
"""Whose graphs of a model are called as modules, too."""
_VARIANTS = 4
"""Shapes of the input under which one model is followed; further ones are counted."""


class ShapesProbe:
    """See `shapes`."""

    def __init__(self, context: CellContext = SCRIPT, **options: Any) -> None:
        self._last_error = context.last_error_line
        self._layout = layout(**options)
        self._guard = Guard()
        self._hooks = Hooks(self._guard)
        self._thread = threading.get_ident()
        self._parameters = Parameters()
        self._calls = Calls(None, self._parameters)
        self._formulas = FlopFormulas()
        self._saved = Saved(self._calls, self._hooks, self._guard)
        self._seen: dict[int, dict[Any, int]] = {}
        self._parts: dict[int, torch.nn.Module] = {}
        self._flops = 0
        self._has_shared_flops = False
        self._inner: set[int] = set()
        """Ids of the parts of models that are known: their calls are nothing new, and are passed by first of all."""
        self._running: ExitStack | None = None
        self._ends = ExitStack()
        """The hook on the ends of calls. It stays until the next call begins: torch may be going through its hooks when one ends."""
        self._depth = 0
        self._lines: set[tuple[CodeType, int] | None] = set()
        """Lines of the user's that have called a model while functions were followed."""
        self._rests = False
        """Whether functions are followed again when the update has ended."""
        self._arithmetic: Arithmetic | None = None
        self._failed: ShapesReport | None = None
        self._origins = Origins(self._calls, guard=self._guard)
        self._compiled = CompiledCalls(
            self._hooks, self._guard, tuple, self._is_ours, lambda _: self._unwatch(), lambda _: None, traced=self._unwatch
        )

    def attach(self, stack: ExitStack) -> None:
        """Follow every module call."""
        stack.push(self._ended)
        stack.callback(self._close)
        stack.callback(self._unwatch)
        stack.callback(self._ends.close)
        inner = self._inner

        def starting(module: torch.nn.Module, args: Any) -> None:
            if not is_compiling() and (self._running is not None or id(module) not in inner):  # what is compiled is one piece
                self._enter(module, args)

        self._hooks.call_starts(stack, starting)
        self._hooks.autograd_calls(stack, "backward", self._around_backward)
        self._hooks.optimizer_steps(stack, self._before_step, self._after_step)
        self._compiled.attach(stack)

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._close()
        self._unwatch()
        self._hooks.sweep()

    def report(self) -> ShapesReport:
        """The rows so far, and why the cell failed where a shape was the reason."""
        failure = self._failed.failure if self._failed is not None else None
        counts = {self._parts[key]: sum(seen.values()) for key, seen in self._seen.items()}
        totals = counted(self._parameters, self._formulas, self._flops, self._saved.total_bytes, has_shared=self._has_shared_flops)
        report = replace(of_cell(self._calls.rows(), counts, self._guard), **totals, layout=self._layout, failure=failure)
        suspect = self._origins.suspects.first if failure is None else None
        self._seen, self._parts, self._calls, self._parameters = {}, {}, Calls(None, Parameters()), Parameters()  # no module is held on
        self._saved, self._origins = Saved(self._calls, self._hooks, self._guard), Origins(self._calls)
        self._arithmetic = self._failed = None
        return replace(report, suspect=suspect) if report.rows else replace(report, last_error=self._last_error)

    def live(self) -> None:
        """There is no live view."""

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if self._running is not None:
            self._depth += 1
            self._guard.run("following a call", self._calls.enter, module, args)
            return
        self._ends.close()
        if id(module) in self._seen and not self._is_turned():
            self._watch_on()
        elif id(module) in self._seen or self._origins.is_done:
            self._unwatch()
        if unwrapped(module) is not module:
            self._unwatch()
            self._pass_by(module)
        elif self._is_new(module, args):
            if any(unwrapped(part) is not part or is_compiled(part) for part in module.modules()):
                self._unwatch()
                self._pass_by(module)
            elif not _is_compilers(module):
                self._is_turned()
                self._begin(module, args)

    def _is_turned(self) -> bool:
        """Whether a line calls once more, as in a loop that has turned; else the ops behind this call are looked at, too."""
        frame = user_frame(sys._getframe(2))
        line = (frame.f_code, frame.f_lineno) if frame is not None else None
        if line in self._lines:
            return True
        self._lines.add(line)
        self._origins.refill()
        return False

    def _pass_by(self, module: torch.nn.Module) -> None:
        """What the compiler is to trace, nobody may look into meanwhile."""
        name = type(unwrapped(module)).__name__
        self._guard.note(f"{name} is compiled, or a part of it: its submodules are not seen here; use `%shapes model input`")

    def _is_new(self, module: torch.nn.Module, args: Any) -> bool:
        if not self._is_ours():
            return False
        seen = self._seen.get(id(module))
        if seen is None:
            return id(module) not in self._parts
        sizes = shapes(args)
        seen[sizes] = seen.get(sizes, 0) + 1
        return seen[sizes] == 1 and len(seen) <= _VARIANTS

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._seen:
            self._seen[id(module)] = {shapes(args): 1}
            self._parts.update({id(part): part for part in module.modules()})
            self._inner.update(id(part) for part in module.modules() if id(part) not in self._seen)
            self._inner -= self._seen.keys()
            self._parameters.learn(module)
            self._calls.name(module)
            self._saved.leave_out(module)
        self._running, self._depth = ExitStack(), 1
        self._hooks.call_ends(self._ends, self._leave)
        self._calls.enter(module, args)
        self._arithmetic = Arithmetic(self._calls, self._formulas, None)
        self._running.enter_context(self._saved.counting())
        enter(self._running, self._arithmetic)  # the probe of a session inside this one ends its own call after this one
        self._watch(self._running)

    def _watch(self, call: ExitStack) -> None:
        """Follow functions, to the end of the call at least; where a mode of others stands, no longer than that."""
        take_function_mode_off(self._origins)
        if not is_free():
            call.callback(take_function_mode_off, self._origins)
        self._origins.is_done = False
        self._origins.__enter__()

    def _watch_on(self) -> None:
        """Follow functions outside of calls, too; not where a mode of others stands, which would take ours off when it ends."""
        if self._is_ours():
            take_function_mode_off(self._origins)
            if is_free():
                self._origins.is_done = False
                self._origins.__enter__()

    def _unwatch(self) -> None:
        self._origins.is_done = True  # it may stand aside while a function of the user's runs in it, and is put back then
        if self._is_ours():
            take_function_mode_off(self._origins)

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._thread

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._running is None:
            return
        self._depth -= 1
        if not self._depth:
            self._close()
        self._guard.run("following a call", self._calls.leave, module, args, kwargs, output)

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        is_watched = self._is_ours() and take_function_mode_off(self._origins)
        result = original(*args, **kwargs)
        if is_watched:
            self._watch_on()
        return result

    def _before_step(self, *_: object) -> None:
        self._rests = self._is_ours() and take_function_mode_off(self._origins)

    def _after_step(self, *_: object) -> None:
        if self._rests:
            self._watch_on()
        self._rests = False

    def _close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._depth = 0
            running.close()
        if self._arithmetic is not None:
            self._flops += self._arithmetic.total
            self._has_shared_flops |= self._arithmetic.has_shards
            self._arithmetic = None

    def _ended(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._failed = self._guard.run("explaining the error", after_error, error, layout=self._layout)


watch = ShapesProbe


def _is_compilers(module: torch.nn.Module) -> bool:
    """Whether it is a graph that a compiler has made, and calls."""
    if not isinstance(module, GraphModule):
        return False
    callers = [frame.f_code.co_filename for frame in frames_above(sys._getframe())]  # no generator, which would hold this very frame
    return any(part in file for file in callers for part in _COMPILERS)
