"""The memtrace probe: what it is made of, and when each part begins and ends."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.memtrace.conclude import Seen, concluded
from torchdebug_magics.instruments.memtrace.growth.course import Course
from torchdebug_magics.instruments.memtrace.growth.growth_watch import GrowthWatch
from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
from torchdebug_magics.instruments.memtrace.growth.worst import Run
from torchdebug_magics.instruments.memtrace.held.reference_cycles import CycleWatch
from torchdebug_magics.instruments.memtrace.held.still_held import Deletions, HandledErrors
from torchdebug_magics.instruments.memtrace.ledger.blocks import Ledger
from torchdebug_magics.instruments.memtrace.ledger.memory_census import Census, mark_gradients, mark_state
from torchdebug_magics.instruments.memtrace.ledger.memory_snapshot import Snapshot
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import Tracer
from torchdebug_magics.instruments.memtrace.ledger.phases import Phases, Place, Places
from torchdebug_magics.instruments.memtrace.ledger.process_memory import Devices, MarkListener, ProcessMemory, given_out_bytes
from torchdebug_magics.instruments.memtrace.report import LiveMemory, MemtraceReport
from torchdebug_magics.machine.limits import Limits
from torchdebug_magics.machine.memory_guard import MemoryGuard, guard_ratio
from torchdebug_magics.probing.compiled_calls import CompiledCalls
from torchdebug_magics.probing.dispatch import is_being_compiled
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import ModuleCalls, OutermostCalls, live_modules, parts_of
from torchdebug_magics.probing.safety import Guard, traceback_of
from torchdebug_magics.probing.storages import shards_note

_CREATES_GRAPH = 3
"""Which argument of `torch.autograd.backward` it is."""
_SETTLED = 3
"""Steps after which only those modules stay watched that were called by themselves."""


class MemtraceProbe:
    """See `memtrace`."""

    def __init__(
        self,
        context: CellContext = SCRIPT,
        *,
        light: bool = False,
        every_step: bool = False,
        guard: str | float | None = None,
        snapshot: str | Path | None = None,
        compare: bool = False,
    ) -> None:
        if compare:
            msg = "--compare watches no cell: write `%memtrace --compare a b` on a line of its own, for two reports kept with -o"
            raise TorchDebugError(msg)
        self._memory_guard = None if guard is None else MemoryGuard(guard_ratio(guard), Limits())
        if self._memory_guard is not None:
            self._memory_guard.refuse_if_passed()
        self._is_light = light
        runs = context.earlier_runs()
        self._runs: deque[Run] = deque() if runs is None else runs
        self._guard = Guard()
        self._snapshot = None if snapshot is None else Snapshot(snapshot, self._guard)
        self._hooks = Hooks()
        self._process = ProcessMemory(self._guard)
        self._phases = Phases()
        self._ledger = Ledger(self._phases.now)
        self._places = Places(Place)
        self._devices = Devices(self._process)
        self._marks = MarkListener(self._ledger)
        self._steps = Steps(given_out_bytes, every=every_step)
        self._cycles = CycleWatch(self._ledger)
        self._handled = HandledErrors(self._ledger)
        self._watch = GrowthWatch(self._ledger, self._steps, self._places, self._cycles)
        tracer = self._tracer_of(())
        self._course = Course(tracer, self._phases, self._places, self._steps, self._watch, self._guard, is_light=light)
        self._calls = WatchedCalls(self._hooks, self._guard, self._course, self._ledger, self._steps, self._handled)
        self._deletions = Deletions(None)
        self._report: MemtraceReport | None = None

    def _tracer_of(self, models: Iterable[torch.nn.Module]) -> Tracer:
        return Tracer(self._ledger, self._places, ModuleCalls(models, self._hooks), self._guard, self._risen)

    def _risen(self) -> None:
        self._guard.run("the look for cycles", self._watch.look_for_cycles)

    def attach(self, stack: ExitStack) -> None:
        """Take the census, and follow what comes."""
        gc.collect()
        census = Census()
        parts = parts_of(census.modules)
        self._course.tracer = self._tracer_of([one for one in census.modules if id(one) not in parts])
        self._course.tracer.adopt_all(census)
        self._deletions = Deletions(self._places.user_frame(sys._getframe()))
        self._ledger.begin()
        self._cycles.begins()
        if self._snapshot is not None:
            self._snapshot.attach(stack)
        stack.push(self._ended)
        self._process.attach(stack)
        self._devices.start()
        self._marks.attach(stack)
        self._calls.attach(stack, census.modules)
        stack.callback(self._course.tracer.off)
        self._course.resume()
        if self._memory_guard is not None:
            stack.enter_context(self._memory_guard.watching())

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._course.tracer.off()
        self._process.stop()
        self._marks.stop()
        if self._snapshot is not None:
            self._snapshot.stop()
        self._hooks.sweep(self._calls.modules())

    def report(self) -> MemtraceReport:
        """What was found."""
        if self._report is None:
            self._report = self._guard.run("the report on what was seen", self._concluded, None)
        if self._report is None:
            raise AssertionError(self._guard.problems)
        return self._report

    def live(self) -> LiveMemory | None:
        """The gauges and the ledger now; any thread may ask."""
        gauges = self._process.gauges()
        total = self._ledger.total
        return None if gauges is None else LiveMemory(total.now_bytes, total.peak_bytes, self._phases.now.phase, self._steps.count, gauges)

    def standing(self) -> str:
        """Nothing: progress is not watched here. The kernel's position is recorded, as one that takes too much memory is killed."""
        return ""

    def traceback_of(self, error: BaseException) -> list[str]:
        """Of the guard's interrupt."""
        return traceback_of(error, "" if self._memory_guard is None else self._memory_guard.reason)

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}

    def _ended(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._report = self._guard.run("the end of the trace", self._concluded, error)
        self._ledger.close()

    def _concluded(self, error: BaseException | None) -> MemtraceReport:
        self._course.end()
        self._watch.ends()
        if note := shards_note((one for module in live_modules() for one in module._parameters.values() if one is not None), "sizes are"):
            self._guard.note(note)
        seen = Seen(
            ledger=self._ledger,
            tracer=self._course.tracer,
            phases=self._phases,
            steps=self._steps,
            watch=self._watch,
            process=self._process,
            devices=self._devices,
            marks=self._marks,
            snapshot=self._snapshot,
            cycles=self._cycles,
            handled=self._handled,
            deletions=self._deletions,
            runs=self._runs,
            interrupts=() if self._memory_guard is None else self._memory_guard.interrupts,
            guard=self._guard,
            is_light=self._is_light,
        )
        return concluded(seen, error)


watch = MemtraceProbe


class WatchedCalls:
    """The phases of a cell begin and end with them."""

    def __init__(
        self,
        hooks: Hooks,
        guard: Guard,
        course: Course,
        ledger: Ledger,
        steps: Steps,
        handled: HandledErrors,
    ) -> None:
        self._hooks = hooks
        self._guard = guard
        self._course = course
        self._ledger = ledger
        self._steps = steps
        self._handled = handled
        self._outermost = OutermostCalls(hooks, guard, self._entered, self._left)
        self._compiled = CompiledCalls(
            hooks, guard, self._outermost.modules, self._outermost.is_ours, self._compiled_begins, self._compiled_ended
        )
        self.modules = self._outermost.modules

    def attach(self, stack: ExitStack, modules: Sequence[torch.nn.Module]) -> None:
        """Follow the calls of these, and of those that are made from here on."""
        self._outermost.attach(stack, modules)
        self._compiled.attach(stack)
        self._hooks.autograd_calls(stack, "backward", self._around_backward)
        self._hooks.autograd_calls(stack, "grad", self._around_grad)
        self._hooks.optimizer_steps(stack, self._before_update, self._after_update)

    def _entered(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._guard.run("the look at a model call", self._call_begins, module, args, kwargs)

    def _left(self, _module: torch.nn.Module, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._guard.run("the look at a model's return", self._call_ends, output)

    def _call_ends(self, output: object) -> None:
        if self._course.is_followed:
            self._course.tracer.returned(output)
        self._course.stop()

    def _call_begins(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint, in the middle of a backward pass
        self._handled.look()
        if self._course.is_between:
            self._course.step_of(module, args, kwargs)
            self._settle()
        self._course.start("forward")
        self._ledger.span.model = id(module)

    def _compiled_begins(self, function: int) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._course.is_between:
            self._course.step_of_call(function)
            self._settle()
        self._course.start("forward")

    def _compiled_ended(self, result: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._course.is_followed:
            self._guard.run("the look at what compiled code has made", self._course.tracer.took, result)
        self._course.stop()

    def _settle(self) -> None:
        if self._steps.count == _SETTLED:
            self._outermost.settle()

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        creates_graph = kwargs.get("create_graph") or args[_CREATES_GRAPH : _CREATES_GRAPH + 1] == (True,)
        return self._around(original, *args, **kwargs, _leaves=True, _leaves_graph=bool(creates_graph))

    def _around_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._around(original, *args, **kwargs, _leaves=False, _leaves_graph=False)

    def _around(self, original: Any, *args: Any, _leaves: bool, _leaves_graph: bool, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch._C._current_graph_task_id() != -1 or is_being_compiled() or not self._outermost.is_ours():
            return original(*args, **kwargs)
        self._guard.run("the look before a backward pass", self._course.backward_begins, leaves=_leaves, leaves_graph=_leaves_graph)
        try:
            return original(*args, **kwargs)
        finally:
            self._guard.run("the look after a backward pass", self._course.stop)

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._outermost.is_ours():
            return
        self._guard.run("the look for a step", self._course.step_without_model)
        if self._course.is_followed:
            self._guard.run("the look at gradients", mark_gradients, self._ledger, _parameters(optimizer))
        self._guard.run("the look before an update", self._course.start, "optimizer")

    def _after_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._outermost.is_ours():
            return
        if self._course.is_followed:
            self._guard.run("the look at an optimizer's state", mark_state, self._ledger, optimizer)
        self._guard.run("the look after an update", self._course.stop)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
