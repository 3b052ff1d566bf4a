"""The form of the corpus: a seeded training, what is wrong with it, and plain torch as its judge.

A build has `values` (model, batch, loss function, optimizer; or one callable that does a step) and `options`, as the magic takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Built", "Case", "healthy", "made", "planted", "train"]

Built = dict[str, Any]
"""``values``: the positional values of `overfit`; ``options``: its keywords."""
LEARNT, STALLED = 0.05, 0.2
"""Of the first loss above the floor: a repaired training ends below the one, a faulty training above the other."""


def made(*values: Any, **options: Any) -> Built:
    return {"values": values, "options": options}


def _step(built: Built) -> Callable[[], Any]:
    """One plain training step."""
    first, *rest = built["values"]
    if not isinstance(first, nn.Module):
        return first
    batch, loss_function, optimizer = (*rest, None, None, None)[:3]
    optimizer = optimizer or built["options"].get("optimizer") or torch.optim.AdamW(first.parameters(), lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        if isinstance(batch, Mapping):
            loss = first(**batch).loss
        else:
            *inputs, target = batch
            loss = loss_function(first(*inputs), target)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def train(built: Built, steps: int = 200, *, still: bool = False) -> list[float]:
    """The loss before each of the steps and after the last. They end at an exception, with NaN. `still`: all draw the same noise."""
    step, losses = _step(built), []
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for _ in range(steps + 1):
            if still:
                torch.manual_seed(1)
            try:
                losses.append(float(torch.as_tensor(step()).detach()))
            except (RuntimeError, ValueError, IndexError):
                return [*losses, math.nan]
    return losses


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training. What is None or empty is left open."""

    name: str
    build: Callable[[], Built]
    cause: str | tuple[str, ...] | None = None
    """The slug; several where each of these changes alone would make it learn, or where two slugs name the same fault: best first."""
    repair: Callable[[Built], Built] | None = None
    """The same training without the fault."""
    factor: tuple[float, float] | None = None
    """Bounds of the right answers: what the learning rate is to be multiplied by, or the loss as a multiple of a mean over the batch."""
    parameters: tuple[str, ...] | None = None
    """Those that are frozen, dead, unknown to the optimizer or badly initialized."""
    rows: tuple[int, ...] | None = None
    location_text: str | None = None
    """The line to blame, or a part of it; it is in the file of the build."""
    raises: bool = False
    """Whether plain torch raises at the first step."""
    passes: bool = False
    """Of healthy trainings: whether 200 steps bring the loss to its floor, if noise is held still."""
    floor: float = 0.0
    """The least loss that is possible without the fault."""

    @property
    def causes(self) -> tuple[str, ...]:
        return (self.cause,) if isinstance(self.cause, str) else self.cause or ()

    def learns(self, built: Built) -> bool:
        """Whether 200 plain steps bring it to the floor."""
        first, *_, last = train(built, still=self.passes)
        return math.isfinite(last) and abs(last - self.floor) <= LEARNT * (first - self.floor)

    def stalls(self, built: Built) -> bool:
        """Whether they leave it far from there: above it, below what the loss can mean, or not finite."""
        assert self.repair is not None
        (first, *_), (could_be, *_) = losses, _ = train(built), train(self.repair(built), steps=0)
        if self.raises:
            return len(losses) == 1 and math.isnan(first)
        could_fall = min(first, could_be) - self.floor
        return not -LEARNT * abs(could_fall) < losses[-1] - self.floor < STALLED * could_fall

    def check_fix(self, built: Built) -> bool:
        """Whether it learns once it is repaired by hand."""
        assert self.repair is not None
        return self.learns(self.repair(built))


def planted(*causes: str, **expected: Any) -> Callable[[Callable[[bool], Built]], Case]:
    """Make a case of a function that builds the training: with the fault, or, where its argument is true, without."""

    def case(build: Callable[[bool], Built]) -> Case:
        name = build.__name__.replace("_", "-")
        cause = causes[0] if len(causes) == 1 else causes
        return Case(name=name, cause=cause, build=lambda: _seeded(build, False), repair=lambda _: _seeded(build, True), **expected)

    return case


def healthy(*, floor: float = 0.0, passes: bool = True) -> Callable[[Callable[[], Built]], Case]:
    """Make a case of a function that builds a training without a fault."""

    def case(build: Callable[[], Built]) -> Case:
        return Case(name=build.__name__.replace("_", "-"), build=lambda: _seeded(build), passes=passes, floor=floor)

    return case


def _seeded(build: Callable[..., Built], *arguments: bool) -> Built:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(*arguments)
