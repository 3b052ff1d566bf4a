"""Plain torch as the judge of a training: how its loss goes in 200 steps, without any instrument."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.doors import positional_and_named
from tests.plants.running import run_plainly

if TYPE_CHECKING:
    from tests.plants.plant import Plant

LEARNED, STALLED = 0.05, 0.2
"""Of the first loss above the floor: a repaired training ends below the one, a faulty training above the other."""


class Training:
    """A training that a plain run of a plant has prepared."""

    def __init__(self, namespace: dict[str, Any], subjects: Iterable[str]) -> None:
        self.namespace = namespace
        values, named = positional_and_named(tuple(subjects), namespace)
        self.model, self.batch, self.loss_function, self.optimizer = (*values, None, None, None)[:4]
        self.optimizer = named.get("optimizer", self.optimizer)

    @property
    def inputs_and_targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last tensor of the batch."""
        if self.batch is None:
            return self.namespace["x"], self.namespace["y"]
        return (self.batch["input_ids"], self.batch["labels"]) if isinstance(self.batch, Mapping) else (self.batch[0], self.batch[-1])

    def losses(self, steps: int = 200, *, still: bool = False) -> list[float]:
        """The loss before each step and after the last, up to an exception, which is NaN. `still`: all steps draw the same noise."""
        step, losses = self._step(), []
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

    def _step(self) -> Callable[[], Any]:
        if not isinstance(self.model, nn.Module):
            return self.model
        optimizer = self.optimizer or torch.optim.AdamW(self.model.parameters(), lr=1e-2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            if isinstance(self.batch, Mapping):
                loss = self.model(**self.batch).loss
            else:
                *inputs, target = self.batch
                loss = self.loss_function(self.model(*inputs), target)
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)


def prepared(plant: Plant) -> Training:
    """The training of a plant, before its first step."""
    with tempfile.TemporaryDirectory() as folder:
        return Training(run_plainly(plant, Path(folder)), plant.subjects)


@functools.cache
def plain_losses(plant: Plant, *, repaired: bool = False) -> tuple[float, ...]:
    """The losses of the plant, or of its repair: trained once, however many tests read them."""
    return tuple(prepared(plant.repaired() if repaired else plant).losses(still=plant.healthy))


def learned(losses: Iterable[float], floor: float = 0.0) -> bool:
    """Whether the last loss is at the floor."""
    first, *_, last = losses
    return math.isfinite(last) and abs(last - floor) <= LEARNED * (first - floor)


def stalled(losses: Iterable[float], repaired_losses: Iterable[float]) -> bool:
    """Whether the last loss is far from zero: above, below what the loss can mean, or not finite."""
    (first, *_, last), (could_be, *_) = losses, repaired_losses
    could_fall = min(first, could_be)
    return not -LEARNED * abs(could_fall) < last < STALLED * could_fall


def raised(losses: tuple[float, ...]) -> bool:
    """Whether the first step failed."""
    return len(losses) == 1 and math.isnan(losses[0])
