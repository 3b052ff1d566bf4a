"""The gradwatch probe: measures around each optimizer step, and reads the numbers of a step when the next one begins."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.format import plural
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.gradwatch.grad_findings import doubts_in, found_in, has_warning
from torchdebug_magics.instruments.gradwatch.loss_watch import LossWatch
from torchdebug_magics.instruments.gradwatch.optimizer_watch import OptimizerWatch, gradient_of
from torchdebug_magics.instruments.gradwatch.report import GradReport, LiveGrad, verdict
from torchdebug_magics.instruments.gradwatch.run_record import RunRecord
from torchdebug_magics.instruments.gradwatch.step_history import StepLog
from torchdebug_magics.probing.dispatch import is_being_compiled
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.lines import Line, Lines
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.storages import is_shard, local_of, shards_note
from torchdebug_magics.probing.tensors import is_traced, tensors_in


@contextmanager
def _ours() -> Iterator[None]:
    """Where operations are our own: no mode sees them, no graph grows, and no version counter is kept."""
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext(), torch.inference_mode():
        yield


class GradProbe:
    """See `gradwatch`."""

    def __init__(self, _: CellContext = SCRIPT, *, csv: str | None = None, tensorboard: str | None = None) -> None:
        self._guard = Guard()
        self._hooks = Hooks()
        self._lines = Lines(Line)
        self._log = StepLog(csv, tensorboard)
        self._losses = LossWatch(self._lines)
        self._record = RunRecord(self._log)
        self._watches: dict[int, tuple[weakref.ref[torch.optim.Optimizer], OptimizerWatch]] = {}
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._raised = ""
        self._warning = ""
        self._looked_s = 0.0

    def attach(self, stack: ExitStack) -> None:
        """Follow backward passes, clipping, batches and updates."""
        self._thread = threading.get_ident()
        self._log.attach(stack)
        stack.push(self._ended)
        self._hooks.autograd_calls(stack, "backward", self._around_backward)
        self._hooks.clipped_gradients(stack, self._around_clipping)
        self._hooks.loader_batches(stack, self._around_batch)
        self._hooks.optimizer_steps(stack, self._before_step, self._after_step)

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._hooks.sweep()

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}

    def live(self) -> LiveGrad:
        """For the live view; any thread may ask."""
        with self._lock:
            return self._record.live(self._losses.backward_count, self._warning)

    def report(self) -> GradReport:
        """Freeze what was measured, and judge it."""
        findings = self._guard.run("the search for faults", found_in, self._record) or ()
        doubts = () if findings else self._guard.run("the search for doubts", doubts_in, self._record) or ()
        return verdict(self._record.report(findings, doubts, self._losses.backward_count, self._raised, self._guard.problems))

    def _ended(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._raised = "" if kind is None else kind.__name__
        for _, watch in self._watches.values():
            self._guard.run("reading the last step", self._read, watch)
        self._watches.clear()

    def _is_ours(self) -> bool:
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # a CUDA graph: ours would become part of it
        return threading.get_ident() == self._thread and not captures and not is_being_compiled()

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if self._is_ours():
            self._guard.run("the look at a loss", self._look_at_loss, args[0] if args else kwargs.get("tensors"))
        return original(*args, **kwargs)

    def _look_at_loss(self, given: Any) -> None:
        tensors = [given] if isinstance(given, torch.Tensor) else list(tensors_in(given))
        if len(tensors) == 1 and tensors[0].numel() == 1 and not is_traced(tensors[0]) and not tensors[0].is_meta:
            with _ours():
                self._losses.backward(tensors[0])

    def _around_clipping(self, original: Any, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        is_known = isinstance(total_norm, torch.Tensor) and not is_traced(total_norm) and not is_shard(total_norm)
        if self._is_ours() and is_known and isinstance(parameters, (list, tuple)):
            self._guard.run("the look at clipping", self._losses.clipped, list(parameters), float(max_norm), total_norm)
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    def _around_batch(self, original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        batch = original(iterator, *args, **kwargs)
        if self._is_ours():
            self._guard.run("counting batches", self._losses.fetched, iterator)
        return batch

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours():
            has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
            self._guard.run("the look before an update", self._step_begins, optimizer, has_closure=has_closure)

    def _step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if any(is_traced(local_of(one)) for one in parameters[:1]):
            return
        with _ours():
            watch = self._watch_of(optimizer, parameters)
            if any(other.is_measuring and other is not watch and set(other.ids) & set(watch.ids) for _, other in self._watches.values()):
                return  # inside the step of an optimizer that wraps it
            self._guard.run("reading a step", self._read, watch)
            watch.history.has_closure = has_closure
            watch.before(parameters)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours():
            self._guard.run("the look after an update", self._step_ends, optimizer)

    def _step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        ref, watch = self._watches.get(id(optimizer), (None, None))
        if ref is None or watch is None or ref() is not optimizer or not watch.is_measuring:
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        with _ours():
            watch.history.line = watch.history.line or self._lines.here(sys._getframe())
            watch.history.backward_line = self._losses.line or watch.history.backward_line
            watch.history.classes = self._losses.classes
            scale = self._record.owners.scale() if self._losses.is_scaled else None
            watch.after(parameters, optimizer, self._losses, self._record.clock(optimizer, watch.ids), scale)
        self._losses.taken()
        self._losses.wants_leaves = any(one.zero_run >= 6 and one.is_used is None for one in watch.series)  # noqa: PLR2004 - soon dead

    def _watch_of(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> OptimizerWatch:
        ref, watch = self._watches.get(id(optimizer), (None, None))
        if ref is not None and watch is not None and ref() is optimizer and watch.fits(parameters):
            return watch
        if watch is not None:
            self._read(watch)
        is_same = ref is not None and watch is not None and ref() is optimizer
        for key, (other_ref, other) in list(self._watches.items()):
            if other_ref() is None:
                self._read(other)
                del self._watches[key]
        line = self._lines.here(sys._getframe())
        with self._lock:
            history = watch.history if is_same and watch is not None else self._record.history_of(optimizer, line)
            series = self._record.series_of(parameters, history)
        made = OptimizerWatch(parameters, series, history)
        self._watches[id(optimizer)] = weakref.ref(optimizer), made
        if unmeasured := len(parameters) - made.measured_count:
            self._guard.note(f"{unmeasured} of {len(parameters)} parameters are not measured: empty, on meta or no plain tensors")
        if note := shards_note(parameters, "norms, ratios and zeros are"):
            self._guard.note(note)
        if apart := sum(one.grad is not None and gradient_of(one) is None for one in parameters):
            self._guard.note(f"{plural(apart, 'gradient')} not measured: laid out over the ranks otherwise than their parameters")
        return made

    def _read(self, watch: OptimizerWatch) -> None:
        """The numbers of the last step, which the device has sent by now."""
        pending, watch.pending = watch.pending, None
        if pending is None or not pending.measured:
            return
        with self._lock:
            self._record.add(watch, pending)
        now_s = time.monotonic()
        if now_s - self._looked_s > 1:
            self._looked_s = now_s
            self._warning = has_warning(self._record)


watch = GradProbe
