"""The sizes of the input that would fit, found by trying: ``input of 22 x 22 to 25 x 25``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, facts_of
from torchdebug_magics.instruments.shapes.repair.rules import Diagnosis, diagnosis
from torchdebug_magics.instruments.shapes.report import Fix

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.trial import Trials

__all__ = ["fitting_sizes"]

_LARGEST = 2048
_ALONG: dict[int, tuple[type[torch.nn.Module], ...]] = {
    1: (torch.nn.Conv1d, torch.nn.ConvTranspose1d, torch.nn.MaxPool1d, torch.nn.AvgPool1d),
    2: (torch.nn.Conv2d, torch.nn.ConvTranspose2d, torch.nn.MaxPool2d, torch.nn.AvgPool2d),
    3: (torch.nn.Conv3d, torch.nn.ConvTranspose3d, torch.nn.MaxPool3d, torch.nn.AvgPool3d),
}
"""What makes the last dimensions of an input its height and width."""
_MOST = 14
"""How many sizes are tried."""


def fitting_sizes(facts: Facts, found: Diagnosis, trials: Trials) -> tuple[Fix, ...]:
    """One, where the mismatching size grows with the input's height and width (or length), and some size lets the forward through."""
    named = next(((name, tensor) for name, tensor in facts.inputs if tensor.dim() in {3, 4, 5} and tensor.is_floating_point()), None)
    if (found.fit is None and not found.rounded) or named is None:
        return ()
    name, tensor = named
    spatial = tensor.dim() - 2
    if not found.rounded and not any(isinstance(one, _ALONG[spatial]) for one in facts.modules.values()):
        return ()
    now = tensor.shape[-1]
    if len(set(tensor.shape[2:])) != 1 or now < 2:
        return ()
    trials.allow(2 * _MOST)
    search = _Search(facts, name, tensor, spatial, trials)
    if found.fit is None:
        return search.multiple(now)
    first = search.smallest(now, found.fit)
    if first is None or first < _largest_kernel(facts, spatial):  # a kernel would see but the padding
        return ()
    if now < first and all(search.outcome(size) == 0 for size in (first + 1, 4 * first)):
        return (_fix(name, f"{_shown(first, spatial)} or more"),)
    last = search.largest(first)
    if last is None:  # a range is stated where it ends where it is said to
        return (_fix(name, f"{_shown(first, spatial)}, for example"),)
    shown = _shown(first, spatial) if first == last else f"{_shown(first, spatial)} to {_shown(last, spatial)}"
    return (_fix(name, shown),)


def _fix(name: str, shown: str) -> Fix:
    return Fix(code=f"input of {shown}", verified=True, why=f"`{name}` of a size that fits the model as it is")


def _largest_kernel(facts: Facts, spatial: int) -> int:
    kernels = [getattr(one, "kernel_size", 1) for one in facts.modules.values() if isinstance(one, _ALONG[spatial])]
    return max((max(one) if isinstance(one, tuple) else int(one) for one in kernels), default=1)


class _Search:
    """How the failing size compares with the wanted one, by the size of the input."""

    def __init__(self, facts: Facts, name: str, tensor: torch.Tensor, spatial: int, trials: Trials) -> None:
        self._facts = facts
        self._name = name
        self._tensor = tensor
        self._spatial = spatial
        self._trials = trials
        self._known: dict[int, int | None] = {}

    def outcome(self, size: int) -> int | None:
        """0 where the forward succeeds, -1 where the input is too small, 1 where too large; None where it is unknown."""
        if size not in self._known:
            self._known[size] = self._tried(size) if size >= 1 and len(self._known) < _MOST * 2 and self._trials.left else None
        return self._known[size]

    def _tried(self, size: int) -> int | None:
        sizes = (*self._tensor.shape[:2], *([size] * self._spatial))
        change = Change(str, lambda one: one.new_zeros(sizes))
        run = self._trials.run([Edit("", inputs={self._name: change})])
        if run is None:
            return None
        if run.error is None:
            return 0
        facts = facts_of(run, guard=self._trials.guard)
        fit = diagnosis(facts).fit
        if fit is None:  # it may have broken before it came there: too small for a kernel or a pool
            return -1 if "small" in facts.text or "greater than" in facts.text else None
        return -1 if fit[0] < fit[1] else 1

    def largest(self, first: int) -> int | None:
        """The largest size up to which all fit, from one that does; None where it was not found in so many trials."""
        last, gap = first, 1
        while (outcome := self.outcome(last + gap)) == 0:
            last, gap = last + gap, 2 * gap
        while gap > 1 and outcome is not None:
            gap //= 2
            outcome = self.outcome(last + gap)
            last += gap if outcome == 0 else 0
        return None if outcome is None else last

    def multiple(self, now: int) -> tuple[Fix, ...]:
        """The next multiple of 2, 4, 8, 16 or 32 that fits, where the next one after it fits, too."""
        for step in (2, 4, 8, 16, 32):
            first = -(-now // step) * step
            if now % step and self.outcome(first) == 0 and self.outcome(first + step) == 0:
                found = _fix(self._name, _shown(first, self._spatial))
                return (replace(found, why=f"{found.why}: a multiple of {step}"),)
        return ()

    def smallest(self, now: int, fit: tuple[int, int]) -> int | None:
        """The smallest size that is not too small, if it fits."""
        low, high = (now, None) if fit[0] < fit[1] else (0, now)
        size = now
        while high is None:
            size *= 2
            outcome: Any = self.outcome(size)
            if size > _LARGEST or outcome is None:
                return None
            if outcome >= 0:
                high = size
            else:
                low = size
        while high - low > 1:
            middle = (low + high) // 2
            outcome = self.outcome(middle)
            if outcome is None:
                return None
            low, high = (middle, high) if outcome < 0 else (low, middle)
        return high if self.outcome(high) == 0 else None


def _shown(size: int, spatial: int) -> str:
    return f"length {size}" if spatial == 1 else " x ".join([str(size)] * spatial)
