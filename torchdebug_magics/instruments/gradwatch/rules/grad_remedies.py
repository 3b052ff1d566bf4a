"""Fixes as code to paste, with values derived from the measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchdebug_magics.format import listed, number

if TYPE_CHECKING:
    from torchdebug_magics.instruments.gradwatch.step_history import StepHistory

__all__ = ["activations", "clip_at", "learning_rate", "rounded"]

_USUAL_RATIO = 1e-3
"""Usual ratio of update norm to weight norm."""
_SATURATING = frozenset({"Hardtanh", "LogSigmoid", "Sigmoid", "Softsign", "Tanh"})


def rounded(value: float) -> float:
    """The value rounded to one significant digit."""
    return float(f"{value:.0e}") if math.isfinite(value) and value > 0 else value


def learning_rate(history: StepHistory, *, ratio: float | None = None, factor: float | None = None) -> str:
    """A learning rate that gives updates of the usual size, or one changed by a factor."""
    rate = history.moments[-1].rate if history.moments else math.nan
    factor = _USUAL_RATIO / ratio if factor is None and ratio else factor or 0.1
    if not rate > 0 or not math.isfinite(rate * factor):
        return f'set the learning rate: `for group in {history.name}.param_groups: group["lr"] = 1e-3`'
    new = rounded(rate * factor)
    word = "lower" if factor < 1 else "raise"
    return (
        f'{word} the learning rate from {number(rate)} to {number(new)}: `for group in {history.name}.param_groups: group["lr"] = {new:g}`'
    )


def clip_at(usual_norm: float, history: StepHistory) -> str:
    """Clipping at a norm that leaves usual gradients unchanged."""
    limit = rounded(2 * usual_norm)
    group = f'[p for group in {history.name}.param_groups for p in group["params"]]'
    return f"clip before `{history.name}.step()`: `torch.nn.utils.clip_grad_norm_({group}, max_norm={limit:g})`"


def activations(kinds: frozenset[str]) -> str:
    """The fix for gradients that vanish layer by layer."""
    used = sorted(kinds & _SATURATING)
    if used:
        return f"replace {listed([f'`nn.{one}()`' for one in used])} with `nn.ReLU()`; or add skip connections or normalization"
    return "add skip connections, `x + layer(x)`, or normalization, `nn.LayerNorm(width)`, between the layers"
