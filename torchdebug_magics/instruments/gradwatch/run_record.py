"""All that a session has measured: modules, optimizers, and what was seen at single steps."""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from torchdebug_magics.instruments.gradwatch.loss_watch import ClipCall
from torchdebug_magics.instruments.gradwatch.module_series import FAST, FIRST_STEPS, Grid, ModuleSeries, Owner, Owners
from torchdebug_magics.instruments.gradwatch.optimizer_watch import ModuleNumbers, OptimizerWatch, Pending
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradReport, LiveGrad, ModuleRow
from torchdebug_magics.instruments.gradwatch.step_history import Moment, StepHistory, StepLog
from torchdebug_magics.probing.lines import Line
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.storages import is_shard, local_of

_SCALED_CLIP = 0.5
"""Of the norm that clipping leaves: where the step finds less, the gradients were divided by the scaler's factor after it."""
_LIVE_ROWS = 24
_MOST_MODULES, _OTHERS = 4096, (-1, "all other modules")
_MOST_OPTIMIZERS = 64
"""Further ones, as when each step makes its own, continue the history of the last."""
_RUNS = ((2, 1e6), (3, 100.0), (6, 10.0))
"""(steps in a row that grow, growth of the loss over them)"""
_TREND, _CORRELATION = 24, 0.9
"""Steps of a trend that is noisy."""
_EVEN = 0.3
"""Of the mean growth, in logarithms, that each step has at least."""
_ABOVE_ALL = 3.0
"""How far the loss lies above all that it was before."""
_SPIKE_OF_USUAL, _SPIKE_OF_ALL = 20.0, 5.0
_HISTORY = 10


