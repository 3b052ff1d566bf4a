"""Measures one optimizer step: full gradient norms, and weights before and after on a bounded sample of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Measured", "StepMeter"]

_SAMPLE = 1024
"""Elements of each parameter: a norm is then off by about 2%."""
_HALF = frozenset({torch.float16, torch.bfloat16})


class Reading(NamedTuple):
    """One step's numbers: a value for each parameter that had a gradient."""

    norms: list[float]
    weights: list[float]
    updates: list[float]
    nonzero: list[float]
    """Shares."""
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
    sizes: Sequence[int]

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
            self._reading = Reading(
                values[: len(self.present)],
                [before[at] for at in self.present],
                [change[at] for at in self.present],
                [nonzero[at] / self.sizes[at] for at in self.present],
                dict(zip(self.names, values[len(self.present) : start], strict=True)),
            )
        return self._reading


class StepMeter:
    """For parameters on one device: holds `_SAMPLE` elements of each, three times, and no tensor of the user's."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        wide = any(one.dtype in {torch.float64, torch.complex128} for one in tensors)
        self.sizes = [min(_real(one).numel(), _SAMPLE) for one in tensors]
        self.scales = [_real(one).numel() / size for one, size in zip(tensors, self.sizes, strict=True)]
        """By which a sampled sum of squares stands for that of the whole parameter."""
        most = max(self.sizes)
        self._buffer = torch.zeros(3, len(tensors), most, device=device, dtype=torch.float64 if wide else torch.float32)
        shapes = [_real(one).shape if _real(one).numel() == size else (size,) for one, size in zip(tensors, self.sizes, strict=True)]
        self._rows = [[self._buffer[part, at, :size].view(shapes[at]) for at, size in enumerate(self.sizes)] for part in range(3)]
        self._norms: list[torch.Tensor] = []
        self._present: list[int] = []

    @property
    def has_gradients(self) -> bool:
        """Whether there is anything to read of this step."""
        return bool(self._present)

    def before(self, tensors: Sequence[torch.Tensor], present: list[int]) -> None:
        """Take the weights as they are."""
        self._present = present
        self._copy(0, tensors)

    def gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the gradients of the tensors that are present and have one."""
        self._present = [at for at in self._present if tensors[at].grad is not None]
        if not self._present:
            return
        gradients = [_dense_gradient(tensors[at]) for at in self._present]
        dtypes = {one.dtype for one in gradients}
        self._norms = list(
            torch._foreach_norm(gradients, 2, dtype=torch.float32 if dtypes & _HALF and torch.float64 not in dtypes else None)
        )
        self._copy(2, [tensors[at].grad for at in range(len(tensors))], is_gradient=True)

    def after(self, tensors: Sequence[torch.Tensor], extras: dict[str, torch.Tensor]) -> Measured:
        """Take the weights after the update, and send all numbers to the host."""
        self._copy(1, tensors)
        buffer = self._buffer
        buffer[1].sub_(buffer[0])
        parts = [
            torch.stack(_alike(buffer, [*self._norms, *extras.values()])),
            torch.linalg.vector_norm(buffer[:2], dim=2).view(-1),
            buffer[2].ne_(0).sum(1),
        ]
        self._norms = []
        values = torch.cat(parts)
        if not values.is_cuda:
            return Measured(self._present, tuple(extras), values, None, self.sizes)
        host = values.to("cpu", non_blocking=True)  # into pinned memory
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(values.device))
        return Measured(self._present, tuple(extras), host, ready, self.sizes)

    def _copy(self, part: int, tensors: Sequence[torch.Tensor | None], *, is_gradient: bool = False) -> None:
        rows, samples = [], []
        for at in self._present:
            tensor, row = tensors[at], self._rows[part][at]
            assert tensor is not None
            if is_gradient and tensor.layout is not torch.strided:
                row.fill_(1)  # of a sparse gradient the zeros are not stored
                continue
            rows.append(row)
            samples.append(_sample(tensor, self.sizes[at]))
        if rows:
            torch._foreach_copy_(rows, samples)


def _sample(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """So many elements, equally spaced in memory: the same places of a weight at each step."""
    tensor = _real(tensor.detach())
    count = tensor.numel()
    if count == size:
        return tensor
    stride = count // size
    stride -= stride > 2 and stride % 2 == 0  # noqa: PLR2004 - odd, so that the sample is not of a few columns
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.contiguous_format):  # noqa: PLR2004
        return tensor.as_strided((size,), (stride,), tensor.storage_offset())
    return tensor.reshape(-1)[::stride][:size]


def _dense_gradient(tensor: torch.Tensor) -> torch.Tensor:
    gradient = tensor.grad
    assert gradient is not None
    gradient = gradient.detach()
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()._values()
    return _real(gradient)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _alike(buffer: torch.Tensor, scalars: list[torch.Tensor]) -> list[torch.Tensor]:
    """All on the device and of the dtype of `buffer`; no copy to a device waits for it."""
    device, dtype = buffer.device, buffer.dtype
    return [one if one.dtype is dtype and one.device == device else one.to(device, dtype, non_blocking=True) for one in scalars]
