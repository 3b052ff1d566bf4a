"""What is measured around an update, sent to the host without waiting for it, and how numbers of parameters become those of modules."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from torchdebug_magics.instruments.gradwatch.record import GradientHistory, GradientStep, ModuleNumbers, ModuleSeries
from torchdebug_magics.probing.steps import Link
from torchdebug_magics.probing.storages import can_be_measured, is_shard, local_of

_USUAL_RMS = 0.02
"""Of weights: smaller ones, as those that begin at zero, are no measure for an update."""
_SAMPLE = 1024
"""Elements of each parameter: a norm is then off by about 2%."""
_EACH_OF, _THEN_EVERY = 64, 4
"""Samples are taken at each of so many steps, then at every fourth one; gradient norms at each step, of all elements. In a step without
a sample, they are read by module only where they are unusual."""
_UNUSUAL = 1.5
"""By how much a norm is above that of the last step that was read by module."""
_HALF = frozenset({torch.float16, torch.bfloat16})


_DECAYING = frozenset({"SGD", "AdamW"})
"""Of these, weight decay takes a share of each weight that does not depend on the gradients."""


class OptimizerWatch:
    """One optimizer. Holds ids and numbers, and no tensor of the user's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], series: Sequence[ModuleSeries], history: GradientHistory
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.ids, self.devices = tuple(map(id, parameters)), [parameter.device for parameter in parameters]
        self.history = history
        self.series = series
        """One for each parameter."""
        self._rate = math.nan
        """Of the last step."""
        self.pending: GradientStep | None = None
        """The step whose numbers are on their way."""
        self.is_measuring = False
        positions: dict[torch.device, list[int]] = {}
        for at, parameter in enumerate(parameters):
            if can_be_measured(parameter):
                positions.setdefault(parameter.device, []).append(at)
        self._meters = [StepMeter(parameters, places) for places in positions.values()]
        self._open = {at: history.parameters[key] for at, key in enumerate(self.ids) if key in history.parameters}
        """Those that no update has changed so far, by their positions."""
        self._modules: tuple[ModuleSeries, ...] = ()
        """Those of the last step that was read by module, if none of its gradients was zero."""
        self._last_norm = 0.0
        """Of the last step that was read by module."""

    def before(self, parameters: Sequence[torch.Tensor]) -> None:
        """An update is about to begin; one with a closure is yet to compute the gradients."""
        self.is_measuring = False
        closure = self.history.has_closure
        for meter in self._meters:
            meter.before(parameters, [at for at, place in enumerate(meter.places) if closure or parameters[place].grad is not None])
            if not closure:
                meter.gradients(parameters)
        self.is_measuring = True

    def after(self, parameters: Sequence[torch.Tensor], optimizer: Any, step: GradientStep, scale: torch.Tensor | None) -> None:
        """The update is done: send its numbers on their way, with those of the loss and of clipping."""
        extras = {f"clip {at}": call.total for at, call in enumerate(step.events.clips)}
        if step.events.total is not None:
            extras["loss"] = step.events.total
            extras |= {} if scale is None else {"loss_scale": scale}
        for name in ("grad_scale", "found_inf"):  # of a fused optimizer, which unscales the gradients itself
            if isinstance(value := getattr(optimizer, name, None), torch.Tensor):
                extras[name] = value
        if isinstance(rate := optimizer.param_groups[0].get("lr"), torch.Tensor):
            extras["rate"] = rate.detach().reshape(())
        for meter in self._meters:
            if self.history.has_closure:
                meter.gradients(parameters)
            if meter.present:
                meter.after(parameters, extras)
                extras = {}
        self.is_measuring = False
        self._follow(parameters, optimizer, step)
        self.pending = step

    def _follow(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, step: GradientStep) -> None:
        """How far this update came with the parameters that none has changed so far: the numbers are yet to come."""
        history, groups, events = self.history, optimizer.param_groups, step.events
        if events.count or not history.steps_count:
            history.last = events
        if events.count and (events.early_clip or events.has_clip or events.empty_clip):
            is_lost = not events.has_clip
            history.clips += Counter(steps=1, early=int(is_lost and not events.empty_clip), empty=int(is_lost and bool(events.empty_clip)))
            history.lost_clip = events.empty_clip or events.early_clip or history.lost_clip
        if not history.steps_count:
            states = (value for state in optimizer.state.values() for value in state.values())
            history.keeps_state = any(isinstance(value, torch.Tensor) and value.dim() for value in states)
        history.is_maximizing = any(group.get("maximize") for group in groups)
        history.is_scheduled = any("initial_lr" in group for group in groups)
        rates = {id(group): float(group["lr"]) for group in groups if isinstance(group.get("lr"), (int, float))}
        if history.kind in _DECAYING:
            shares = [rates.get(id(group), 0.0) * group["weight_decay"] for group in groups]
            history.decay = max(history.decay, *(share for share in shares if isinstance(share, float)), 0.0)
        fastest = max(rates, key=lambda key: rates[key], default=0)
        step.rate = rates.get(fastest, math.nan)
        if step.rate < self._rate:
            written, line = history.record.scheduled.get(fastest, (math.nan, None))
            fall = math.log(self._rate / step.rate) if step.rate > 0 else math.inf
            cause = line if written == step.rate else None
            history.falls[cause] = history.falls.get(cause, 0.0) + fall
        self._rate = step.rate
        self._open = {at: steps for at, steps in self._open.items() if steps.link is not Link.NONE}
        if not self._open:
            return
        by_parameter = [rates.get(id(group), math.nan) for group in groups for _ in group["params"]]
        present = {meter.places[at] for meter in self._meters for at in meter.present}
        for at, steps in self._open.items():
            steps.rate = by_parameter[at]
            if at not in present and parameters[at].grad is None:  # and not one that is laid out otherwise
                steps.add(Link.WITHOUT_GRADIENT if parameters[at].requires_grad else Link.FROZEN)

    def read(self) -> GradientStep | None:
        """The pending step, once: waits for the device. None where nothing is on its way."""
        step, self.pending = self.pending, None
        meters = [meter for meter in self._meters if meter.host is not None]
        if step is None or not meters:
            return None
        received = [meter.received() for meter in meters]
        for meter, (scalars, _) in zip(meters, received, strict=True):
            step.scalars |= scalars
            step.members |= {meter.places[at] for at in meter.present}
        norms = [norm for _, values in received for norm in values]
        step.norm = math.sqrt(sum(norm * norm for norm in norms))
        is_usual = step.norm <= _UNUSUAL * self._last_norm and min(norms, default=0.0) > 0 and not step.events.clips
        if is_usual and self._modules and self.history.record.write is None and not any(meter.is_sampled for meter in meters):
            step.unread = self._modules
            return step
        self._last_norm = step.norm
        self._by_module(step, list(zip(meters, (values for _, values in received), strict=True)))
        self._modules = tuple(step.numbers) if min(norms, default=0.0) > 0 else ()
        return step

    def _by_module(self, step: GradientStep, received: Sequence[tuple[StepMeter, Sequence[float]]]) -> None:
        """The numbers of each module, from the norms of the gradients of its parameters and the last samples."""
        sums: dict[ModuleSeries, list[float]] = {}
        clips = [(call, step.scalars[f"clip {at}"]) for at, call in enumerate(step.events.clips)]
        clipped = [(call.parameters, total / call.max_norm) for call, total in clips if total > call.max_norm > 0]
        for meter, norms in received:
            for at, left, sample in zip(meter.present, norms, meter.samples, strict=False):
                place = meter.places[at]
                norm = left * math.prod(factor for ids, factor in clipped if self.ids[place] in ids)
                row = sums.setdefault(self.series[place], [0.0] * 5)
                row[0] += norm * norm
                (weight, update, nonzero), count = sample, meter.counts[at]
                part = count / meter.sizes[at]
                row[1:] = row[1] + weight**2 * part, row[2] + update**2 * part, row[3] + count - nonzero * part, row[4] + count
                if meter.is_sampled:
                    ratio = update / max(weight, _USUAL_RMS * math.sqrt(meter.sizes[at]))
                    step.ratio_max = max(step.ratio_max or 0.0, ratio)
                    if place in self._open:
                        self._open[place].measured(norm, weight, ratio)
        for series, (squares, weights, updates, zeros, elements) in sums.items():
            weight_norm, update_norm = math.sqrt(weights), math.sqrt(updates)
            ratio = update_norm / weight_norm if weight_norm else (math.inf if update_norm else 0.0)
            pace = update_norm / max(weight_norm, _USUAL_RMS * math.sqrt(elements))
            step.numbers[series] = ModuleNumbers(math.sqrt(squares), ratio, zeros / elements, pace)


