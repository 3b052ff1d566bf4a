"""Overflow that a GradScaler skips by design, told from one that would happen at scale 1 too."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.nanhunt.causes.evidence import Context
from torchdebug_magics.instruments.nanhunt.finding import here
from torchdebug_magics.instruments.nanhunt.report import NanFinding, Sink
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.tensors import NAN, kind_of, largest

_HEADROOM = 1e4
_COLLAPSED_RUN = 20
"""Overflow steps in a row after which a scaler is not searching any more."""


class Overflows:
    """Counts the steps that a scaler skips; too many of them are a finding of their own."""

    def __init__(self) -> None:
        self.total = 0
        self.run = 0
        """In a row, up to now."""
        self._counted: set[int] = set()
        """Ids of the parameters of models with bad gradients from before this backward(), as in accumulation: the same skip."""

    def look_before(self, models: Iterable[torch.nn.Module]) -> None:
        """Right before a backward()."""
        self._counted.clear()
        for model in models if self.run else ():
            parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
            if not math.isfinite(largest(parameter.grad for parameter in parameters if parameter.grad is not None)):
                self._counted.update(map(id, parameters))

    def applied(self) -> None:
        """The last one was no skip: an update without a scaler was about to apply it."""
        self.total -= 1
        self.run = 0

    def count(self, leaves: dict[int, torch.Tensor], scalers: Sequence[Any], context: Context) -> NanFinding | None:
        """One more overflow, at the scale of these; a finding when it has collapsed. A scaled loss out of range alone skips nothing."""
        if not any(leaf.grad is not None and kind_of(leaf.grad) for key, leaf in leaves.items() if key not in self._counted):
            return None
        self.total += 1
        self.run += 1
        scale = min((scaler.get_scale() for scaler in scalers), default=math.inf)
        if scale >= 1.0 and self.run < _COLLAPSED_RUN:
            return None
        return NanFinding(
            kind="inf",
            phase="backward",
            location=here(),
            step=context.step,
            backward=context.backward,
            diagnosis="scale_collapse",
            sink=Sink("gradient"),
            sink_kind="inf",
            weights="weights untouched",
            explanation=f"the GradScaler skipped {plural(self.run, 'step')} in a row, and its scale fell to {scale:g}: nothing is trained",
            fix="rerun the cell without the scaler and autocast to find the op, or use bfloat16, which needs no scaler",
        )


def live_scalers() -> list[Any]:
    """Every enabled scaler that has scaled something."""
    return [one for one in live(GradScaler) if getattr(one, "_enabled", False) and isinstance(one._scale, torch.Tensor)]


@contextlib.contextmanager
def at_scale_one(scalers: Iterable[Any]) -> Iterator[list[Any]]:
    """The scalers multiply by 1 inside, by what they did outside. Yields those that were used inside: others may only be lying about."""
    used: list[Any] = []
    with contextlib.ExitStack() as stack:
        for scaler in scalers:
            stack.callback(vars(scaler).update, dict(vars(scaler)))
            stack.callback(vars(scaler).clear)
            scaler.scale = _Noted(scaler, used)
            scaler._scale = torch.ones_like(scaler._scale)
        yield used


class _Noted:
    """In place of a scaler's `scale`. An object of ours, as a replay puts back what can be reached through any other."""

    def __init__(self, scaler: Any, used: list[Any]) -> None:
        self._scaler = scaler
        self._scale = scaler.scale
        self._used = used

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._used.append(self._scaler)
        return self._scale(*args, **kwargs)


def may_be_scaling(loss: Iterable[torch.Tensor], scalers: Iterable[Any], losses: Sequence[float]) -> bool:
    """Whether a scaler can be what made a step bad that cannot be run again, at scale 1, to see.

    No scaler makes NaN of a finite loss. Infinity it does, if the losses before, or one of ordinary size, come close to it by its scale.
    """
    kinds = [kind_of(one) for one in loss]
    if any(kind & NAN for kind in kinds):
        return False
    if not any(kinds):
        return True
    usual = max((abs(loss) for loss in losses if math.isfinite(loss)), default=max((scaler.get_scale() for scaler in scalers), default=0.0))
    largest = min((torch.finfo(one.dtype).max for one in loss if one.is_floating_point()), default=math.inf)
    return usual > largest / _HEADROOM


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler told this (fused) optimizer to skip its step."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())
