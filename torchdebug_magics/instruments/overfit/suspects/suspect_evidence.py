"""What the suspects are found by, the stalled training, and the calls that a trial makes in place of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.overfit.training.change import OnCall
from torchdebug_magics.instruments.overfit.training.loss_calls import names_of
from torchdebug_magics.instruments.overfit.training.observed_step import called_name, line_of_step
from torchdebug_magics.instruments.overfit.training.training import Training
from torchdebug_magics.probing.state.snapshot import KeptState
from torchdebug_magics.report import Location


@dataclass(eq=False)
class TrainingEvidence:
    """The stalled training."""

    names: Mapping[str, str]
    start: KeptState
    base: Training = field(init=False)
    samples: int | None = None
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
    """The one that runs now."""

    def look(self, samples: int | None) -> None:
        """Once `base` was made, of so many samples, if they are known."""
        groups = [group for optimizer in self.base.optimizers for group in optimizer.param_groups]
        self.samples = samples if samples is not None else self.base.first.samples
        self.rates = tuple(float(group["lr"]) for group in groups if "lr" in group)
        self.decays = tuple(float(group["weight_decay"]) for group in groups if "weight_decay" in group)
        self.optimizers = tuple(self.start.of_kind(torch.optim.Optimizer))
        self.scales = tuple(float(one.get_scale()) for one in self.start.of_kind(torch.amp.GradScaler) if one.is_enabled())

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


def each(names: Iterable[str], act: Callable[[Any], object]) -> Callable[[Mapping[str, Any]], None]:
    """`act` on each module or parameter of these names."""
    wanted = tuple(names)

    def change(parts: Mapping[str, Any]) -> None:
        for name in wanted:
            if name in parts:
                act(parts[name])

    return change


def replaced(name: str, place: Location | None, function: Callable[..., Any]) -> OnCall:
    """``function(input)`` in place of the call of that name at that line."""

    def call(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if called_name(called) != name or line_of_step() != place or not (args or "input" in kwargs):
            return None
        return function, (args[0] if args else kwargs["input"],), {}

    return call


def itself(value: Any) -> Any:
    """What a call that is left out gives: its input."""
    return value


def of_changed(functions: Any, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], instead: Any = None) -> OnCall:
    """The same loss functions of changed (input, target), or `instead` of them without their options."""

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function not in functions:
            return None
        names = names_of(function)
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        values, target = change(*(given[name] for name in names))
        if instead is not None:
            return instead, (values, target), {}
        return function, (values, target, *args[2:]), {name: value for name, value in kwargs.items() if name not in given}

    return call
