"""What a gradwatch session leaves behind: norms and ratios by module and step, and what is wrong with the training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torchdebug_magics.format import capitalised, listed, number, plural
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.report import Finding, FindingsReport, Stage, Status, located, short_title

GradKind: TypeAlias = Literal[
    "diverging",
    "exploding_spike",
    "dead",
    "vanishing",
    "too_fast",
    "not_learning",
    "ascending",
    "plateau_at_chance",
    "clipped_always",
    "clipped_never",
    "boundless",
    "remade",
    "decayed",
    "unscheduled",
    "mistimed",
    "stalled",
]
Values: TypeAlias = "list[float | None]"
"""One value for each bin of steps; None where the module had no gradient."""


@dataclass(frozen=True, kw_only=True)
class GradFinding(Finding):
    """One fault of a training."""

    kind: GradKind
    step: int = 0
    """The optimizer step at which it began, 0-based."""
    module: str | None
    """Module path; ``""`` for the model itself, None where the whole model is concerned."""
    value: float = 0.0
    """The number in the headline: a factor, a norm, a ratio, a number of steps or a loss."""
    goal: float = 0.0
    """Of a setting to be tried: the loss below which the training must come with it."""
    keeps_loss: bool = False
    """Of a change to be tried: whether the same loss is minimized with it, so that its numbers can be compared."""
    headline: str
    """Subject, verb, object; without the line."""
    explanation: str = ""
    excerpt: tuple[tuple[int, str], ...] = ()
    modules: tuple[str, ...] = ()
    """All modules concerned, where they are several."""
    last_step: int | None = None
    """The step at which it was recognized."""

    @property
    def stage(self) -> Stage:
        """Gradients and updates show what the code, or a setting, does; the order of its calls, its sign, what was tried, are the code."""
        is_code = self.kind in {"clipped_never", "ascending", "remade", "decayed", "unscheduled", "mistimed"}
        return "fault" if is_code or self.fix_state == "verified" else "symptom"

    def sentence(self) -> str:
        """The finding on one line."""
        return located(self.headline, self.location)

    def title(self) -> str:
        """The finding on one line, for a page on which the rest has rows of its own."""
        return short_title(self.headline, self.location)


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module over the whole session."""

    module: str
    type: str
    """Its class."""
    parameters_count: int
    steps_count: int
    """Steps in which it had a gradient."""
    norm_median: float | None
    """Of the last 64 steps, as the ratio."""
    norm_max: float | None
    ratio_median: float | None
    zero_share: float | None
    """Of its gradient's elements, in the last step."""


@dataclass(frozen=True, kw_only=True)
class GradReport(FindingsReport[GradFinding]):
    """What one `gradwatch` session measured and found."""

    modules: tuple[str, ...] = ()
    """Module paths in the order of the model; with several models, after the name of the variable."""
    norms: dict[str, Values] = field(default_factory=dict)
    """Gradient norm by module, the largest of each bin."""
    ratios: dict[str, Values] = field(default_factory=dict)
    """Update norm divided by weight norm, the largest of each bin."""
    zeros: dict[str, Values] = field(default_factory=dict)
    """Share of gradient elements that are zero, the smallest of each bin."""
    losses: Values = field(default_factory=list)
    """The mean of the tensors that backward() was called on, the last of each bin."""
    totals: Values = field(default_factory=list)
    """Norm of all gradients of a step, the largest of each bin."""
    steps_count: int = 0
    """Optimizer steps; optimizers that step in turn, as in a GAN, share a step."""
    steps_per_value: int = 1
    """Steps in a bin; 1 for runs of up to 256 steps."""
    backward_count: int = 0
    learning_rate: float | None = None
    """In the last step; None where it is not known."""
    rows: tuple[ModuleRow, ...] = ()
    nonfinite_step: int | None = None
    """The first step whose gradient norm is NaN or infinite."""
    untrained: tuple[str, ...] = ()
    """Modules that an optimizer holds, and that no update has changed: frozen, or without a gradient."""
    doubts: tuple[str, ...] = ()
    """Why the training is not healthy, with no fault proven: updates that end before the cell, a loss that does not beat guessing."""
    raised: str = ""
    """The type of the error that ended the cell."""

    @property
    def title(self) -> str:
        """The finding and its line, or what was checked."""
        if self.doubts:
            return self.sentence.partition(": ")[0]
        return self.sentence.partition("; ")[0] if self.finding is None else capitalised(self.finding.title())

    @property
    def status(self) -> Status:
        """``good`` only if updates were measured to the end of the cell, and nothing speaks against the training."""
        if self.finding is not None:
            return (
                "warn"
                if self.finding.kind in {"boundless", "clipped_always", "clipped_never", "unscheduled", "mistimed", "stalled"}
                else "bad"
            )
        if self.nonfinite_step is not None or self.doubts:
            return "warn"
        return "info" if self.raised or not self.rows else "good"


def compared(report: GradReport) -> Compared:
    """Whether it has a finding, and after how many steps."""
    worked = bool(report.steps_count or report.backward_count or report.found)
    return Compared(worked=worked, found_at=(report.finding.step, 0) if report.finding is not None else None)


def verdict(report: GradReport) -> GradReport:
    """The report with its sentence."""
    return replace(report, sentence=_sentence(report))


def _sentence(report: GradReport) -> str:
    until = f" until {report.raised}" if report.raised else ""
    if report.finding is not None:
        more = len(report.findings) - 1
        return capitalised(report.finding.sentence()) + (f" · and {plural(more, 'more finding')}" if more else "")
    if report.doubts and not report.steps_count:
        return f"No fault found, but {report.doubts[0]}"
    if not report.steps_count:
        passes = f": {plural(report.backward_count, 'backward pass', 'es')}, no optimizer step" if report.backward_count else ""
        return f"No optimizer step in this cell{until}: nothing to watch" if not passes else f"Nothing to watch{until}{passes}"
    if not report.rows or report.nonfinite_step is not None:
        without = f"No gradients to watch{until}: {plural(report.steps_count, 'optimizer step')} without gradients"
        broken = f"Gradients are NaN or inf from step {report.nonfinite_step} on, without growth before: `%%nanhunt` names the op"
        return broken if report.rows else without
    what = f"{plural(report.steps_count, 'step')} of {plural(len(report.modules), 'module')}{until}"
    if report.doubts:
        return f"No fault in {what}, but {report.doubts[0]}"
    known = [loss for loss in report.losses if loss is not None]
    change = f", loss {number(known[0])} -> {number(known[-1])}" if len(known) > 1 and not until else ""
    untrained = f"; not trained: {listed([f'`{name}`' for name in report.untrained])}" if report.untrained else ""
    return f"Gradients and updates look healthy: {what}{change}{untrained}"
