"""The gradwatch probe: measures around each optimizer step, and reads the numbers of a step when the next one begins."""

from __future__ import annotations

import csv
import importlib.util
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import plural
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.gradwatch.measuring import OptimizerWatch, gradient_of
from torchdebug_magics.instruments.gradwatch.record import ClipCall, MeasuredStep, ModuleNumbers, RunRecord, Write
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradReport, verdict
from torchdebug_magics.instruments.gradwatch.training_faults import Judge
from torchdebug_magics.probing.dispatch import is_being_compiled
from torchdebug_magics.probing.graphs import leaves_of
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.lines import Line, Lines
from torchdebug_magics.probing.steps import classes_of, factor_of, parameters_of
from torchdebug_magics.probing.storages import can_be_measured, is_shard, local_of, shards_note
from torchdebug_magics.probing.tensors import is_traced, tensors_in

_COLUMNS = ("step", "module", "grad_norm", "update_ratio", "zero_share", "loss")
_MOST_CLIPS = 8
_FIRST_LOOKS, _LOOK_EVERY = 4, 64
"""Backward passes whose loss is looked at for its number of classes: the first few, then one in so many."""
_SOON_DEAD = 6
"""Steps with a gradient of zeros only, after which the graph of the loss is asked whether it depends on the module."""


@contextmanager
def _ours() -> Iterator[None]:
    """Where operations are our own: no mode sees them, no graph grows, and no version counter is kept."""
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext(), torch.inference_mode():
        yield


