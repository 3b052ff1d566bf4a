"""What an autograd session leaves behind: the error that ended the cell, or the faults that raised no error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torchdebug_magics.format import listed, plural, share
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.report import Finding, FindingsReport, Location, Stage, Status, located, short_title

Kind: TypeAlias = Literal[
    "inplace", "second_backward", "cut", "leaf_inplace", "view_inplace", "non_scalar", "inference_tensor", "unused_input", "integer_grad",
    "custom_function", "checkpoint_mismatch", "no_double_backward", "other",
    "stale_value", "no_gradient", "not_in_optimizer", "stale_optimizer", "never_stepped", "zeroed_before_step", "never_zeroed",
    "stepped_without_backward", "grad_disabled", "train_in_eval_mode", "eval_in_train_mode", "double_softmax", "leaking_batch",
    "broadcast", "shared_memory", "frozen_statistics", "wrong_backward", "scrambled", "wasted_term", "no_activation", "no_batches",
    "sorted_batches", "unread_batches", "compared_scores", "miscounted", "frozen_in_vain", "one_row", "early_reduction",
    "dropped_result", "contradicting_labels", "evaluated_on_training", "loss_input", "evaluated_on_bytes",
    "remade", "other_axis", "unlike_reductions", "driven_value", "overwritten_input", "repeated_samples", "mixed_derivatives",
    "never_loaded", "known_answer", "used_up", "turned_mask", "refitted",
]  # fmt: skip
"""The first thirteen are errors that PyTorch raises; the others change what a model learns, and raise nothing."""
Cause: TypeAlias = Literal["no_grad", "inference_mode", "detach", "data", "rewrapped", "list", "dtype"]
"""What cuts a graph; ``list``: a list of tensors that is copied into a new one; ``dtype``: an integer or bool result."""
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_CUTTERS: dict[str, str] = {
    "no_grad": "`no_grad`", "inference_mode": "`inference_mode`", "detach": "`detach`", "data": "`.data`",
    "rewrapped": "a copy into a new tensor", "list": "a copy into a new tensor",
}  # fmt: skip


def cutter(cause: Cause, op: str) -> str:
    """What cuts a graph, as the subject of a sentence."""
    return _CUTTERS.get(cause, "a comparison" if op in COMPARISONS else f"`{op}`, which has no derivative,")


@dataclass(frozen=True, kw_only=True)
class AutogradFinding(Finding):
    """One error of autograd, or one silent fault."""

    kind: Kind
    raised: bool
    """Whether an error ended the cell; False for a fault that raised nothing."""
    headline: str
    """Subject, verb, object; without the line."""
    op: str | None = None
    """The op that saved the tensor, or that cut the graph; ATen name without overload."""
    saved_at: Location | None = None
    """Where `op` saved the tensor for backward."""
    first_backward_at: Location | None = None
    shared_from: Location | None = None
    """Where the part of the graph that two backward passes share was computed."""
    writer_op: str | None = None
    """The op that overwrote the tensor."""
    tensor: str | None = None
    """The variable, parameter or buffer concerned, as in the code or in `state_dict`."""
    module: str | None = None
    """Module path; None outside every module."""
    parameters: tuple[str, ...] = ()
    """Names as in `named_parameters()`."""
    error_ratio: float | None = None
    """For ``stale_value``: the norm of the gradient's error, divided by the norm of the true gradient."""
    explanation: str = ""
    excerpt: tuple[tuple[int, str], ...] = ()
    """The lines around `location`."""
    is_hint: bool = False
    """Whether the finding may be intended."""

    @property
    def stage(self) -> Stage:
        """What raised nothing may have led to whatever is seen later; a hint explains nothing."""
        if self.kind in {"no_activation", "miscounted", "compared_scores"}:
            return "remark"
        return "end" if self.raised else "symptom" if self.is_hint else "fault"

    def sentence(self) -> str:
        """The finding on one line, with the parameters concerned and the error of the gradient."""
        names = f" · {listed([f'`{name}`' for name in self.parameters])}" if len(self.parameters) > 1 else ""
        error = f" · the gradient is off by {share(self.error_ratio)}" if self.error_ratio is not None else ""
        return located(self.headline, self.location) + names + error

    def title(self) -> str:
        """The finding on one line, for a page on which the rest has rows of its own."""
        return short_title(self.headline, self.location, shorter=self.headline.removesuffix(" for backward"))


