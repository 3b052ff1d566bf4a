"""What is kept of a training: of each module bins of bounded number and the last steps, of each optimizer how its steps went."""

from __future__ import annotations

import math
import statistics
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from torchdebug_magics.instruments.gradwatch.report import GradReport, ModuleRow
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.steps import ClipCall, Link, Owner, Owners, StepEvents
from torchdebug_magics.probing.storages import can_be_measured, is_shard, local_of

BINS = 256
FEW_UPDATES = 3
FAST, FIRST_STEPS = 0.1, 2
"""An update of more than this share of the weights is too large, but in the first steps."""
_RECENT = 64
STILL = 1e-6
"""Ratio of update to weights below which nothing is learned."""
_FADED_RATE = 1e-2
"""Of its largest, below which a learning rate may be next to nothing."""
_SCALED_CLIP = 0.5
"""Of the norm that clipping leaves: where the step finds less, the gradients were divided by the scaler's factor after it."""
_MOST_MODULES, _OTHERS = 4096, (-1, "all other modules")
_BINNED = ("norms", "ratios", "zeros")
MOST_OPTIMIZERS = 64
"""Further ones, as when each step makes its own, continue the history of the last."""


class Bins:
    """Values by step, of which each bin keeps one; NaN is kept wherever it occurs."""

    def __init__(self, keep: Callable[[float, float], float]) -> None:
        self._keep = keep
        self.values: list[float | None] = []

    def add(self, place: int, value: float) -> None:
        """Into the bin at `place`, which is never before the last one by more than the present step."""
        self.values += [None] * (place + 1 - len(self.values))
        before = self.values[place]
        self.values[place] = value if before is None else before if math.isnan(before) else self._keep(before, value)

    def halve(self) -> None:
        """Two bins become one."""
        values, self.values = self.values, []
        for place, value in enumerate(values):
            if value is not None:
                self.add(place // 2, value)


class ModuleNumbers(NamedTuple):
    """One module in one step; in a step without a sample, all but the norm is that of the last one."""

    norm: float
    ratio: float
    zero_share: float
    pace: float
    """As `ratio`, to weights of at least the usual size."""


Write: TypeAlias = Callable[[int, Iterable[tuple[str, ModuleNumbers]], float, str], None]
"""Takes a step, its modules by name, its loss and the name of the optimizer."""


@dataclass(eq=False)
class GradientStep:
    """One step of one optimizer, as it was measured."""

    events: StepEvents
    """What happened before it."""
    number: int
    rate: float = math.nan
    scalars: dict[str, float] = field(default_factory=dict)
    numbers: dict[ModuleSeries, ModuleNumbers] = field(default_factory=dict)
    """Norms as they were before clipping; empty where the step was not read by module."""
    unread: Sequence[ModuleSeries] = ()
    """Then its modules."""
    members: frozenset[int] = frozenset()
    """The positions of the parameters that had a gradient."""
    ratio_max: float | None = None
    """The largest of the parameters, to weights of at least the usual size; None in a step without a sample."""
    loss: float = math.nan
    """NaN where it is not known, or is NaN."""
    norm: float = math.nan
    clipped_from: float | None = None
    """The norm that `clip_grad_norm_` was given; None where it was not called."""


@dataclass(eq=False)
class ParameterSteps:
    """What the updates of one optimizer have done to one parameter, until the first that has changed it."""

    parameter: weakref.ref[torch.Tensor]
    series: ModuleSeries
    owner: Owner
    is_matrix: bool
    element_size: int
    """In bytes."""
    link: Link = Link.FROZEN
    """The one that broke in the update that came furthest."""
    steps_count: int = 0
    """Up to that update."""
    is_zero: bool = True
    """Whether its elements are all zero."""
    ratio_max: float = 0.0
    """Of its updates, to weights of at least the usual size."""
    rate: float = math.nan
    """The learning rate of the last update."""

    def measured(self, norm: float, weight: float, ratio: float) -> None:
        """One more update: the norms of the gradient and of the weights before it, and what it changed of them."""
        numbers = (norm, Link.ZERO_GRADIENT), (self.rate, Link.ZERO_RATE), (ratio, Link.UNMOVED)
        first = next((link for value, link in numbers if value == 0), None)
        self.is_zero = self.is_zero and weight == 0
        self.ratio_max = max(self.ratio_max, ratio)
        self.add(first if first is not None else Link.BARELY_MOVED if ratio < STILL else Link.NONE)

    def add(self, link: Link) -> None:
        """One more update, in which that link breaks."""
        self.link = max(self.link, link)
        self.steps_count += 1


@dataclass(eq=False)
class GradientHistory:
    """One optimizer: its last steps, and how loss, norm and learning rate went over all of them."""

    record: RunRecord
    name: str
    line: Line | None
    kind: str = ""
    """Its class."""
    optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
    """A weak reference to it."""
    parameters: dict[int, ParameterSteps] = field(default_factory=dict)
    """All that it holds, by their ids."""
    last: StepEvents = field(default_factory=StepEvents)
    """What happened before the last step that had a backward pass."""
    is_maximizing: bool = False
    is_scheduled: bool = False
    has_closure: bool = False
    steps: deque[GradientStep] = field(default_factory=lambda: deque(maxlen=BINS))
    steps_count: int = 0
    first_losses: list[float] = field(default_factory=list)
    """Of the first three steps."""
    most_loss: float = -math.inf
    most_norm: float = 0.0
    """Of the steps that are no longer kept."""
    most_rate: float = 0.0
    falls: dict[Line | None, float] = field(default_factory=dict)
    """By how much the learning rate fell, as a logarithm, by the line of the scheduler's step; None for any other code that set it."""
    still: tuple[int, int] | None = None
    """The step from which on the learning rate is next to nothing and no update changes anything, and how many came before it."""
    members: frozenset[int] = frozenset()
    """The positions of the parameters that had a gradient in the last step."""
    since: int = 0
    """Steps since other parameters got a gradient."""
    clip: ClipCall | None = None
    """The last call of `clip_grad_norm_`."""
    clips: Counter[str] = field(default_factory=Counter)
    """How many calls there were, and how many were `unclipped`: changed nothing; `unscaled`: no longer had the GradScaler's factor; then
    the `steps` with any clipping, those that had it only `early`, before the backward pass, and those in which it was given an `empty`
    list."""
    lost_clip: Line | None = None
    """The line of clipping that is early, or given nothing."""
    keeps_state: bool = False
    """Whether the optimizer keeps tensors for its next steps."""
    decay: float = 0.0
    """The largest share of a weight that weight decay takes in a step."""

    def add(self, step: GradientStep) -> None:
        """One more step."""
        if step.members != self.members:
            self.members, self.since = step.members, 0
        self.clip = step.events.clips[-1] if step.events.clips else self.clip
        for last in list(self.steps)[-1:]:
            self.most_loss = max(self.most_loss, last.loss) if math.isfinite(last.loss) else self.most_loss
        self.most_rate = max(self.most_rate, step.rate)
        ratio = 0.0 if step.rate == 0 else step.ratio_max
        if not step.rate < _FADED_RATE * self.most_rate or (ratio is not None and ratio >= STILL):
            self.still = None
        elif self.still is None and ratio is not None:
            self.still = step.number, self.steps_count
        if len(self.steps) == BINS and math.isfinite(self.steps[0].norm):
            self.most_norm = max(self.most_norm, self.steps[0].norm)
        self.steps.append(step)
        self.steps_count += 1
        self.since += 1
        if len(self.first_losses) < FEW_UPDATES and math.isfinite(step.loss):
            self.first_losses.append(step.loss)
        if step.clipped_from is not None and self.clip is not None:
            self.clips["calls"] += 1
            self.clips["unclipped"] += not step.clipped_from > self.clip.max_norm
            self.clips["unscaled"] += not step.norm < _SCALED_CLIP * step.clipped_from

    @property
    def file(self) -> str:
        """That of the line of its updates."""
        return "" if self.line is None else self.line.file

    @property
    def is_warming_up(self) -> bool:
        """Whether the learning rate rises over the last steps."""
        return bool(self.steps) and self.steps[-1].rate > 1.001 * self.steps[0].rate

    @property
    def is_winding_down(self) -> bool:
        """Whether a schedule has all but ended the training."""
        return self.steps[-1].rate < 0.05 * self.most_rate

    @property
    def is_alone(self) -> bool:
        """Whether no other optimizer trains: of a GAN, one model works against another, and the discriminator guesses at equilibrium."""
        return len([history for history in self.record.histories if history.steps_count > 1]) <= 1

    @property
    def factor(self) -> float:
        """By what the criterion of the loss is multiplied; negative where an update increases it."""
        return -self.last.factor if self.is_maximizing else self.last.factor

    def losses(self) -> list[float]:
        """The finite ones of the last steps."""
        return [step.loss for step in self.steps if math.isfinite(step.loss)]

    def modules(self) -> list[ModuleSeries]:
        """Those that it updates, in the order of the models, if they ever had a gradient."""
        return _in_order({steps.series for steps in self.parameters.values()})

    def names(self, parts: Iterable[ModuleSeries | ParameterSteps]) -> tuple[str, ...]:
        """Of the modules."""
        return tuple(dict.fromkeys(self.record.owners.name(part.owner) for part in parts))


@dataclass(eq=False)
class ModuleSeries:
    """One module. A step may come in parts, where several optimizers hold its parameters."""

    owner: Owner
    count: int = 0
    """Of its parameters' elements."""
    parameters: set[int] = field(default_factory=set)
    """Their ids."""
    is_matrix: bool = False
    """Whether one of those that train has two dimensions or more."""
    is_sharded: bool = False
    """Whether other ranks hold parts of them: of those nothing is known here."""
    norms: Bins = field(default_factory=lambda: Bins(max))
    ratios: Bins = field(default_factory=lambda: Bins(max))
    zeros: Bins = field(default_factory=lambda: Bins(min))
    recent_norms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    recent_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Of the steps, but the first few, whose update was as large as the weights."""
    steps_count: int = 0
    first_step: int = 0
    zero_run: int = 0
    """How many of the last steps had a gradient of zeros only."""
    zero_since: int = 0
    is_used: bool | None = None
    """Whether the loss depends on it, as its graph says; None where that was not asked."""
    zero_share: float = 0.0

    def add(self, numbers: ModuleNumbers, place: int, measured: GradientStep) -> None:
        """One more step, into the bin at `place`."""
        norm, ratio, is_sampled = numbers.norm, numbers.ratio, measured.ratio_max is not None
        self.first_step = self.first_step if self.steps_count else measured.number
        self.steps_count += 1
        self.zero_share = numbers.zero_share if norm else 1.0
        self.norms.add(place, norm)
        self.zeros.add(place, self.zero_share)
        self.recent_norms.append(norm)
        if math.isfinite(ratio):
            self.ratios.add(place, ratio)
            self.recent_ratios.extend([ratio] if is_sampled else [])
        if is_sampled and self.steps_count > FIRST_STEPS and numbers.pace > FAST:
            self.paces.append(numbers.pace)
        self.zero_since = self.zero_since if self.zero_run else measured.number
        self.zero_run = self.zero_run + 1 if norm == 0 else 0
        if not self.zero_run:
            self.is_used = None
        elif measured.events.leaves is not None:
            self.is_used = not self.parameters.isdisjoint(measured.events.leaves)

    def repeat(self, place: int) -> None:
        """One more step that was not read by module: it is as the last one."""
        self.steps_count += 1
        for bins in (self.norms, self.ratios, self.zeros):
            if len(bins.values) <= place:
                bins.values += bins.values[-1:] * (place + 1 - len(bins.values))

    def row(self, name: str) -> ModuleRow:
        """Its row in the report."""
        norm, ratio = _median(self.recent_norms), _median(self.recent_ratios)
        medians = {"norm_median": norm, "norm_max": self.norm_max(), "ratio_median": ratio, "zero_share": self.zero_share}
        return ModuleRow(module=name, type=self.owner.kind, parameters_count=self.count, steps_count=self.steps_count, **medians)

    def norm_max(self) -> float:
        """The largest norm that is a number."""
        return max(value for value in (0.0, *self.norms.values) if value is not None and not math.isnan(value))


class RunRecord:
    """All modules and optimizers: plain numbers, and weak references."""

    def __init__(self, scheduled: Mapping[int, tuple[float, Line | None]]) -> None:
        self.write: Write | None = None
        self.owners = Owners()
        self.histories: list[GradientHistory] = []
        self.scheduled = scheduled
        """The learning rate that a scheduler gave a group last, by the id of the group, and where it was stepped."""
        self.nonfinite_step: int | None = None
        self.step = -1
        self._series: dict[tuple[int, str], ModuleSeries] = {}
        self._width = 1
        """Steps in a bin."""
        self._losses, self._totals = Bins(lambda _, later: later), Bins(max)
        self._stepped: set[int] = set()
        """The ids of the parameters that were updated in this step."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        """Those that updated them."""

    def clock(self, optimizer: torch.optim.Optimizer, ids: Sequence[int]) -> int:
        """The number of a step: it goes on when parameters are updated again, or when an optimizer that updated some is gone."""
        if self.step < 0 or not self._stepped.isdisjoint(ids) or any(reference() is None for reference in self._optimizers):
            self.step += 1
            self._stepped, self._optimizers = set(), []
        self._stepped.update(ids)
        self._optimizers.append(weakref.ref(optimizer))
        return self.step

    def series_of(self, parameters: Sequence[torch.Tensor], history: GradientHistory) -> list[ModuleSeries]:
        """That of the module of each parameter."""
        known = []
        for parameter, owner in zip(parameters, self.owners.of(parameters), strict=True):
            key = (owner.model, owner.path) if len(self._series) < _MOST_MODULES else _OTHERS
            series = self._series.setdefault(key, ModuleSeries(replace(owner, model=key[0], path=key[1])))
            known.append(series)
            if id(parameter) not in series.parameters:
                series.parameters.add(id(parameter))
                series.count += local_of(parameter).numel()
                series.is_matrix = series.is_matrix or (parameter.requires_grad and parameter.dim() > 1)
                series.is_sharded = series.is_sharded or is_shard(parameter)
            if id(parameter) not in history.parameters and can_be_measured(parameter):
                steps = ParameterSteps(weakref.ref(parameter), series, series.owner, parameter.dim() > 1, parameter.element_size())
                history.parameters[id(parameter)] = steps
        return known

    def add(self, history: GradientHistory, step: GradientStep) -> ModuleSeries | None:
        """A step of an optimizer; which module has the largest gradient, where there was one."""
        if step.scalars.get("found_inf", 0) > 0:
            return None  # a step that the scaler has skipped
        scalars = step.scalars
        unscale = 1 / scalars["grad_scale"] if scalars.get("grad_scale", 0) > 0 else 1.0
        step.numbers = {series: numbers._replace(norm=numbers.norm * unscale) for series, numbers in step.numbers.items()}
        if step.numbers:  # as they were before clipping
            step.norm = math.sqrt(sum(numbers.norm**2 for numbers in step.numbers.values()))
        else:
            step.norm *= unscale
        step.loss = scalars.get("loss", math.nan) / max(1, step.events.count) / scalars.get("loss_scale", 1.0)
        step.rate = scalars.get("rate", step.rate)
        step.clipped_from = scalars[f"clip {len(step.events.clips) - 1}"] if step.events.clips else None
        history.add(step)
        while step.number // self._width >= BINS:  # one bin too many: they are made wider
            self._width *= 2
            by_module = (getattr(series, what) for series in self._series.values() for what in _BINNED)
            for bins in (self._losses, self._totals, *by_module):
                bins.halve()
        place, numbers = step.number // self._width, step.numbers
        self._totals.add(place, step.norm)
        if "loss" in step.scalars:
            self._losses.add(place, step.loss)
        for series, one in numbers.items():
            series.add(one, place, step)
        for series in step.unread:
            series.repeat(place)
        if not math.isfinite(step.norm) and "grad_scale" not in step.scalars and self.nonfinite_step is None:
            self.nonfinite_step = step.number
        if self.write is not None:
            self.write(step.number, ((self.owners.name(series.owner), one) for series, one in numbers.items()), step.loss, history.name)
        step.numbers, step.unread, step.events = {}, (), StepEvents(batch=step.events.batch)  # it is kept, with the last steps
        return max(numbers, key=lambda series: numbers[series].norm, default=None)

    @property
    def losses(self) -> list[float | None]:
        """The last of each bin."""
        return self._losses.values

    def report(self, **judged: Any) -> GradReport:
        """All of it as it is now, with what was judged."""
        steps = [part for history in self.histories for part in history.parameters.values() if part.link <= Link.WITHOUT_GRADIENT]
        untrained = dict.fromkeys(self.owners.name(part.owner) for part in steps if part.steps_count >= FEW_UPDATES)
        rate = self.histories[-1].steps[-1].rate if self.histories and self.histories[-1].steps else math.nan
        named = [(self.owners.name(series.owner), series) for series in _in_order(self._series.values())]
        judged |= {what: {name: list(getattr(series, what).values) for name, series in named} for what in _BINNED}
        return GradReport(
            modules=tuple(name for name, _ in named),
            losses=list(self.losses),
            totals=list(self._totals.values),
            steps_count=self.step + 1,
            learning_rate=None if math.isnan(rate) else rate,
            steps_per_value=self._width,
            rows=tuple(series.row(name) for name, series in named),
            nonfinite_step=self.nonfinite_step,
            untrained=tuple(untrained),
            **judged,
        )


def _in_order(modules: Iterable[ModuleSeries]) -> list[ModuleSeries]:
    return sorted((series for series in modules if series.steps_count), key=lambda series: (series.owner.model, series.owner.order))


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return statistics.median(known) if known else None