class RunRecord:
    """Plain numbers, and weak references."""

    def __init__(self, log: StepLog) -> None:
        self.owners = Owners()
        self.grid = Grid()
        self.histories: list[StepHistory] = []
        self.divergences: list[tuple[Divergence, StepHistory]] = []
        self.spikes: list[tuple[Spike, StepHistory]] = []
        self.nonfinite_step: int | None = None
        self.step = -1
        self._stepped: set[int] = set()
        """The ids of the parameters that were updated in this step."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        """Those that updated them."""
        self._log = log

    def clock(self, optimizer: torch.optim.Optimizer, ids: Sequence[int]) -> int:
        """The number of a step: it goes on when parameters are updated again, or when an optimizer that updated some is gone."""
        if self.step < 0 or any(one in self._stepped for one in ids) or any(ref() is None for ref in self._optimizers):
            self.step += 1
            self._stepped, self._optimizers = set(), []
        self._stepped.update(ids)
        self._optimizers.append(weakref.ref(optimizer))
        return self.step

    def series_of(self, parameters: Sequence[torch.Tensor], history: StepHistory) -> list[ModuleSeries]:
        """That of the module of each parameter."""
        found = []
        for parameter, owner in zip(parameters, self.owners.of(parameters), strict=True):
            key = (owner.model, owner.path) if len(self.grid.series) < _MOST_MODULES else _OTHERS
            one = self.grid.series.get(key)
            if one is None:
                one = self.grid.series[key] = ModuleSeries(replace(owner, model=key[0], path=key[1]))
            if id(parameter) not in one.parameters:
                one.parameters.add(id(parameter))
                one.count += local_of(parameter).numel()
                one.is_matrix = one.is_matrix or (parameter.requires_grad and parameter.dim() > 1)
                one.is_sharded = one.is_sharded or is_shard(parameter)
                one.is_half = parameter.element_size() == 2  # noqa: PLR2004 - bytes
            if history not in one.histories:
                one.histories.append(history)
            found.append(one)
        return found

    def history_of(self, optimizer: torch.optim.Optimizer, line: Line | None) -> StepHistory:
        """That of an optimizer which is seen for the first time."""
        if len(self.histories) < _MOST_OPTIMIZERS:
            self.histories.append(StepHistory(variable_of(optimizer) or "optimizer", line))
        return self.histories[-1]

    def name(self, owner: Owner) -> str:
        """The module's path; where there are several models, after the name of its own."""
        if len(self.owners.models) <= 1 or owner.model < 0:
            return owner.path
        return f"{self.owners.models[owner.model]}.{owner.path}".rstrip(".")

    def add(self, watch: OptimizerWatch, pending: Pending) -> None:
        """One step of one optimizer."""
        scalars = next(iter(pending.measured.values())).read().scalars
        if scalars.get("found_inf", 0) > 0:
            return  # a step that the scaler has skipped
        history = watch.history
        clips = [(call, scalars[f"clip {at}"]) for at, call in enumerate(pending.clips)]
        numbers, members = watch.by_module(pending, clips)
        unscale = 1 / scalars["grad_scale"] if scalars.get("grad_scale", 0) > 0 else 1.0
        norm = math.sqrt(sum(one.norm**2 for one in numbers.values())) * unscale
        loss = scalars.get("loss", math.nan) / max(1, pending.loss_count) / scalars.get("loss_scale", 1.0)
        if members != history.members:
            history.members, history.since, history.largest_norm = members, 0, 0.0
        history.add(Moment(pending.step, loss, norm, scalars.get("rate", pending.rate), pending.batch))
        self._add_clips(history, clips, norm)
        place = self.grid.place(pending.step)
        self.grid.totals.add(place, norm)
        if "loss" in scalars:
            self.grid.losses.add(place, loss)
        by_id = {id(one): one for one in watch.series}
        for key, one in numbers.items():
            self._add_module(by_id[key], one, pending, place, unscale)
        if not math.isfinite(norm) and "grad_scale" not in scalars and self.nonfinite_step is None:
            self.nonfinite_step = pending.step
        self._judge(history, by_id[max(numbers, key=lambda key: numbers[key].norm)] if numbers else None)
        if self._log.is_open:
            rows = {self.name(by_id[key].owner): (one.norm * unscale, one.ratio, one.zero_share) for key, one in numbers.items()}
            self._log.write(pending.step, rows, loss, optimizer=history.name)

    def _add_module(self, series: ModuleSeries, numbers: ModuleNumbers, pending: Pending, place: int, unscale: float) -> None:
        norm = numbers.norm * unscale
        if not series.steps_count:
            series.first_step = pending.step
        series.steps_count += 1
        series.norms.add(place, norm)
        series.zero_share = numbers.zero_share if norm else 1.0
        series.zeros.add(place, series.zero_share)
        series.recent_norms.append(norm)
        series.norm_max = max(series.norm_max, norm)
        if math.isfinite(numbers.ratio):
            series.ratios.add(place, numbers.ratio)
        if numbers.is_fresh:
            self._add_sample(series, numbers)
        series.zero_since = series.zero_since if series.zero_run else pending.step
        series.zero_run = series.zero_run + 1 if norm == 0 else 0
        if not series.zero_run:
            series.is_used = None
        elif pending.leaves is not None:
            series.is_used = not series.parameters.isdisjoint(pending.leaves)

    def _add_sample(self, series: ModuleSeries, numbers: ModuleNumbers) -> None:
        if math.isfinite(numbers.ratio):
            series.recent_ratios.append(numbers.ratio)
            series.ratio_max = max(series.ratio_max, numbers.ratio)
        if series.steps_count > FIRST_STEPS and numbers.pace > FAST:
            series.paces.append(numbers.pace)
        is_still = numbers.ratio == 0 and numbers.norm > 0 and numbers.zero_share < 1
        series.unmoved_run = series.unmoved_run + 1 if is_still else 0

    def _add_clips(self, history: StepHistory, clips: Sequence[tuple[ClipCall, float]], norm: float) -> None:
        clipping = history.clipping
        for call, total in clips[-1:]:
            clipping.line = call.line
            clipping.max_norm = call.max_norm
            clipping.steps_count += 1
            clipping.clipped_count += total > clipping.max_norm
            clipping.scaled_count += norm < _SCALED_CLIP * total
            clipping.totals.append(total)

    def _judge(self, history: StepHistory, largest: ModuleSeries | None) -> None:
        if not any(known is history for _, known in self.divergences) and (grown := divergence(history)) is not None:
            self.divergences.append((grown, history))
        if len(self.spikes) < 8 and (peak := spike(history, largest.owner if largest is not None else None)) is not None:  # noqa: PLR2004
            self.spikes.append((peak, history))

    def part_of(self, history: StepHistory) -> Grid:
        """The modules that one optimizer updates."""
        return Grid(self.grid.width, {key: one for key, one in self.grid.series.items() if history in one.histories})

    def live(self, backward_count: int, warning: str) -> LiveGrad:
        """As it is now."""
        ordered = self.grid.ordered()
        every = max(1, math.ceil(len(ordered) / _LIVE_ROWS))
        last = self.histories[-1].moments[-1] if self.histories and self.histories[-1].moments else None
        return LiveGrad(
            steps_count=self.step + 1,
            backward_count=backward_count,
            loss=last.loss if last is not None and not math.isnan(last.loss) else None,
            learning_rate=last.rate if last is not None and not math.isnan(last.rate) else None,
            modules=tuple(self.name(one.owner) for one in ordered[::every]),
            norms=tuple(tuple(one.norms.values) for one in ordered[::every]),
            totals=tuple(one for one in self.grid.totals.values if one is not None),
            steps_per_value=self.grid.width,
            warning=warning,
            modules_count=len(ordered),
        )

    def report(
        self, findings: Sequence[GradFinding], doubts: Sequence[str], backward_count: int, raised: str, problems: Sequence[str]
    ) -> GradReport:
        """All of it."""
        ordered = self.grid.ordered()
        names = [self.name(one.owner) for one in ordered]
        return GradReport(
            findings=tuple(findings),
            doubts=tuple(doubts),
            modules=tuple(names),
            norms={name: list(one.norms.values) for name, one in zip(names, ordered, strict=True)},
            ratios={name: list(one.ratios.values) for name, one in zip(names, ordered, strict=True)},
            zeros={name: list(one.zeros.values) for name, one in zip(names, ordered, strict=True)},
            losses=list(self.grid.losses.values),
            totals=list(self.grid.totals.values),
            steps_count=self.step + 1,
            steps_per_value=self.grid.width,
            backward_count=backward_count,
            rows=tuple(_row(name, one) for name, one in zip(names, ordered, strict=True)),
            nonfinite_step=self.nonfinite_step,
            raised=raised,
            problems=tuple(problems),
        )


