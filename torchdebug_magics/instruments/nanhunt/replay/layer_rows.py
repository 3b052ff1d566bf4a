"""Per module call: what its output held, and the gradient that came back to it."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.nanhunt.report import LayerRow
from torchdebug_magics.probing.hooks import Hook
from torchdebug_magics.probing.modules import Call, ModuleCalls
from torchdebug_magics.probing.tensors import dense, kind_of, sizes_of, tensors_in

_FP16_MAX = 65504.0


@dataclass
class _Numbers:
    """Counts and extremes of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    nan_count: int
    posinf_count: int
    neginf_count: int
    min: float | None
    max: float | None
    mean_abs: float | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Numbers | None:
        numbers = dense(tensor)
        if numbers is None:
            return None
        values = numbers.abs() if numbers.is_complex() else numbers
        is_bad = bool(kind_of(values))
        finite = values[torch.isfinite(values)] if is_bad else values
        low, high, mean_abs = _extremes(finite)
        return cls(
            shape=sizes_of(tensor),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nan_count=int(torch.isnan(values).sum()) if is_bad else 0,
            posinf_count=int((values == math.inf).sum()) if is_bad else 0,
            neginf_count=int((values == -math.inf).sum()) if is_bad else 0,
            min=low,
            max=high,
            mean_abs=mean_abs,
        )


def _extremes(finite: torch.Tensor) -> tuple[float | None, float | None, float | None]:
    """(min, max, mean magnitude); Nones for nothing."""
    if not finite.numel():
        return None, None, None
    low, high = torch.aminmax(finite)
    total = torch.linalg.vector_norm(finite, 1, dtype=torch.float64 if finite.dtype is torch.float64 else torch.float32)
    return float(low), float(high), float(total) / finite.numel()


@dataclass
class _Row:
    call: Call
    output: _Numbers
    gradient: _Numbers | None = None

    def frozen(self) -> LayerRow:
        out, grad = self.output, self.gradient
        extreme = None if out.min is None or out.max is None else max(abs(out.min), abs(out.max))
        return LayerRow(
            module=self.call.path,
            type=self.call.type,
            call=self.call.number,
            shape=out.shape,
            dtype=out.dtype,
            nan_count=out.nan_count,
            posinf_count=out.posinf_count,
            neginf_count=out.neginf_count,
            min=out.min,
            max=out.max,
            mean_abs=out.mean_abs,
            fp16_share=None if extreme is None else extreme / _FP16_MAX,
            grad_nan_count=None if grad is None else grad.nan_count,
            grad_inf_count=None if grad is None else grad.posinf_count + grad.neginf_count,
            grad_max_abs=None if grad is None or grad.min is None or grad.max is None else max(abs(grad.min), abs(grad.max)),
            grad_mean_abs=None if grad is None else grad.mean_abs,
        )


class LayerWatch:
    """Collects a row for every module call while attached. Attach it before the `ModuleCalls` it asks, so that its calls still run."""

    def __init__(self, calls: ModuleCalls) -> None:
        self._calls = calls
        self._hooks = calls.hooks
        self._rows: list[_Row] = []

    def attach(self, stack: ExitStack) -> None:
        """Collect until the stack closes."""
        self._hooks.module_calls(stack, _nothing, self._leave)

    def rows(self) -> tuple[LayerRow, ...]:
        """What was collected, in the order the calls ended."""
        return tuple(row.frozen() for row in self._rows)

    def _leave(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        call = self._calls.current
        if call is None or call.module is not module:
            return
        for tensor in tensors_in(output):
            with _disable_current_modes(), torch.no_grad():
                numbers = _Numbers.of(tensor)
            if numbers is not None:
                row = _Row(call, numbers)
                self._rows.append(row)
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(Hook(self._hooks, lambda gradient, row=row: self._gradient(row, gradient)))
            return  # the first tensor stands for the call

    @staticmethod
    def _gradient(row: _Row, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        with _disable_current_modes(), torch.no_grad():
            row.gradient = _Numbers.of(gradient)


def _nothing(*_: Any) -> None:
    """Before a call there is nothing to see."""
