"""The gradwatch probe: measures around each optimizer step, and reads the numbers of a step when the next one begins."""

from __future__ import annotations

import csv
import importlib.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import plural
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.gradwatch import by_hand
from torchdebug_magics.instruments.gradwatch.measuring import OptimizerWatch, gradient_of
from torchdebug_magics.instruments.gradwatch.record import MOST_OPTIMIZERS, GradientHistory, GradientStep, ModuleNumbers, RunRecord, Write
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradReport, verdict
from torchdebug_magics.instruments.gradwatch.training_faults import Judge
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.steps import EventWatch, parameters_of, unseen
from torchdebug_magics.probing.storages import can_be_measured, local_of, shards_note
from torchdebug_magics.probing.tensors import is_traced

_COLUMNS = ("step", "module", "grad_norm", "update_ratio", "zero_share", "loss")
_SOON_DEAD = 6
"""Steps with a gradient of zeros only, after which the graph of the loss is asked whether it depends on the module."""


class GradProbe:
    """See `gradwatch`."""

    def __init__(self, _: CellContext = SCRIPT, *, csv: str | None = None, tensorboard: str | None = None) -> None:
        self._guard = Guard()
        self._hooks = Hooks(self._guard)
        self._events = EventWatch(self._hooks, self._guard)
        self._files = _checked(csv, tensorboard)
        self._record = RunRecord(self._events.scheduled)
        self._judge = Judge(self._record)
        self._watches: dict[int, OptimizerWatch] = {}
        self._lock = threading.Lock()
        self._raised = ""
        self._findings: tuple[GradFinding, ...] = ()
        """Of the last look while it runs."""
        self._looked_s = 0.0

    def attach(self, stack: ExitStack) -> None:
        """Follow backward passes, clipping, batches and updates."""
        self._record.write = stack.enter_context(_writing(*self._files))
        stack.push(self._ended)
        self._events.attach(stack)
        before = self._events.guarded("the look before an update", self._step_begins)
        self._hooks.optimizer_steps(stack, before, self._events.guarded("the look after an update", self._step_ends))

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._hooks.sweep()

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}

    def live(self) -> GradReport:
        """For the live view, with the faults so far; any thread may ask."""
        with self._lock:
            return self._record.report(findings=self._findings, backward_count=self._events.backward_count)

    def report(self) -> GradReport:
        """Freeze what was measured, and judge it."""
        findings = self._guard.run("the search for faults", partial(self._judge.findings, at_end=not self._raised)) or ()
        doubts = () if findings else self._guard.run("the search for doubts", self._judge.doubts) or ()
        by_hand_fields = None if self._record.histories else self._guard.run("the look at a training by hand", self._by_hand)
        look = partial(self._judge.alternatives, findings, is_in_doubt=bool(findings or doubts or self._raised))
        alternatives = self._guard.run("the search for changes", look)
        judged = {
            "findings": findings,
            "doubts": doubts,
            "alternatives": alternatives or (),
            "backward_count": self._events.backward_count,
            "raised": self._raised,
        }
        report = self._record.report(**judged, problems=tuple(self._guard.problems))
        return verdict(report if by_hand_fields is None else replace(report, **by_hand_fields))

    def _by_hand(self) -> dict[str, Any] | None:
        """The fields of a report on a training without an optimizer; None of one that is well, or is none."""
        if len(self._events.values) < by_hand.FEW_PASSES or not (rates := by_hand.rates_by_hand()):
            return None
        losses = [float(value) for value in self._events.values]
        doubts, known = by_hand.doubts(losses), next(filter(None, rates), None)
        return {"losses": losses, "doubts": doubts, "alternatives": tuple(known.others()) if known else ()} if doubts else None

    def _ended(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._raised = "" if kind is None else kind.__name__
        for watch in self._watches.values():
            self._guard.run("reading the last step", self._read, watch)
        self._watches.clear()

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = parameters_of(optimizer)
        if any(is_traced(local_of(parameter)) for parameter in parameters[:1]):
            return
        with unseen():
            watch = self._watch_of(optimizer, parameters)
            if any(other.is_measuring and other is not watch and set(other.ids) & set(watch.ids) for other in self._watches.values()):
                return  # inside the step of an optimizer that wraps it
            self._guard.run("reading a step", self._read, watch)
            watch.history.has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
            watch.before(parameters)

    def _step_ends(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        watch = self._watches.get(id(optimizer))
        if watch is None or watch.optimizer() is not optimizer or not watch.is_measuring:
            return
        with unseen():
            watch.history.line = watch.history.line or self._events.lines.here(sys._getframe())
            step = GradientStep(self._events.take(), self._record.clock(optimizer, watch.ids))
            watch.after(parameters_of(optimizer), optimizer, step, self._record.owners.scale() if step.events.is_scaled else None)
        self._events.wants_leaves = any(series.zero_run >= _SOON_DEAD and series.is_used is None for series in watch.series)

    def _watch_of(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> OptimizerWatch:
        known = self._watches.get(id(optimizer))
        known = known if known is not None and known.optimizer() is optimizer else None
        devices = [parameter.device for parameter in parameters]
        if known is not None and known.ids == tuple(map(id, parameters)) and known.devices == devices:
            return known
        line, same = self._events.lines.here(sys._getframe()), None
        for key, other in list(self._watches.items()):
            is_alike = other.ids == tuple(map(id, parameters)) and not other.history.keeps_state
            is_alike = is_alike and (other.history.line, other.history.kind) == (line, type(optimizer).__name__)
            if key == id(optimizer) or other.optimizer() is None or is_alike:  # a closure keeps the last one alive
                self._read(other)
                del self._watches[key]
                same = other.history if is_alike else same  # made anew in each step, it goes on where the last one was
        with self._lock:
            histories = self._record.histories
            if known is None and same is None and len(histories) < MOST_OPTIMIZERS:
                histories.append(
                    GradientHistory(
                        self._record, variable_of(optimizer) or "optimizer", line, type(optimizer).__name__, weakref.ref(optimizer)
                    )
                )
            history = known.history if known is not None else same or histories[-1]
            watch = OptimizerWatch(optimizer, parameters, self._record.series_of(parameters, history), history)
        self._watches[id(optimizer)] = watch
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
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        msg = f"--csv {csv_file}: not a file in a folder that exists and can be written to"
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
            rows = csv.writer(stack.enter_context(path.open("w", newline="", encoding="utf-8")))
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


watch = GradProbe
