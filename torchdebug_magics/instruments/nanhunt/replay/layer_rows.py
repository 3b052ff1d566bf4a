"""Per module call: what its output held, and the gradient that came back to it."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.nanhunt.report import LayerRow
from torchdebug_magics.probing.hooks import Hook
from torchdebug_magics.probing.modules import Call, ModuleCalls
from torchdebug_magics.probing.tensors import dense, kind_of, sizes_of, tensors_in

_FP16_MAX = 65504.0


def _row(call: Call, tensor: torch.Tensor) -> LayerRow | None:
    """What an output holds; None for a kind of tensor whose numbers cannot be read."""
    numbers = dense(tensor)
    if numbers is None:
        return None
    values = numbers.abs() if numbers.is_complex() else numbers
    is_bad = bool(kind_of(values))
    low, high, mean_abs = _extremes(values[torch.isfinite(values)] if is_bad else values)
    return LayerRow(
        module=call.path,
        type=call.type,
        call=call.number,
        shape=sizes_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nan_count=int(torch.isnan(values).sum()) if is_bad else 0,
        posinf_count=int((values == math.inf).sum()) if is_bad else 0,
        neginf_count=int((values == -math.inf).sum()) if is_bad else 0,
        min=low,
        max=high,
        mean_abs=mean_abs,
        fp16_share=None if low is None or high is None else max(abs(low), abs(high)) / _FP16_MAX,
    )


def _extremes(finite: torch.Tensor) -> tuple[float | None, float | None, float | None]:
    """(min, max, mean magnitude); Nones for nothing."""
    if not finite.numel():
        return None, None, None
    low, high = torch.aminmax(finite)
    total = torch.linalg.vector_norm(finite, 1, dtype=torch.float64 if finite.dtype is torch.float64 else torch.float32)
    return float(low), float(high), float(total) / finite.numel()


class LayerWatch:
    """Collects a row for every module call while attached. Attach it before the `ModuleCalls` it asks, so that its calls still run."""

    def __init__(self, calls: ModuleCalls) -> None:
        self._calls = calls
        self._hooks = calls.hooks
        self._rows: list[LayerRow] = []

    def attach(self, stack: ExitStack) -> None:
        """Collect until the stack closes."""
        self._hooks.module_calls(stack, _nothing, self._leave)

    def rows(self) -> tuple[LayerRow, ...]:
        """What was collected, in the order the calls ended."""
        return tuple(self._rows)

    def _leave(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        call = self._calls.current
        if call is None or call.module is not module:
            return
        for tensor in tensors_in(output):
            with _disable_current_modes(), torch.no_grad():
                row = _row(call, tensor)
            if row is not None:
                self._rows.append(row)
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(Hook(self._hooks, partial(self._gradient, call, len(self._rows) - 1)))
            return  # the first tensor stands for the call

    def _gradient(self, call: Call, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        with _disable_current_modes(), torch.no_grad():
            came = _row(call, gradient)
        if came is not None:
            self._rows[place] = replace(
                self._rows[place],
                grad_nan_count=came.nan_count,
                grad_inf_count=came.posinf_count + came.neginf_count,
                grad_max_abs=None if came.min is None or came.max is None else max(abs(came.min), abs(came.max)),
                grad_mean_abs=came.mean_abs,
            )


def _nothing(*_: Any) -> None:
    """Before a call there is nothing to see."""
