"""What a nanhunt found: the birth of each non-finite value, and how it travelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchdebug_magics.format import number
from torchdebug_magics.instruments.nanhunt.averaging import Averaging
from torchdebug_magics.report import Location, Report

__all__ = ["Averaging", "Finding", "Kind", "LayerRow", "NanReport", "PathStep", "Phase"]

Kind: TypeAlias = Literal["nan", "inf"]
Phase: TypeAlias = Literal["data", "parameter", "forward", "loss", "backward", "optimizer"]
Value: TypeAlias = int | float | complex | bool | str


_ROWS_SAID = 5
"""In a sentence; all of them are in `rows`."""


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """One op on the way from the birth to the sink."""

    op: str
    phase: Phase
    module: str | None
    location: Location | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The birth of a NaN or an infinity."""

    kind: Kind
    """At birth: an infinity that became NaN later is ``"inf"``."""
    phase: Phase
    """``"loss"`` is any forward op outside every module."""
    op: str | None
    """ATen name without overload (``"log"``, ``"_softmax"``); of a backward, the forward op it is the derivative of.

    None for data and parameter.
    """
    module: str | None
    """Module path as in ``state_dict``, ``""`` for the root, None outside every module."""
    call: int | None
    """Which call of that module in that step, 1-based."""
    location: Location | None
    is_tangent: bool = False
    """Whether it is the derivative of `op` that forward-mode AD computes beside it, as in ``jvp`` and ``jacfwd``."""
    step: int
    """Optimizer steps completed in this cell before the finding."""
    backward: int
    """Backward calls completed in this cell before the finding."""
    rows: tuple[int, ...] = ()
    """Bad indices along dimension 0, the first 20."""
    index: tuple[int, ...] = ()
    """The first bad element."""
    operands: tuple[Value, ...] = ()
    """The op's inputs at `index`; for what cannot be indexed so, a short description."""
    tensor: str | None = None
    """Name of the input or parameter for the phases data, parameter and optimizer."""
    diagnosis: str | None = None
    """A slug such as ``"where_trap"``, or None."""
    fix: str = ""
    """One line: what to change."""
    path: tuple[PathStep, ...] = ()
    """From the birth to the sink."""
    explanation: str = ""
    """Why, in one sentence."""
    model: str = ""
    """The name of the root module's variable, for display; empty where it has none."""
    spoilt_here: bool = False
    """Of a bad parameter: whether it was finite, or not there, when the cell began."""
    bad_count: int = 0
    element_count: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    excerpt: tuple[tuple[int, str], ...] = ()
    """The lines round `location`, with the numbers that the user sees; empty where the source is not at hand."""
    sink: str = ""
    """Where it surfaced: ``"loss"``, ``"gradient of head.weight"``, ``"output"``."""
    sink_kind: Kind = "nan"
    """What it was there: an infinity at birth is often NaN by then."""
    weights: str = ""
    """What became of the parameters: ``"weights untouched"``, ``"weights already bad"``."""
    averaging: Averaging | None = None
    """Of gradients that came bad from an averaging over ranks: what this rank gave to it."""

    def sentence(self) -> str:
        """The finding on one line, birth first."""
        return " · ".join(part for part in self._parts() if part)

    @property
    def name(self) -> str:
        """Of a parameter, with its model's."""
        return ".".join(part for part in (self.model, self.tensor) if part)

    @property
    def since(self) -> str:
        """When a parameter became bad, as far as that is known."""
        if self.diagnosis == "uninitialized_parameter":
            return "which was never initialized"
        if not self.spoilt_here:
            return "bad before this cell's first step"
        return f"which became bad in this cell, by the end of step {self.step - 1}" if self.step else "which became bad in this cell"

    def details(self) -> tuple[str, ...]:
        """Which rows, and the numbers that went in."""
        return (self._rows(), self._operands())

    def _parts(self) -> tuple[str, ...]:
        kind = "Inf" if self.kind == self.sink_kind == "inf" else "NaN"  # as it shows: an infinity may be a NaN when it reaches the loss
        when = f"{kind} {'came' if self.averaging is not None else 'born'} at step {self.step}"
        diverged = self.diagnosis == "lr_too_high" and self.phase != "optimizer"
        what = f"the run diverged; {self.op} was the first to leave the range" if diverged else self._what()
        return (when, what, self._where(), self._line(), *self.details(), self.weights)

    def _what(self) -> str:
        if self.is_tangent:
            return f"forward-mode derivative of {self.op}"
        if self.averaging is not None:
            return f"with the averaging of gradients over ranks; those of rank {self.averaging.rank} are finite before it"
        return self._born()

    def _born(self) -> str:
        match self.phase:
            case "data":
                return f"input {self.tensor}"
            case "parameter":
                return f"parameter {self.name}, {self.since}"
            case "optimizer":
                in_gradient = self.sink.startswith("gradient of ")
                where = f"{self.sink}, before the update" if in_gradient else f"optimizer update of {self.tensor}"
                return where + (f" ({self.op})" if self.op else "")
            case "backward":
                return f"backward of {self.op}" if self.op else "backward, cause not traced"
            case "loss":
                return f"forward of {self.op}, outside the model" if self.op else "loss, cause not traced"
            case _:
                return f"forward of {self.op}" if self.op else "forward, cause not traced"

    def _where(self) -> str:
        if self.module is None or self.phase in {"data", "parameter", "optimizer"}:
            return ""
        name = ".".join(part for part in (self.model, self.module) if part) or "the model"
        return f"{name} (call {self.call})" if self.call is not None and self.call > 1 else name

    def _line(self) -> str:
        if self.location is None:
            return ""
        return f"{self.location}: `{self.location.source}`" if self.location.source else str(self.location)

    def _rows(self) -> str:
        if not self.rows:
            return ""
        if 1 < len(self.rows) == next(iter(self.shape), 0):
            return f"all {len(self.rows)} rows"
        head = ", ".join(str(row) for row in self.rows[:_ROWS_SAID])
        return f"row{'s' if len(self.rows) > 1 else ''} {head}" + (" …" if len(self.rows) > _ROWS_SAID else "")

    def _operands(self) -> str:
        shown = [number(value) for value in self.operands[:4] if not isinstance(value, str)]  # a shape says nothing at a glance
        return f"operand{'s' if len(shown) > 1 else ''} {', '.join(shown)}" if shown else ""


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
    grad_nan_count: int | None
    """Of the gradient with respect to this output; None where no gradient came."""
    grad_inf_count: int | None
    grad_max_abs: float | None
    grad_mean_abs: float | None