def _row(name: str, series: ModuleSeries) -> ModuleRow:
    return ModuleRow(
        module=name,
        type=series.owner.kind,
        parameters_count=series.count,
        steps_count=series.steps_count,
        norm_median=_median(series.recent_norms),
        norm_max=series.norm_max,
        ratio_median=_median(series.recent_ratios),
        zero_share=series.zero_share,
    )


def _median(values: Iterable[float]) -> float | None:
    known = [one for one in values if math.isfinite(one)]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class Divergence:
    """Loss and gradient norm grow by about the same factor at each step."""

    first_step: int
    last_step: int
    factor: float
    loss: float


@dataclass(frozen=True)
class Spike:
    """One step whose gradient norm is far above that of all steps before it."""

    moment: Moment
    usual_norm: float
    module: Owner | None


def divergence(history: StepHistory) -> Divergence | None:
    """Whether the last steps grow geometrically, in loss and norm; asked after each step."""
    moments = history.moments
    last = moments[-1]
    if history.has_closure or not math.isfinite(last.loss) or not history.first_losses:
        return None
    if not last.loss > _ABOVE_ALL * max(1e-30, *history.first_losses[:1]):
        return None
    recent = list(moments)
    for length, growth in _RUNS:
        window = recent[-length - 1 :]
        if len(window) > length and window[0].loss > 0 and last.loss >= growth * window[0].loss and _is_geometric(window):
            return _told(window, _largest_before(history, length))
    window = recent[-_TREND:]
    if len(window) == _TREND and history.steps_count % 4 == 0 and _is_trend(window):
        return _told(window, _largest_before(history, _TREND))
    return None


def has_recovered(history: StepHistory) -> bool:
    """Whether the loss has come back to where it began."""
    losses = [one.loss for one in history.moments][-5:]
    return bool(history.first_losses) and all(math.isfinite(one) for one in losses) and min(losses) <= max(history.first_losses)


def spike(history: StepHistory, module: Owner | None) -> Spike | None:
    """Whether the last step's norm is far above the usual and above any before; `module` has the largest share of it."""
    if history.since <= _HISTORY or history.has_closure or history.steps_count <= _HISTORY:
        return None
    last = history.moments[-1]
    if not math.isfinite(last.norm) or last.norm <= _SPIKE_OF_ALL * history.largest_norm:
        return None
    usual = statistics.median(one.norm for one in list(history.moments)[-50:-1])
    return Spike(last, usual, module) if last.norm > _SPIKE_OF_USUAL * usual > 0 else None


def is_spike(found: Spike, history: StepHistory) -> bool:
    """Whether the norm came back after it, or the loss was broken by it: else something else is trained from that step on."""
    after = [one for one in history.moments if one.step > found.moment.step]
    returns = any(one.norm < found.moment.norm / _SPIKE_OF_ALL for one in after[:5])
    broken = any(not math.isfinite(one.norm) or one.loss > 10 * history.most_loss for one in after[:3])
    return returns or broken or len(after) < 3  # noqa: PLR2004 - too early to say


def _is_geometric(window: Sequence[Moment]) -> bool:
    """Whether both grow at each step, the loss by about the same factor: a single jump is something else."""
    mean = math.log(window[-1].loss / window[0].loss) / (len(window) - 1)
    grows = (b.loss > a.loss * math.exp(_EVEN * mean) and b.norm > a.norm for a, b in pairwise(window))
    return all(grows)


def _is_trend(window: Sequence[Moment]) -> bool:
    if any(not (one.loss > 0 and one.norm > 0 and math.isfinite(one.norm)) for one in window):
        return False
    losses, norms = [math.log(one.loss) for one in window], [math.log(one.norm) for one in window]
    if losses[-1] - losses[0] < math.log(_RUNS[-1][1]) or norms[-1] - norms[0] < math.log(_ABOVE_ALL):
        return False
    steps = range(len(window))
    return statistics.correlation(steps, losses) > _CORRELATION and statistics.correlation(steps, norms) > _CORRELATION


def _largest_before(history: StepHistory, length: int) -> float:
    losses = [one.loss for one in list(history.moments)[:-length] if math.isfinite(one.loss)]
    return max([*losses, *history.first_losses[:1]], default=0.0)


def _told(window: Sequence[Moment], largest: float) -> Divergence | None:
    first, last = window[0], window[-1]
    if last.loss < _ABOVE_ALL * largest:
        return None
    factor = (last.loss / first.loss) ** (1 / max(1, last.step - first.step))
    return Divergence(first.step, last.step, factor, last.loss)