class GradProbe:
    """See `gradwatch`."""

    def __init__(self, _: CellContext = SCRIPT, *, csv: str | None = None, tensorboard: str | None = None) -> None:
        self._guard = Guard()
        self._hooks = Hooks(self._guard)
        self._lines = Lines(Line)
        self._files = _checked(csv, tensorboard)
        self._record = RunRecord()
        self._judge = Judge(self._record)
        self._watches: dict[int, tuple[weakref.ref[torch.optim.Optimizer], OptimizerWatch]] = {}
        self._events = MeasuredStep()
        self._backward_count = 0
        self._is_scaled = False
        """Whether the last loss may be multiplied by a GradScaler."""
        self._wants_leaves = False
        self._batches = _Batches()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._raised = ""
        self._findings: tuple[GradFinding, ...] = ()
        """Of the last look while it runs."""
        self._looked_s = 0.0

    def attach(self, stack: ExitStack) -> None:
        """Follow backward passes, clipping, batches and updates."""
        self._thread = threading.get_ident()
        self._record.write = stack.enter_context(_writing(*self._files))
        stack.push(self._ended)
        self._hooks.autograd_calls(stack, "backward", self._looking("the look at a loss", self._look_at_loss))
        self._hooks.clipped_gradients(stack, self._looking("the look at clipping", self._look_at_clipping))
        self._hooks.grouped_gradients(stack, self._looking("the look at clipping", self._look_at_values))
        self._hooks.zeroed_gradients(stack, self._looking("the look at zero_grad()", self._zeroes))
        self._hooks.scheduled_values(stack, self._looking("the look at a scheduler", self._schedules))
        self._hooks.loader_batches(stack, self._around_batch)
        before = self._guarded("the look before an update", self._step_begins)
        self._hooks.optimizer_steps(stack, before, self._guarded("the look after an update", self._step_ends))

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._hooks.sweep()

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}

    def live(self) -> GradReport:
        """For the live view, with the faults so far; any thread may ask."""
        with self._lock:
            return self._record.report(findings=self._findings, backward_count=self._backward_count)

    def report(self) -> GradReport:
        """Freeze what was measured, and judge it."""
        findings = self._guard.run("the search for faults", self._judge.findings) or ()
        doubts = () if findings else self._guard.run("the search for doubts", self._judge.doubts) or ()
        judged = {"findings": findings, "doubts": doubts, "backward_count": self._backward_count, "raised": self._raised}
        return verdict(self._record.report(**judged, problems=tuple(self._guard.problems)))

    def _ended(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._raised = "" if kind is None else kind.__name__
        for _, watch in self._watches.values():
            self._guard.run("reading the last step", self._read, watch)
        self._watches.clear()

    def _is_ours(self) -> bool:
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # a CUDA graph: ours would become part of it
        return threading.get_ident() == self._thread and not captures and not is_being_compiled()

    def _guarded(self, what: str, look: Callable[..., None]) -> Callable[..., None]:
        """A look that is ours to take, and whose failure is a line of the report."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            if self._is_ours():
                self._guard.run(what, look, *args, **kwargs)

        return guarded

    def _looking(self, what: str, look: Callable[..., None]) -> Callable[..., Any]:
        """A function of PyTorch's whose arguments are looked at first."""
        guarded = self._guarded(what, look)

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            guarded(*args, **kwargs)
            return original(*args, **kwargs)

        return around

    def _look_at_loss(self, tensors: Any, *_: Any, **__: Any) -> None:
        losses, events = list(tensors_in(tensors)), self._events
        if len(losses) != 1 or losses[0].numel() != 1 or is_traced(losses[0]) or losses[0].is_meta:
            return
        with _ours():
            loss = losses[0]
            events.backward_line = self._lines.here(sys._getframe())
            if self._backward_count < _FIRST_LOOKS or self._backward_count % _LOOK_EVERY == 0:
                events.classes, events.factor = classes_of(loss) or events.classes, factor_of(loss)
            if self._wants_leaves:
                events.leaves, self._wants_leaves = frozenset(map(id, leaves_of([loss]))), False
            self._is_scaled = loss.grad_fn is not None and loss.grad_fn.name() == "MulBackward0"
            self._backward_count += 1
            value = local_of(loss).detach()
            events.total = value.clone() if events.total is None or events.total.device != value.device else events.total + value
            events.count += 1
            events.zeroed = None
            self._batches.used()

    def _clips(self) -> None:
        events = self._events
        events.has_clip = events.has_clip or events.count > 0
        events.early_clip = events.early_clip or (None if events.count else self._lines.here(sys._getframe()))

    def _look_at_values(self, *_: Any) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename != torch.nn.utils.clip_grad.__file__:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "clip_grad_value_":  # and not a norm that is only asked for
            self._clips()

    def _zeroes(self, *_: Any, **__: Any) -> None:
        self._events.zeroed = self._lines.here(sys._getframe())

    def _schedules(self, group: Any, key: str, value: Any) -> None:
        if key == "lr" and isinstance(value, (int, float)):
            self._record.scheduled[id(group)] = value, self._lines.here(sys._getframe())

    def _look_at_clipping(self, parameters: Any, max_norm: Any, total_norm: Any, *_: Any, **__: Any) -> None:
        if float(max_norm) < math.inf:  # else the norm is only asked for
            self._clips()
        is_known = isinstance(total_norm, torch.Tensor) and not is_traced(total_norm) and not is_shard(total_norm)
        if is_known and isinstance(parameters, (list, tuple)):
            call = ClipCall(frozenset(map(id, parameters)), total_norm.detach(), float(max_norm), self._lines.here(sys._getframe()))
            self._events.clips = [*self._events.clips[-_MOST_CLIPS:], call]

    def _around_batch(self, original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        batch = original(iterator, *args, **kwargs)
        if self._is_ours():
            self._guard.run("counting batches", self._batches.fetched, iterator)
        return batch

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = parameters_of(optimizer)
        if any(is_traced(local_of(parameter)) for parameter in parameters[:1]):
            return
        with _ours():
            watch = self._watch_of(optimizer, parameters)
            if any(other.is_measuring and other is not watch and set(other.ids) & set(watch.ids) for _, other in self._watches.values()):
                return  # inside the step of an optimizer that wraps it
            self._guard.run("reading a step", self._read, watch)
            watch.history.has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
            watch.before(parameters)

    def _step_ends(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        ref, watch = self._watches.get(id(optimizer), (None, None))
        if ref is None or watch is None or ref() is not optimizer or not watch.is_measuring:
            return
        events = self._events
        with _ours():
            watch.history.line = watch.history.line or self._lines.here(sys._getframe())
            events.batch, events.number = self._batches.taken(), self._record.clock(optimizer, watch.ids)
            watch.after(parameters_of(optimizer), optimizer, events, self._record.owners.scale() if self._is_scaled else None)
        self._events = MeasuredStep(events.backward_line, events.factor, events.classes)
        self._wants_leaves = any(series.zero_run >= _SOON_DEAD and series.is_used is None for series in watch.series)

    def _watch_of(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> OptimizerWatch:
        reference, watch = self._watches.get(id(optimizer), (None, None))
        is_same = reference is not None and reference() is optimizer
        if watch is not None and is_same and watch.fits(parameters):
            return watch
        for key, (other, earlier) in list(self._watches.items()):
            if key == id(optimizer) or other() is None:
                self._read(earlier)
                del self._watches[key]
        with self._lock:
            line = self._lines.here(sys._getframe())
            history = watch.history if watch is not None and is_same else self._record.history_of(optimizer, line)
            watch = OptimizerWatch(parameters, self._record.series_of(parameters, history), history)
        self._watches[id(optimizer)] = weakref.ref(optimizer), watch
        if unmeasured := len(parameters) - sum(map(can_be_measured, parameters)):
            self._guard.note(f"{unmeasured} of {len(parameters)} parameters are not measured: empty, on meta or no plain tensors")
        if note := shards_note(parameters, "norms, ratios and zeros are"):
            self._guard.note(note)
        if apart := sum(parameter.grad is not None and gradient_of(parameter) is None for parameter in parameters):
            self._guard.note(f"{plural(apart, 'gradient')} not measured: laid out over the ranks otherwise than their parameters")
        return watch

    def _read(self, watch: OptimizerWatch) -> None:
        """The numbers of the last step, which the device has sent by now."""
        step = watch.read()
        if step is None:
            return
        with self._lock:
            count = watch.history.steps_count
            largest = self._record.add(watch.history, step)
            if watch.history.steps_count > count:
                self._judge.look(watch.history, largest)
        now_s = time.monotonic()
        if now_s - self._looked_s > 1:
            self._looked_s = now_s
            self._findings = self._judge.findings()


def _checked(csv_file: str | None, folder: str | None) -> tuple[Path | None, str | None]:
    """Where steps are written to, if anywhere. Raises TorchDebugError where that is not possible, before anything runs."""
    path = None if csv_file is None else Path(csv_file).expanduser()
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        msg = f"--csv {csv_file}: not a file in a folder that exists"
        raise TorchDebugError(msg)
    if folder is not None and importlib.util.find_spec("tensorboard") is None:
        msg = "--tensorboard needs TensorBoard, which is not installed: `%pip install tensorboard`, or use --csv FILE"
        raise TorchDebugError(msg)
    return path, folder


@contextmanager
def _writing(path: Path | None, folder: str | None) -> Iterator[Write | None]:
    """What writes one step of one optimizer; None where nothing is written, as then modules need no names."""
    with ExitStack() as stack:
        rows: Any = None
        scalars: Any = None
        if path is not None:
            try:
                rows = csv.writer(stack.enter_context(path.open("w", newline="", encoding="utf-8")))
            except OSError as error:
                msg = f"--csv {path}: {error.strerror or error}"
                raise TorchDebugError(msg) from None
            rows.writerow(_COLUMNS)
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - late, and only where it is installed

            scalars = stack.enter_context(SummaryWriter(folder))

        def write(step: int, modules: Iterable[tuple[str, ModuleNumbers]], loss: float, optimizer: str) -> None:
            for name, numbers in modules:
                if rows is not None:
                    rows.writerow((step, name, *(f"{value:.6g}" for value in (*numbers[:3], loss))))
                for what, value in zip(_COLUMNS[2:5], numbers[:3], strict=True) if scalars is not None else ():
                    scalars.add_scalar(f"{what}/{name or 'model'}", value, step)
            if scalars is not None:
                scalars.add_scalar(f"loss/{optimizer}", loss, step)

        yield None if rows is None and scalars is None else write


class _Batches:
    """Counts the batches of DataLoaders, by the id of what draws their indices."""

    def __init__(self) -> None:
        self._iterator: weakref.ref[Any] | None = None
        self._epochs: dict[int, int] = {}
        self._epoch = self._fetched = 0
        self._is_new = False
        """Whether a batch was fetched since the last step."""
        self._ahead: int | None = None
        """Batches that were fetched before the first loss of the epoch."""

    def fetched(self, iterator: object) -> None:
        """A DataLoader gave its next batch."""
        if self._iterator is None or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            key = id(getattr(iterator, "_index_sampler", None))
            self._epoch = self._epochs[key] = self._epochs.get(key, -1) + 1
            self._fetched, self._ahead = 0, None
        self._fetched += 1
        self._is_new = True

    def used(self) -> None:
        """A loss was computed."""
        if self._ahead is None:
            self._ahead = max(0, self._fetched - 1)

    def taken(self) -> tuple[int, int] | None:
        """At a step: (epoch, batch) that the last loss was computed from."""
        is_new, self._is_new = self._is_new, False
        return (self._epoch, max(0, self._fetched - 1 - (self._ahead or 0))) if is_new else None


watch = GradProbe