@dataclass(frozen=True, kw_only=True)
class NanReport(Report):
    """Everything one nanhunt session learnt."""

    found: bool = False
    finding: Finding | None = None
    """The first of `findings`."""
    findings: tuple[Finding, ...] = ()
    steps_count: int = 0
    """Optimizer steps completed."""
    backward_count: int = 0
    forward_count: int = 0
    """Outermost module calls whose output was checked because no gradient flows from it."""
    meant_count: int = 0
    """Of these, outputs with infinities that the model put there on purpose, such as a mask."""
    overflow_steps_count: int = 0
    """Steps that a GradScaler skips by design: counted, not findings."""
    history: tuple[float, ...] = ()
    """Max-abs over the loss and all gradients, one a backward; the last ones of a long run."""
    losses: tuple[float, ...] = ()
    """The loss of each backward, beside `history`."""
    layers: tuple[LayerRow, ...] = ()
    layers_step: int | None = None
    reproduced: bool | None = None
    """Whether the replay gave the same loss, bit for bit; None where nothing was replayed."""
    replay: str = ""
    """How the bad step was looked at: ``"statements"``, ``"module"``, ``"graph"`` or empty."""
    raised: str = ""
    """The type of an error of the user's own that ended the cell, such as ``"ValueError"``; what came after it was not seen."""
    sentence: str = ""
    """The verdict, written when the session was frozen."""

    @property
    def verdict(self) -> str:
        """The finding in one sentence, or what was checked and found finite."""
        return self.sentence


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