class StepMeter:
    """For parameters on one device: holds `_SAMPLE` elements of each, three times, and no tensor of the user's.

    Of a DTensor, the part in this process is measured.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], places: list[int]) -> None:
        self.places = places
        """Which of the optimizer's parameters these are."""
        self.device = parameters[places[0]].device
        real = [_real(local_of(parameters[place])) for place in places]
        self.counts = [tensor.numel() for tensor in real]
        self.sizes = [min(count, _SAMPLE) for count in self.counts]
        dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in real) else torch.float32
        self._buffer = torch.zeros(3, len(places), max(self.sizes), device=self.device, dtype=dtype)
        shapes = [tensor.shape if count <= _SAMPLE else (_SAMPLE,) for tensor, count in zip(real, self.counts, strict=True)]
        self._rows = [[part[at, : self.sizes[at]].view(shape) for at, shape in enumerate(shapes)] for part in self._buffer]
        """Weights before and after the update, and gradients."""
        self._norms: list[torch.Tensor] = []
        self.present: list[int] = []
        """Positions of the parameters that have a gradient in this step."""
        self.names: tuple[str, ...] = ()
        """Of the further scalars that were sent."""
        self.host: torch.Tensor | None = None
        """The numbers of a step on their way to the host, until they are received."""
        self._ready: torch.Event | None = None
        self._step = 0
        self.is_sampled = False
        self.samples: list[tuple[float, ...]] = []
        """Of each parameter that was present in the last step with a sample, the norms of weights and update, and how many elements of the
        gradient are not zero."""
        self._sampled: list[int] = []
        """What was present in the last step with a sample."""

    def before(self, parameters: Sequence[torch.Tensor], present: list[int]) -> None:
        """Take the weights as they are."""
        self.present = present
        self.is_sampled = self._step < _EACH_OF or self._step % _THEN_EVERY == 0 or present != self._sampled
        self._step += 1
        if self.is_sampled:
            self._sampled = present
            self._copy(0, [parameters[self.places[at]] for at in present])

    def gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the gradients of the parameters that are present and have one."""
        gradients = [(at, gradient_of(parameters[self.places[at]])) for at in self.present]
        self.present = [at for at, gradient in gradients if gradient is not None]
        known = [gradient for _, gradient in gradients if gradient is not None]
        if not known:
            return
        dense = [_real(one.coalesce()._values() if one.layout is torch.sparse_coo else one) for one in known]
        dtypes = {gradient.dtype for gradient in dense}
        self._norms = list(torch._foreach_norm(dense, 2, dtype=torch.float32 if dtypes & _HALF and torch.float64 not in dtypes else None))
        if self.is_sampled:
            self._copy(2, known)

    def after(self, parameters: Sequence[torch.Tensor], extras: dict[str, torch.Tensor]) -> None:
        """Take the weights after the update, and send all numbers to the host; no copy to a device waits for it."""
        device, dtype = self._buffer.device, self._buffer.dtype
        values = torch.stack([scalar.to(device, dtype, non_blocking=True) for scalar in (*self._norms, *extras.values())])
        self._norms = []
        if self.is_sampled:
            self._copy(1, [parameters[self.places[at]] for at in self.present])
            before, after, gradients = self._buffer
            weights, nonzero = torch.linalg.vector_norm(before, dim=1), gradients.ne_(0).sum(1)
            values = torch.cat([values, weights, torch.linalg.vector_norm(after.sub_(before), dim=1), nonzero])
        self.names = tuple(extras)
        self.host = values.to("cpu", non_blocking=True) if values.is_cuda else values  # into pinned memory
        if values.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(values.device))

    def received(self) -> tuple[dict[str, float], list[float]]:
        """What was sent, once: the further scalars, and the norms of the gradients of what was present. Waits for the device."""
        assert self.host is not None
        if self._ready is not None:
            self._ready.synchronize()
        values: list[float] = self.host.tolist()
        count = len(self.present)
        self.host, start = None, count + len(self.names)
        if self.is_sampled:
            self.samples = [tuple(values[start + at :: len(self.places)]) for at in self.present]
        return dict(zip(self.names, values[count:], strict=False)), values[:count]

    def _copy(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        """Samples of the present tensors into their rows."""
        rows, samples = [], []
        for at, tensor in zip(self.present, map(local_of, tensors), strict=True):
            row = self._rows[part][at]
            if tensor.layout is not torch.strided:
                row.fill_(1)  # of a sparse gradient the zeros are not stored
                continue
            rows.append(row)
            is_part = self.counts[at] > self.sizes[at] or tensor.is_complex()
            samples.append(_sample(_real(tensor), self.counts[at], self.sizes[at]) if is_part else tensor)
        if rows:
            torch._foreach_copy_(rows, samples)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """In this process; None where it is laid out otherwise than its parameter, as a sum that is yet to be made over the ranks."""
    gradient: Any = tensor.grad
    if gradient is None or not is_shard(gradient):
        return gradient  # type: ignore[no-any-return]
    weight: Any = tensor
    return local_of(gradient) if gradient.placements == weight.placements else None


def _sample(tensor: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """So many elements, equally spaced in memory: the same places of a weight at each step."""
    stride = count // size
    stride -= stride > 2 and stride % 2 == 0  # noqa: PLR2004 - odd, so that it is not a few columns; 1 would be the beginning alone
    if stride == 1 and tensor.numel() == size:
        return tensor
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):  # noqa: PLR2004
        return tensor.as_strided((size,), (stride,), tensor.storage_offset())
    return tensor.reshape(-1)[::stride][:size]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
