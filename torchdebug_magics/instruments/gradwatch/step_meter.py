"""Measures one optimizer step: full gradient norms, and weights before and after on a bounded sample of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchdebug_magics.probing.shards import is_shard, local_of

__all__ = ["Measured", "StepMeter", "gradient_of"]

_SAMPLE = 1024
"""Elements of each parameter: a norm is then off by about 2%."""
_EACH_OF, _THEN_EVERY = 64, 4
"""Samples are taken at each of so many steps, then at every fourth one; gradient norms at each step, of all elements."""
_HALF = frozenset({torch.float16, torch.bfloat16})


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