@dataclass(frozen=True, kw_only=True)
class AutogradReport(FindingsReport[AutogradFinding]):
    """What one `autograd` session found."""

    steps_count: int = 0
    """Optimizer steps."""
    backward_count: int = 0
    recorded_count: int = 0
    """Backward passes whose ops were recorded."""
    raised: str = ""
    """The type of the error that ended the cell, where autograd did not raise it."""
    last_error: str = ""
    """The error of the previous cell, where a bare `%autograd` was asked about an error that autograd did not raise."""

    @property
    def title(self) -> str:
        """The finding and its line, or what was checked."""
        return self.verdict if self.finding is None else self.finding.title()

    @property
    def status(self) -> Status:
        """``good`` only if a backward pass was seen, and no error ended the cell; a hint is a warning."""
        if self.finding is not None:
            return "warn" if self.finding.is_hint else "bad"
        return "info" if self.raised or not self.backward_count else "good"


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Whether the gradient of a loss reaches a parameter or another leaf."""

    name: str
    """As in `named_parameters()`, or the variable's name."""
    reached: bool
    path_length: int | None
    """Graph nodes between the loss and the tensor on the shortest path; None where there is no path."""
    grad_norm: float | None
    """L2 norm of `.grad`; None where there is no gradient."""
    is_frozen: bool = False
    """Whether `requires_grad` is False."""

    @property
    def is_missed(self) -> bool:
        """Whether the gradient should reach it, and does not."""
        return not self.reached and not self.is_frozen


@dataclass(frozen=True, kw_only=True)
class Cut:
    """An op or a line that cuts a graph off from the parameters before it."""

    op: str
    location: Location | None
    module: str | None = None

    @property
    def cause(self) -> Cause:
        """How it cuts the graph."""
        if self.op == "detach":
            return "data" if self.location is not None and ".data" in self.location.source else "detach"
        return "no_grad" if self.op == "no_grad" else "rewrapped" if self.op in {"lift_fresh", "_local_scalar_dense"} else "dtype"


@dataclass(frozen=True, kw_only=True)
class GraphReport(FindingsReport[AutogradFinding]):
    """What a loss can reach: `%autograd loss`."""

    reaches: tuple[Reach, ...] = ()
    nodes_count: int = 0
    saved_bytes: int = 0
    """Memory of the tensors that the graph saved for backward."""
    cuts: tuple[Cut, ...] = ()
    modules: tuple[tuple[str, int], ...] = ()
    """(path, bytes saved for backward) of each, from the input to the loss; an empty path for what no module computed."""

    @property
    def title(self) -> str:
        """How many tensors the loss reaches."""
        return self.verdict.partition(",")[0].partition(" · ")[0] if self.finding is None else self.finding.title()


@dataclass(frozen=True)
class LiveAutograd:
    """A snapshot for the live view."""

    steps_count: int
    backward_count: int
    is_recording: bool


def compared(report: AutogradReport) -> Compared:
    """Whether it has a finding, and after how many steps."""
    worked = bool(report.steps_count or report.backward_count or report.found)
    return Compared(worked=worked, found_at=(report.steps_count, 0) if report.found else None)


def verdict(report: AutogradReport) -> AutogradReport:
    """The report with its sentence."""
    return replace(report, sentence=_sentence(report))


def _sentence(report: AutogradReport) -> str:
    if report.finding is not None:
        more = len(report.findings) - 1
        return report.finding.sentence() + (f" · and {plural(more, 'more finding')}" if more else "")
    if report.raised:
        return f"Autograd did not raise this {report.raised}; no fault was found before it"
    if report.last_error and not report.backward_count:
        return f"Autograd did not raise the last error: {report.last_error}"
    if not report.backward_count:
        return "No backward() in this cell: nothing to check"
    recorded = f" ({report.recorded_count} recorded)" if report.recorded_count < report.backward_count else ""
    passes = f"{plural(report.backward_count, 'backward pass', 'es')}{recorded}"
    return f"No autograd fault: {passes}, {plural(report.steps_count, 'optimizer step')} checked"
