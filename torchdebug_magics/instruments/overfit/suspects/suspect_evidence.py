"""What the suspects are found by: the stalled training, and how the user writes what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.overfit.training.observed_step import Activation, called_name, line_of_step
from torchdebug_magics.instruments.overfit.training.training import Training
from torchdebug_magics.report import Location


@dataclass(eq=False)
class Evidence:
    """The stalled training."""

    base: Training
    names: Mapping[str, str]
    samples: int | None
    rates: tuple[float, ...] = ()
    """Learning rates of all groups, at the start."""
    decays: tuple[float, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    """All that the step can reach."""
    scales: tuple[float, ...] = ()
    """Of the gradient scalers in use."""
    unusual: Mapping[str, str] = field(default_factory=dict)
    """Modules whose initial weights are unusual, and in which way."""
    trial: list[Training] = field(default_factory=list)
    """The one that runs now, at the end."""

    def running(self) -> Training:
        """The present trial."""
        return self.trial[-1]

    @property
    def model(self) -> str:
        """How the user writes it."""
        return self.names.get("model") or next(iter(self.base.models), "model")

    @property
    def optimizer(self) -> str:
        """The same."""
        return self.names.get("optimizer", "optimizer")

    @property
    def subject(self) -> str:
        """``the 8 samples``."""
        return "the batch" if self.samples is None else f"the {plural(self.samples, 'sample')}"


def at_line(name: str, place: Location | None) -> Callable[[Any], bool]:
    """Whether a call of torch's is the one of that name at that line."""

    def is_it(function: Any) -> bool:
        if called_name(function) != name:
            return False
        return line_of_step() == place

    return is_it


def without(activation: Activation) -> Any:
    """The nonlinearity left out: its result is what it was given."""
    is_it = at_line(activation.name, activation.location)

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (_given, (args[0] if args else kwargs["input"],), {}) if is_it(function) else None

    return call


def _given(value: Any) -> Any:
    return value
