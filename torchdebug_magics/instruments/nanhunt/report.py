"""The findings of a nanhunt: the op that produced each non-finite value, and the path of that value to the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchdebug_magics.format import number, plural
from torchdebug_magics.ranks.compared import Compared, Sum
from torchdebug_magics.report import Finding, FindingsReport, Location, Stage, Status, located, short_title

_MOST_SKIPPED = 64
_STAGES = ("data", "parameter", "forward", "loss", "backward", "optimizer")
Kind: TypeAlias = Literal["nan", "inf"]
Phase: TypeAlias = Literal["data", "parameter", "forward", "loss", "backward", "optimizer"]
Value: TypeAlias = int | float | complex | bool | str
_ROWS_SAID = 5
"""More rows than that are counted, and `_ROWS_BEGUN` of them named."""
_ROWS_BEGUN = 3
_TITLE = 90
_OUT_OF_SCALE = 1e10
"""Beyond, no model that trains has a number."""


@dataclass(frozen=True)
class Sink:
    """Where a non-finite value surfaced."""

    kind: Literal["", "loss", "output", "gradient", "tensor"] = ""
    """``"tensor"`` is a parameter that an update wrote, or a tensor that was examined; empty where nothing is known."""
    name: str = ""
    """Of the parameter, or a few words for what has no name; empty for the loss and for an output."""

    def __str__(self) -> str:
        if self.kind == "tensor":
            return self.name
        return f"gradient of {self.name}" if self.name else self.kind


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """One op on the path from the source op to the sink."""

    op: str
    phase: Phase
    module: str | None
    location: Location | None


@dataclass(frozen=True, kw_only=True)
class NanFinding(Finding):
    """A NaN or an infinity, and the op that produced it."""

    kind: Kind
    """At the source op: an infinity that became NaN later is ``"inf"``."""
    phase: Phase
    """``"loss"`` is any forward op outside every module."""
    op: str | None = None
    """ATen name without overload (``"log"``, ``"_softmax"``); of a backward, the forward op it is the derivative of.

    None for data and parameter.
    """
    module: str | None = None
    """Module path as in ``state_dict``, ``""`` for the root, None outside every module."""
    call: int | None = None
    """Which call of that module in that step, 1-based."""
    step: int
    """Optimizer steps completed in this cell before the finding."""
    backward: int
    """Backward calls completed in this cell before the finding."""
    rows: tuple[int, ...] = ()
    """Bad indices along dimension 0, the first 20."""
    row_count: int = 0
    """The number of bad indices along dimension 0."""
    index: tuple[int, ...] = ()
    """The first bad element."""
    operands: tuple[Value, ...] = ()
    """The op's inputs at `index`; for what cannot be indexed so, a short description."""
    tensor: str | None = None
    """Name of the input or parameter for the phases data, parameter and optimizer."""
    diagnosis: str | None = None
    """A slug such as ``"where_trap"``, or None."""
    path: tuple[PathStep, ...] = ()
    """From the source op to the sink."""
    explanation: str = ""
    """Why, in one sentence."""
    model: str = ""
    """The name of the root module's variable, for display; empty where it has none."""
    spoilt_here: bool = False
    """Whether a bad parameter was finite, or did not exist, when the cell began."""
    bad_count: int = 0
    element_count: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    excerpt: tuple[tuple[int, str], ...] = ()
    """The lines around `location`, with the numbers that the user sees; empty where the source is not available."""
    underlined: tuple[int, int] | None = None
    """The expression that made the op, as character positions in the marked line of `excerpt`; None before Python 3.11."""
    sink: Sink = Sink()
    """Where it surfaced: as text, ``"loss"``, ``"gradient of head.weight"``, ``"output"``."""
    sink_kind: Kind = "nan"
    """Its kind at the sink: an infinity from the source op is often NaN by then."""
    weights: str = ""
    """The parameters at the end: ``"weights untouched"``, ``"weights poisoned"``, or ``"weights updated since"`` where the cell went on."""
    again: tuple[int, ...] = ()
    """Later steps with the same finding."""
    averaging: Averaging | None = None
    """What this rank contributed, where averaging over ranks made the gradients non-finite."""

    def sentence(self) -> str:
        """The finding on one line: the title in full, then rows, operands and the state of the weights."""
        own = "" if self.averaging is None else f"the gradients of rank {self.averaging.rank} are finite before it"
        what = " · ".join(filter(None, (self._what(), f"step {self.step}", own, self._module())))
        return " · ".join(filter(None, (located(what, self.location), *self.details(), self.weights)))

    @property
    def title(self) -> str:
        """What was found, at which step and at which line: at most 90 characters before the quoted code."""
        what = f"{self._what()} · step {self.step}"
        whole = " · ".join(filter(None, (what, self._module())))
        if self.location is None and len(whole) > _TITLE:
            return f"{whole[: _TITLE - 1]}…"
        return short_title(whole, self.location, shorter=what)

    @property
    def is_given(self) -> bool:
        """Whether it was bad before any op of the step."""
        return self.phase in {"data", "parameter"}

    @property
    def brief(self) -> str:
        """Kind, step and line, for the line of an error above the report."""
        return f"{self._kind()} at step {self.step}" + ("" if self.location is None else f", {self.location}")

    @property
    def name(self) -> str:
        """The path of a parameter, with the variable of its model."""
        return ".".join(part for part in (self.model, self.tensor) if part)

    @property
    def since(self) -> str:
        """When a parameter became non-finite, as far as that is known."""
        if self.diagnosis == "uninitialized_parameter":
            return "never initialized"
        if not self.spoilt_here:
            return "from before this cell"
        return f"since step {self.step - 1} of this cell" if self.step else "set in this cell"

    def details(self) -> tuple[str, ...]:
        """Rows and operands."""
        return (self.rows_text, self.operands_text)

    @property
    def rows_text(self) -> str:
        """``"row 3 of 16"``, ``"rows 3, 7 of 16"``, ``"all 16 rows"`` or ``"20 of 32 rows (0, 1, 2, …)"``; empty where there are none."""
        bad, total = max(self.row_count, len(self.rows)), next(iter(self.shape), 0)
        if not self.rows:
            return ""
        if 1 < bad == total:
            return f"all {total:,} rows"
        of = f" of {total:,}" if total else ""
        if bad > _ROWS_SAID:
            return f"{bad:,}{of} rows ({', '.join(map(str, self.rows[:_ROWS_BEGUN]))}, …)"
        return f"row{'s' if bad > 1 else ''} {', '.join(map(str, self.rows))}{of}"

    @property
    def operands_text(self) -> str:
        """The numbers that the op received at the first bad element; empty where they are unknown."""
        shown = [number(value) for value in self.operands[:4] if not isinstance(value, str)]  # a shape says nothing at a glance
        return f"operand{'s' if len(shown) > 1 else ''} {', '.join(shown)}" if shown else ""

    @property
    def has_diverged(self) -> bool:
        """Whether the run diverged: loss and gradients grew until an op left the range."""
        return self.diagnosis == "lr_too_high" and self.phase != "optimizer"

    @property
    def stage(self) -> Stage:
        """Of a run that diverged, or of numbers that had grown far out of scale, the reason lies before this step."""
        known = (abs(value) for value in self.operands if not isinstance(value, str))
        return "outcome" if self.has_diverged or any(value > _OUT_OF_SCALE for value in known) else "end"

    def _kind(self) -> str:
        return "Inf" if self.kind == self.sink_kind == "inf" else "NaN"  # as it shows: an infinity may be a NaN when it reaches the loss

    def _what(self) -> str:
        return f"{'The run diverged: ' if self.has_diverged else ''}{self._kind()} {self._source()}"

    def _source(self) -> str:
        if self.averaging is not None:
            return "from averaging the gradients over ranks"
        match self.phase:
            case "data":
                return f"in input {self.tensor}"
            case "parameter":
                return f"in parameter {self.name}, {self.since}"
            case "optimizer":
                in_gradient = self.sink.kind == "gradient"
                where = f"in the {self.sink}, before the update" if in_gradient else f"in the optimizer's update of {self.tensor}"
                return f"from {self.op} {where}" if self.op else where
            case _:
                where = "in backward" if self.phase == "backward" else "in forward"
                return f"from {self.op} {where}" if self.op else f"{where}, source op not identified"

    def _module(self) -> str:
        if self.module is None or self.phase in {"data", "parameter", "optimizer"}:
            return ""
        name = ".".join(part for part in (self.model, self.module) if part) or "the model"
        return f"{name} (call {self.call})" if self.call is not None and self.call > 1 else name


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One call of one module in the step that was looked at closely."""

    module: str
    type: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    nan_count: int
    posinf_count: int
    neginf_count: int
    min: float | None
    """Of the finite values; None where there are none."""
    max: float | None
    mean_abs: float | None
    fp16_share: float | None
    """Max-abs over the largest fp16 number: above 1 it would overflow there."""
    grad_nan_count: int | None = None
    """Of the gradient with respect to this output; None where no gradient came."""
    grad_inf_count: int | None = None
    grad_max_abs: float | None = None
    grad_mean_abs: float | None = None


@dataclass(frozen=True, kw_only=True)
class NanReport(FindingsReport[NanFinding]):
    """Everything that one nanhunt session found."""

    steps_count: int = 0
    """Optimizer steps completed."""
    backward_count: int = 0
    forward_count: int = 0
    """Outermost module calls whose output was checked because no gradient flows from it."""
    meant_count: int = 0
    """Checked outputs with intentional infinities, such as a mask."""
    overflow_steps_count: int = 0
    """Steps that a GradScaler skips by design: they are counted and are not findings."""
    history: tuple[float, ...] = ()
    """Largest magnitude in the loss and all gradients, one value per backward(); of a long run, the latest values."""
    losses: tuple[float, ...] = ()
    """The loss of each backward(), aligned with `history`."""
    layers: tuple[LayerRow, ...] = ()
    layers_step: int | None = None
    reproduced: bool | None = None
    """Whether the replay produced the same loss, bit for bit; None where nothing was replayed."""
    replay: str = ""
    """What was replayed of the bad step: ``"statements"``, ``"module"``, ``"graph"`` or empty."""
    raised: str = ""
    """The type of the user's error that ended the cell, such as ``"ValueError"``; nothing after it was checked."""
    headline: str = ""
    """The title, where it is not the one of the first finding."""

    @property
    def title(self) -> str:
        """What was found and where, or how much was checked."""
        return self.headline or (self.sentence if self.finding is None else self.finding.title)

    def main_stage(self) -> Stage | None:
        """A fault, where the cell went on and something else has ended it."""
        stage = super().main_stage()
        return "fault" if stage is not None and self.cut_short not in {"", "NonFiniteError"} else stage

    @property
    def status(self) -> Status:
        """``good`` only if values were checked, to the end of the cell."""
        if self.found:
            return "bad"
        if self.problems:
            return "warn"
        return "good" if not self.raised and (self.backward_count or self.steps_count or self.forward_count) else "info"


