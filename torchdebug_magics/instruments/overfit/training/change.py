"""One change of a training: what a trial does otherwise, and what it would mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torchdebug_magics.instruments.overfit.report import Cause
from torchdebug_magics.report import Location

OnCall: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]] | None]
"""The call that is made in place of a call of torch's, or None."""
Undo: TypeAlias = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class TrainingChange:
    """Exactly one thing that is done otherwise. Whatever it does to objects is undone with the trial."""

    suspect: Cause | None
    """None for what is not one of the suspects by name."""
    text: str
    """``learning rate x1000``: for the table of trials."""
    headline: str
    """What is wrong, should the trial learn."""
    fix: str
    parameters: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    factor: float | None = None
    location: Location | None = None
    module: str = ""
    on_models: Callable[[Mapping[str, Any]], None] | None = None
    """Before the first step: modules and parameters by name."""
    on_call: OnCall | None = None
    on_input: Callable[[torch.Tensor], torch.Tensor] | None = None
    """For each floating-point input of the outermost models."""
    on_update: Callable[[torch.optim.Optimizer], Undo | None] | None = None
    """Before each update; what it gives is called after it."""
    on_end: Undo | None = None
    """At the end of each step."""
    backward_scale: float = 1.0
    """By which all gradients are multiplied."""
    keeps_gradients: bool = False
    """Whether the update is made with the gradients of the backward pass, whatever has changed them since."""
    is_evident: bool = False
    """Whether it is a fault in any case, and named where no trial learns."""

    @property
    def can_be_tried(self) -> bool:
        """Whether it changes anything; what is only named has no trial."""
        hooks = (self.on_models, self.on_call, self.on_input, self.on_update, self.on_end)
        return any(hook is not None for hook in hooks) or self.keeps_gradients or self.backward_scale != 1.0


NOTHING = TrainingChange(suspect=None, text="", headline="", fix="")
"""The training as it is."""
