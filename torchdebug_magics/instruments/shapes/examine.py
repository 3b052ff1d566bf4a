"""``%shapes model x``: the table, from a run on fakes where that is possible and a real one where it is not."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import Examined
from torchdebug_magics.instruments.shapes.columns import layout
from torchdebug_magics.instruments.shapes.confirm import is_limit_of_fakes, real_error
from torchdebug_magics.instruments.shapes.faking import Fakes
from torchdebug_magics.instruments.shapes.forward import Forward, forward, zeros
from torchdebug_magics.instruments.shapes.inputs import Inputs, readings
from torchdebug_magics.instruments.shapes.parameters import packed_weights
from torchdebug_magics.instruments.shapes.tabulate import params_only, tabulated
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.rng import RandomState

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.report import Mode

__all__ = ["Seen", "examine", "see"]

_QUICK_FLOPS = 2e10
"""Up to here a real run, to confirm an error that no op raised, takes about a second."""


@dataclass(eq=False)
class Seen:
    """A forward, how it was run, and what has to be said about that."""

    model: torch.nn.Module
    run: Forward
    inputs: Inputs
    mode: Mode
    error: Exception | None
    """In torch's own words for real tensors; None where the forward came through."""
    notes: list[str] = field(default_factory=list)


def examine(
    model: torch.nn.Module,
    *args: Any,
    keywords: Mapping[str, Any] | None = None,
    real: bool = False,
    symbolic: bool = False,
    depth: int | None = None,
    columns: str = "",
    sort: str = "",
    plot: bool = False,
    strict: bool = False,
) -> Examined:
    """The report on ``model(*args, **keywords)``; a tuple of sizes stands for a tensor. The model is left exactly as it was.

    Raises `TorchDebugError` where the first value is no module. A forward that fails does not raise: see ``report.failure``.
    """
    if not isinstance(model, torch.nn.Module):
        msg = f"the first value is to be a torch.nn.Module, and this is a {type(model).__name__}: write `%shapes model input`"
        raise TorchDebugError(msg)
    shown = layout(depth=depth, columns=columns, sort=sort, plot=plot)
    if not args and not keywords:
        return Examined(params_only(_inner(model), shown))
    seen = see(model, args, dict(keywords or {}), real=real)
    return Examined(tabulated(seen, shown), seen.error if strict else None)


def see(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, real: bool = False) -> Seen:
    """Run under the likeliest reading of the arguments; under the next one where it fails and the arguments leave a choice."""
    model = _inner(model)
    notes: list[str] = []
    if any(isinstance(one, torch.nn.parameter.UninitializedTensorMixin) for one in model.parameters()):
        model = _sized(model, next(readings(model, args, kwargs)), notes)
    first: Seen | None = None
    for inputs in readings(model, args, kwargs):
        seen = _real(model, inputs) if real or _needs_data(model) else _fake(model, inputs)
        seen.notes += [*notes, *([inputs.note] if inputs.note else [])]
        if seen.error is None:
            return seen
        first = first or seen
        if not _might_be_the_reading(seen.error):
            break
    assert first is not None
    return first


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """What a compiler or DataParallel wraps."""
    inner = unwrapped(model)
    if isinstance(inner, torch.nn.DataParallel) and inner.device_ids:
        return unwrapped(inner.module)
    return inner


def _needs_data(model: torch.nn.Module) -> bool:
    """Scripted and quantised parts hold what fakes cannot stand for."""
    return any(isinstance(one, torch.jit.ScriptModule) or next(packed_weights(one), None) is not None for one in model.modules())


def _might_be_the_reading(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, (TypeError, AttributeError)) or any(word in text for word in ("Long", "Int", "index", "dtype", "integer"))


def _fake(model: torch.nn.Module, inputs: Inputs) -> Seen:
    mode: Mode = "meta" if any(one.device.type == "meta" for one in model.parameters()) else "fake"
    run = forward(model, inputs, Fakes())
    if run.error is None:
        return Seen(model, run, inputs, mode, None)
    error: Exception | None = run.error
    from_op = run.failed is not None and run.failed.error is run.error
    limited = is_limit_of_fakes(run.error)
    if from_op and run.failed is not None and not run.confirmed:
        tried, error = real_error(run.failed)
        limited = error is None if tried else limited
        error = error if tried else run.error
    if not limited and (from_op or run.flops > _QUICK_FLOPS):
        return Seen(model, run, inputs, mode, error)
    if mode == "meta":
        return Seen(model, run, inputs, mode, run.error, ["the weights are on `meta`, so that a real run could not confirm this"])
    for_real = _real(model, inputs)
    if for_real.error is None or limited:
        for_real.notes.append(f"run for real, as {_why(run.error)}")
        return for_real
    return Seen(model, run, inputs, mode, for_real.error)


def _real(model: torch.nn.Module, inputs: Inputs) -> Seen:
    run = forward(model, inputs, None)
    return Seen(model, run, inputs, "real", run.error)


def _why(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"the forward needs data ({type(error).__name__}{f': {first[:100]}' if first else ''})"


def _sized(model: torch.nn.Module, inputs: Inputs, notes: list[str]) -> torch.nn.Module:
    """A copy whose lazy parts have found their sizes; the user's own stays lazy."""
    sized = copy.deepcopy(model)
    given = inputs.made(sized, torch.clone, zeros)
    before = RandomState.take()
    try:
        with torch.no_grad(), contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sized(*given.args, **given.kwargs)  # what it raises is found again, and reported, by the run on fakes
    finally:
        before.put_back()
    notes.append("lazy modules were sized on a copy")
    return sized