@dataclass(frozen=True)
class LiveNan:
    """A snapshot for the live view."""

    steps_count: int
    backward_count: int
    overflow_steps_count: int
    loss: float | None
    history: tuple[float, ...]
    steps_per_s: float | None
    phase: str
    """``"watching"`` or ``"replaying step 5"``."""


@dataclass(frozen=True, kw_only=True)
class Averaging(Sum):
    """What this rank gave to the averaging of gradients that brought NaN or an infinity."""

    world_size: int
    rank: int = 0
    """The rank whose gradients these are."""

    @property
    def may_overflow(self) -> bool:
        """Whether as much from each rank leaves the range of the type."""
        return self.local_peak * self.world_size > self.limit

    def explanation(self, kind: str) -> str:
        """What is known in this rank, in one sentence."""
        came = f"{kind} comes from averaging the gradients over ranks: those of this rank (rank {self.rank}) are finite before it"
        if not self.may_overflow:
            return came
        return (
            f"{came}, but as large as {number(self.local_peak)}: their sum over {self.world_size} ranks can exceed the range of "
            f"{self.dtype}, which ends at {number(self.limit)}"
        )

    def fix(self) -> str:
        """What to do about it, as far as one rank can tell."""
        if not self.may_overflow:
            return "check the reports of the other ranks: the rank whose own gradients are non-finite names the cause"
        return (
            "reduce the gradients in float32 (without a communication hook that compresses to float16; with autocast instead of"
            " `model.half()`), or"
            f" divide them by the number of ranks before the sum: `p.grad /= {self.world_size}` before `all_reduce`"
        )


