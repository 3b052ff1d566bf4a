"""One optimizer, step by step: what is measured around its update, and how numbers of parameters become those of modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.gradwatch.loss_watch import ClipCall, LossWatch
from torchdebug_magics.instruments.gradwatch.module_series import ModuleSeries
from torchdebug_magics.instruments.gradwatch.step_history import StepHistory
from torchdebug_magics.probing.storages import is_shard, local_of

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_USUAL_RMS = 0.02
"""Of weights: smaller ones, as those that begin at zero, are no measure for an update."""
_SAMPLE = 1024
"""Elements of each parameter: a norm is then off by about 2%."""
_EACH_OF, _THEN_EVERY = 64, 4
"""Samples are taken at each of so many steps, then at every fourth one; gradient norms at each step, of all elements."""
_HALF = frozenset({torch.float16, torch.bfloat16})


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


class Reading(NamedTuple):
    """One step's numbers: a value for each parameter that had a gradient."""

    norms: list[float]
    weights: list[float]
    """As `updates` and `nonzero`, of the sample; empty in a step without one."""
    updates: list[float]
    nonzero: list[float]
    scalars: dict[str, float]


@dataclass
class Measured:
    """One step's numbers, on their way to the host."""

    present: list[int]
    """Positions of the parameters that had a gradient."""
    names: tuple[str, ...]
    """Of the further scalars."""
    host: torch.Tensor
    ready: torch.Event | None

    _reading: Reading | None = None

    def read(self) -> Reading:
        """The numbers; waits for the device the first time."""
        if self._reading is None:
            if self.ready is not None:
                self.ready.synchronize()
            values: list[float] = self.host.tolist()
            start = len(self.present) + len(self.names)
            many = (len(values) - start) // 3
            before, change, nonzero = (values[start + part * many :][:many] for part in range(3))
            if 0 < many > len(self.present):
                before, change, nonzero = ([part[at] for at in self.present] for part in (before, change, nonzero))
            scalars = dict(zip(self.names, values[len(self.present) : start], strict=True))
            self._reading = Reading(values[: len(self.present)], before, change, nonzero, scalars)
        return self._reading


class StepMeter:
    """For parameters on one device: holds `_SAMPLE` elements of each, three times, and no tensor of the user's.

    Of a DTensor, the part in this process is measured.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        real = [_real(local_of(one)) for one in tensors]
        wide = any(one.dtype is torch.float64 for one in real)
        self.device = tensors[0].device
        self.sizes = [min(one.numel(), _SAMPLE) for one in real]
        self.counts = [one.numel() for one in real]
        self._strides = [_stride(count, size) for count, size in zip(self.counts, self.sizes, strict=True)]
        dtype = torch.float64 if wide else torch.float32
        self._buffer = torch.zeros(3, len(tensors), max(self.sizes), device=self.device, dtype=dtype)
        self._rows = [
            [
                self._buffer[part, at, : self.sizes[at]].view(one.shape if self.counts[at] == self.sizes[at] else -1)
                for at, one in enumerate(real)
            ]
            for part in range(3)
        ]
        self._norms: list[torch.Tensor] = []
        self._present: list[int] = []
        self._step = 0
        self._is_sampled = False
        self._sampled: list[int] = []
        """What was present in the last step with a sample."""

    @property
    def has_gradients(self) -> bool:
        """Whether there is anything to read of this step."""
        return bool(self._present)

    def before(self, tensors: Sequence[torch.Tensor], present: list[int]) -> None:
        """Take the weights as they are."""
        self._present = present
        self._is_sampled = self._step < _EACH_OF or self._step % _THEN_EVERY == 0 or present != self._sampled
        self._step += 1
        if self._is_sampled:
            self._sampled = present
            self._copy(0, [tensors[at] for at in present])

    def gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the gradients of the tensors that are present and have one."""
        gradients = [gradient_of(tensors[at]) for at in self._present]
        if any(one is None for one in gradients):
            self._present = [at for at, one in zip(self._present, gradients, strict=True) if one is not None]
        found = [one for one in gradients if one is not None]
        if not found:
            return
        dense = [one if one.layout is torch.strided and not one.is_complex() else _dense(one) for one in found]
        dtypes = {one.dtype for one in dense}
        self._norms = list(torch._foreach_norm(dense, 2, dtype=torch.float32 if dtypes & _HALF and torch.float64 not in dtypes else None))
        if self._is_sampled:
            self._copy(2, found)

    def after(self, tensors: Sequence[torch.Tensor], extras: dict[str, torch.Tensor]) -> Measured:
        """Take the weights after the update, and send all numbers to the host."""
        values = torch.stack(_alike(self._buffer, [*self._norms, *extras.values()]))
        self._norms = []
        if self._is_sampled:
            self._copy(1, [tensors[at] for at in self._present])
            before, after, gradients = self._buffer
            weights, nonzero = torch.linalg.vector_norm(before, dim=1), gradients.ne_(0).sum(1)
            values = torch.cat([values, weights, torch.linalg.vector_norm(after.sub_(before), dim=1), nonzero])
        if not values.is_cuda:
            return Measured(self._present, tuple(extras), values, None)
        host = values.to("cpu", non_blocking=True)  # into pinned memory
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(values.device))
        return Measured(self._present, tuple(extras), host, ready)

    def _copy(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        """Samples of the present tensors into their rows."""
        rows, samples, strides = [], [], self._strides
        for at, tensor in zip(self._present, map(local_of, tensors), strict=True):
            stride, row = strides[at], self._rows[part][at]
            if tensor.layout is not torch.strided:
                row.fill_(1)  # of a sparse gradient the zeros are not stored
                continue
            rows.append(row)
            samples.append(
                _sample(_real(tensor), stride, self.sizes[at]) if self.counts[at] > self.sizes[at] or tensor.is_complex() else tensor
            )
        if rows:
            torch._foreach_copy_(rows, samples)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """In this process; None where it is laid out otherwise than its parameter, as a sum that is yet to be made over the ranks."""
    gradient: Any = tensor.grad
    if gradient is None or not is_shard(gradient):
        return gradient  # type: ignore[no-any-return]
    weight: Any = tensor
    return local_of(gradient) if gradient.placements == weight.placements else None


def _stride(count: int, size: int) -> int:
    """Between two elements of a sample; odd, so that the sample is not of a few columns."""
    stride = count // size
    return stride - (stride > 2 and stride % 2 == 0)  # noqa: PLR2004 - 1 would be the beginning alone


def _sample(tensor: torch.Tensor, stride: int, size: int) -> torch.Tensor:
    """So many elements, equally spaced in memory: the same places of a weight at each step."""
    if stride == 1 and tensor.numel() == size:
        return tensor
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):  # noqa: PLR2004
        return tensor.as_strided((size,), (stride,), tensor.storage_offset())
    return tensor.reshape(-1)[::stride][:size]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return _real(gradient.coalesce()._values() if gradient.layout is torch.sparse_coo else gradient)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _alike(buffer: torch.Tensor, scalars: list[torch.Tensor]) -> list[torch.Tensor]:
    """All on the device and of the dtype of `buffer`; no copy to a device waits for it."""
    device, dtype = buffer.device, buffer.dtype
    return [one if one.dtype is dtype and one.device == device else one.to(device, dtype, non_blocking=True) for one in scalars]
