"""One optimizer, step by step: what is measured around its update, and how numbers of parameters become those of modules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchdebug_magics.instruments.gradwatch.step_meter import StepMeter
from torchdebug_magics.probing.shards import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.gradwatch.loss_watch import ClipCall, LossWatch
    from torchdebug_magics.instruments.gradwatch.module_series import ModuleSeries
    from torchdebug_magics.instruments.gradwatch.step_history import StepHistory
    from torchdebug_magics.instruments.gradwatch.step_meter import Measured

__all__ = ["ModuleNumbers", "OptimizerWatch", "Pending", "can_be_measured"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_USUAL_RMS = 0.02
"""Of weights: smaller ones, as those that begin at zero, are no measure for an update."""


class ModuleNumbers(NamedTuple):
    """One module in one step."""

    norm: float
    ratio: float
    zero_share: float
    pace: float
    """As `ratio`, to weights of at least the usual size."""
    is_fresh: bool = True
    """Whether this step took a sample; else all but the norm is that of the last one."""


@dataclass
class Pending:
    """A step whose numbers are on their way."""

    step: int
    rate: float
    batch: tuple[int, int] | None
    measured: dict[torch.device, Measured]
    loss_count: int
    clips: list[ClipCall]
    leaves: frozenset[int] | None


class OptimizerWatch:
    """Holds ids and numbers, and no tensor of the user's."""

    def __init__(self, parameters: Sequence[torch.Tensor], series: Sequence[ModuleSeries], history: StepHistory) -> None:
        self.ids = tuple(map(id, parameters))
        self.history = history
        self.series = series
        """One for each parameter."""
        self._latest: dict[int, ModuleNumbers] = {}
        self._keys = list(map(id, series))
        self.pending: Pending | None = None
        self.is_measuring = False
        self._positions: dict[torch.device, list[int]] = {}
        for at, one in enumerate(parameters):
            if can_be_measured(one):
                self._positions.setdefault(one.device, []).append(at)
        self._meters = {device: StepMeter([parameters[at] for at in places]) for device, places in self._positions.items()}

    def fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it was made for these very tensors, where they are now."""
        return self.ids == tuple(map(id, parameters)) and (
            not self._meters or parameters[next(iter(self._positions.values()))[0]].device in self._meters
        )

    @property
    def measured_count(self) -> int:
        """How many of the parameters are measured."""
        return sum(map(len, self._positions.values()))

    def before(self, parameters: Sequence[torch.Tensor]) -> None:
        """An update is about to begin."""
        self.is_measuring = False
        for device, places in self._positions.items():
            tensors = [parameters[at] for at in places]
            closure = self.history.has_closure  # which is yet to compute the gradients
            self._meters[device].before(tensors, [at for at, one in enumerate(tensors) if closure or one.grad is not None])
            if not closure:
                self._meters[device].gradients(tensors)
        self.is_measuring = True

    def after(
        self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, watch: LossWatch, step: int, scale: torch.Tensor | None
    ) -> None:
        """The update is done: send its numbers on their way, with those of the loss and of clipping."""
        extras = {f"clip {at}": one.total for at, one in enumerate(watch.clips)}
        if watch.total is not None:
            extras["loss"] = watch.total
            extras |= {} if scale is None else {"loss_scale": scale}
        for name in ("grad_scale", "found_inf"):  # of a fused optimizer, which unscales the gradients itself
            if isinstance(value := getattr(optimizer, name, None), torch.Tensor):
                extras[name] = value
        if isinstance(rate := optimizer.param_groups[0].get("lr"), torch.Tensor):
            extras["rate"] = rate.detach().reshape(())
        measured: dict[torch.device, Measured] = {}
        for device, places in self._positions.items():
            tensors = [parameters[at] for at in places]
            meter = self._meters[device]
            if self.history.has_closure:
                meter.gradients(tensors)
            if meter.has_gradients:
                measured[device] = meter.after(tensors, {} if measured else extras)
        self.is_measuring = False
        rate = max((one["lr"] for one in optimizer.param_groups if isinstance(one.get("lr"), (int, float))), default=math.nan)
        self.history.micro_batches = max(1, watch.count)
        self.pending = Pending(step, rate, watch.batch, measured, watch.count, watch.clips, watch.leaves)

    def by_module(self, pending: Pending, clipped: Sequence[tuple[ClipCall, float]]) -> tuple[dict[int, ModuleNumbers], frozenset[int]]:
        """Numbers by the id of a `ModuleSeries`, norms as they were before clipping; and the positions that had a gradient."""
        sums: dict[int, list[float]] = {}
        members: list[int] = []
        calls = [(call.parameters, total / call.max_norm) for call, total in clipped if total > call.max_norm > 0]
        for device, measured in pending.measured.items():
            meter, places = self._meters[device], self._positions[device]
            sizes, counts = meter.sizes, meter.counts
            reading = measured.read()
            for number, at in enumerate(measured.present):
                place, norm = places[at], reading.norms[number]
                members.append(place)
                for clipped_ids, factor in calls:
                    if self.ids[place] in clipped_ids:
                        norm *= factor  # as it was before clipping
                row = sums.get(key := self._keys[place])
                if row is None:
                    row = sums[key] = [0.0, 0.0, 0.0, 0.0, 0.0]
                row[0] += norm * norm
                if reading.weights:
                    count, part = counts[at], counts[at] / sizes[at]
                    row[1] += reading.weights[number] ** 2 * part
                    row[2] += reading.updates[number] ** 2 * part
                    row[3] += count - reading.nonzero[number] * part
                    row[4] += count
        fresh = {key: _numbers(*row) for key, row in sums.items() if row[4]}
        self._latest |= fresh
        stale = {key: self._latest[key]._replace(norm=math.sqrt(row[0]), is_fresh=False) for key, row in sums.items() if not row[4]}
        return fresh | stale, frozenset(members)


def _numbers(norm: float, weight: float, update: float, zeros: float, count: float) -> ModuleNumbers:
    weight_norm, update_norm = math.sqrt(weight), math.sqrt(update)
    ratio = update_norm / weight_norm if weight_norm else (math.inf if update_norm else 0.0)
    pace = update_norm / max(weight_norm, _USUAL_RMS * math.sqrt(count))
    return ModuleNumbers(math.sqrt(norm), ratio, zeros / count, pace)


def can_be_measured(parameter: torch.Tensor) -> bool:
    """Whether it, or its part in this process, is a plain floating-point tensor; of any other kind no hidden operation is asked for."""
    parameter = local_of(parameter)
    return (
        type(parameter) in _PLAIN
        and not parameter.is_meta
        and parameter.numel() > 0
        and parameter.layout is torch.strided
        and (parameter.is_floating_point() or parameter.is_complex())
    )