def compared(report: NanReport) -> Compared:
    """The step of its first non-finite value, and whether that came from another rank."""
    worked = bool(report.steps_count or report.backward_count or report.forward_count or report.found)
    finding = report.finding
    if finding is None:
        peaks = enumerate(report.history, report.backward_count - len(report.history)) if report.overflow_steps_count else ()
        skipped = tuple(place for place, peak in peaks if not math.isfinite(peak))
        return Compared(worked=worked, skipped_backwards=skipped[-_MOST_SKIPPED:])
    is_received = finding.diagnosis == "averaged_from_other_ranks"
    # What could not be traced comes after all that could: it may be another rank's.
    is_traced = finding.op is not None or finding.diagnosis is not None
    stage = _STAGES.index(finding.phase) + (0 if is_traced else len(_STAGES))
    return Compared(
        worked=worked, found_at=(finding.step, stage), is_received=is_received, found_backward=finding.backward, sum=finding.averaging
    )


def sentence(report: NanReport) -> str:
    """The first finding; or what was checked and found finite; or that there was nothing to check."""
    if report.finding is not None:
        more = len(report.findings) - 1
        return report.finding.sentence() + (f" · and {plural(more, 'more finding')}" if more > 0 else "")
    return "; ".join(part for part in dict.fromkeys((headline(report, whole=True), overflow(report), largest(report))) if part)


def headline(report: NanReport, *, whole: bool = False) -> str:
    """The title of a report without findings, with the first counts or the `whole` of them; empty where the first finding has one."""
    if report.finding is not None:
        return ""
    counted = (
        (report.backward_count, "backward pass", "es"),
        (report.steps_count, "optimizer step", "s"),
        (report.forward_count, "forward-only model call", "s"),
    )
    done = [plural(amount, noun, ending) for amount, noun, ending in counted if amount]
    until = f" until {report.raised}" if report.raised else ""
    if not done:
        return overflow(report) or f"Nothing to check{until or ': no backward(), optimizer step or model call'}"
    meant = ", except intentional inf," if report.meant_count else ""
    return f"No NaN or inf{meant} in {' and '.join(done if whole else done[: 1 if report.raised else 2])}{until}"


def overflow(report: NanReport) -> str:
    """The steps that a GradScaler skipped by design; empty where there were none."""
    skipped = report.overflow_steps_count
    return f"{plural(skipped, 'step')} skipped by the GradScaler by design" if skipped else ""


def largest(report: NanReport) -> str:
    """The largest finite magnitude of the run; empty where no gradient was checked."""
    finite = [value for value in report.history if math.isfinite(value)]
    return f"the largest magnitude was {number(float(max(finite)))}" if finite else ""
