"""Whether a model learns a few samples, and if not, the one change with which it does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torchdebug_magics.format import number, plural
from torchdebug_magics.report import Finding, Report

Cause = Literal[
    "frozen", "learning_rate", "reduction", "double_softmax", "wrong_loss_input", "target_shape", "off_by_one_labels",
    "conflicting_labels", "dead_units", "bad_init", "stale_optimizer", "cut_graph", "zero_grad_missing", "weight_decay", "clipping",
    "batchnorm_of_one", "output_ignores_input", "input_scale", "capacity",
]  # fmt: skip
LEAVES = "everything is as it was before the training"
"""How an error or an interrupt leaves everything: `Instrument.leaves`."""


@dataclass(frozen=True)
class Trial:
    """One training from the same start, with one change."""

    suspect: Cause | None
    change: str
    """What the trial changed."""
    last_loss: float
    learns: bool
    steps: int = 0
    error: str = ""
    """What the trial raised."""


@dataclass(frozen=True, kw_only=True)
class OverfitReport(Finding, Report):
    """A training on a few samples, repeated, and the trials that explain why it stalls."""

    passed: bool
    losses: tuple[float, ...] = ()
    """Loss at each step."""
    samples: int | None = None
    """Samples in the repeated batch; None where unknown."""
    headline: str = ""
    """What is wrong, in one sentence; empty if the training passed, or no cause was found."""
    cause: Cause | None = None
    verified: bool = False
    """Whether a training with the change of `fix` learned the samples."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters concerned."""
    rows: tuple[int, ...] = ()
    """Rows of the batch concerned."""
    factor: float | None = None
    """Factor by which to multiply the learning rate; or the loss as a multiple of its mean."""
    excerpt: tuple[tuple[int, str], ...] = ()
    """The lines around `location`."""
    module: str = ""
    """Path of the module concerned."""
    trials: tuple[Trial, ...] = ()
    leaks: tuple[int, ...] = ()
    """Samples that the output for sample 0 depends on, in evaluation mode."""
    floor: float | None = None
    """The minimum of the loss; None where the loss is not one of PyTorch's."""
    chance: float | None = None
    """The loss of the best constant prediction."""
    floor_name: str = ""
    """The known value at which the loss stalls, such as ``ln 10``."""
    cured_losses: tuple[float, ...] = ()
    """Loss at each step, with the change of `fix`."""
    held_still: tuple[str, ...] = ()
    """What was the same in every step."""
    reason: str = ""
    """Why no cause is named."""
    error: str = ""
    """What the training raised."""
    seconds_s: float = 0.0

    @property
    def first_loss(self) -> float:
        """At step 0; NaN where no step was completed."""
        return self.losses[0] if self.losses else math.nan

    @property
    def last_loss(self) -> float:
        """At the last step."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def is_stopped(self) -> bool:
        """Whether an interrupt has ended the training."""
        return self.cut_short == KeyboardInterrupt.__name__

    @property
    def subject(self) -> str:
        """``8 samples``, or ``the batch``."""
        return "the batch" if self.samples is None else plural(self.samples, "sample")

    @property
    def loss_change(self) -> str:
        """``loss 1.4 -> 0.02 in 60 steps``."""
        return f"loss {number(self.first_loss)} -> {number(self.last_loss)} in {plural(len(self.losses), 'step')}"

    @property
    def why(self) -> str:
        """The reason in the headline, which follows its colon; where no cause is named, what was tried or what remains wrong."""
        return self.headline.partition(": ")[2] if self.headline else self.reason.removeprefix("but ")

    @property
    def title(self) -> str:
        """The cause or the result, without the reason."""
        return self._words()[0]

    @property
    def verdict(self) -> str:
        """Whether the samples were learned; if not, why."""
        return "".join(self._words())

    def _words(self) -> tuple[str, str]:
        """(the title, what follows it in the verdict)."""
        if self.headline:
            title, colon, why = self.headline.partition(": ")
            return title, f"{colon}{why}"
        if not self.losses and not self.error:
            return "No training step was seen", f": {self.reason}"
        if self.error and not self.passed:
            kind, colon, message = self.error.partition(": ")
            return f"The step fails: {kind}", f"{colon}{message}"
        if self.is_stopped:
            return f"Stopped: {self.loss_change}", f" · {self.reason}"
        reason = f" ({self.reason})" if self.passed else f" · {self.reason}"
        result = f"The model {'overfits' if self.passed else 'does not overfit'} {self.subject}: {self.loss_change}"
        return result, reason if self.reason else ""


@dataclass(frozen=True)
class Progress:
    """What the live view shows."""

    doing: str
    losses: tuple[float, ...]
