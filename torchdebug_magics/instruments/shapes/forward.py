"""One forward of a model, followed call by call and op by op, which leaves no trace in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.calls import Calls
from torchdebug_magics.instruments.shapes.dtypes import check_dtypes
from torchdebug_magics.instruments.shapes.faking import Fakes, ValueFailure
from torchdebug_magics.instruments.shapes.flops import FlopFormulas
from torchdebug_magics.instruments.shapes.ops import Arithmetic, Failed, Origins
from torchdebug_magics.instruments.shapes.parameters import Parameters
from torchdebug_magics.instruments.shapes.saved import Saved
from torchdebug_magics.instruments.shapes.untouched import untouched

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.inputs import Inputs

__all__ = ["Forward", "forward", "zeros"]


@dataclass(frozen=True, eq=False)
class Forward:
    """What was seen; `error` where it did not come through."""

    calls: Calls
    parameters: Parameters
    formulas: FlopFormulas
    flops: int
    saved_bytes: int
    given: Inputs
    """The tensors that the model was called with."""
    output: Any
    error: Exception | None
    failed: Failed | None
    confirmed: bool
    """Whether the error is one of real tensors, found beside the fakes."""

    @property
    def came_through(self) -> bool:
        """Whether the forward returned."""
        return self.error is None


def forward(
    model: torch.nn.Module,
    inputs: Inputs,
    fakes: Fakes | None,
    *,
    instead: Mapping[int, Callable[..., Any]] | None = None,
    trial: bool = False,
) -> Forward:
    """Call ``model(*inputs.args, **inputs.kwargs)`` on fakes, or for real where there are none.

    ``instead`` replaces single functions by their number in the run. A trial prints and warns nothing.
    """
    parameters = Parameters(model)
    device = "meta" if any(one.device.type == "meta" for one in model.parameters()) else ""
    calls = Calls(model, parameters, device)
    formulas, saved, origins = FlopFormulas(), Saved(calls), Origins(calls, dict(instead or {}))
    arithmetic = Arithmetic(calls, formulas, fakes, None if fakes is None else check_dtypes)
    stand_in = fakes.of if fakes is not None else _copied
    error: Exception | None = None
    output, confirmed = None, False
    given = inputs.made(model, stand_in, zeros if fakes is None else fakes.zeros)
    origins.begin(given.named_values())
    try:
        with ExitStack() as stack:
            if trial:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(untouched(model, stand_in if fakes is not None else _buffers_copied))
            saved.leave_out(model)
            calls.attach(stack)
            stack.enter_context(saved.counting())
            stack.enter_context(fakes.mode if fakes is not None else nullcontext())
            stack.enter_context(arithmetic)
            stack.enter_context(origins)
            output = model(*given.args, **given.kwargs)
    except ValueFailure as failure:
        confirmed = True
        error = failure.error.with_traceback(failure.__traceback__)
        if origins.failed is not None and origins.failed.error is failure:
            origins.failed = replace(origins.failed, error=error)
    except Exception as raised:  # noqa: BLE001 - whatever the user's forward raises is what is to be explained
        error = raised
    finally:
        calls.sweep()
    return Forward(calls, parameters, formulas, arithmetic.total, saved.total_bytes, given, output, error, origins.failed, confirmed)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """So that a forward that writes into its input leaves the user's alone."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() or tensor.is_complex() else copy


def _buffers_copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad else _copied(tensor)


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A real tensor for a described one."""
    return torch.zeros(sizes, dtype=dtype, device=device)
