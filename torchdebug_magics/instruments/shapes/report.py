"""The report of ``%shapes``: one row per module call, the totals, and, where the forward failed, the cause and a fix."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torchdebug_magics.format import byte_size, count, listed, plural, shape
from torchdebug_magics.ranks.compared import Compared, Moment
from torchdebug_magics.report import TITLE_CHARS, Edit, Finding, Location, Report, Sharding, Stage, Status, located, short_title, shortened

Shape: TypeAlias = tuple[int, ...]
Mode: TypeAlias = Literal["fake", "real", "meta", "params"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call of one module."""

    path: str
    """Module path as in `state_dict`; empty for the root."""
    type: str
    call: int
    """1-based, of this module in this run; 0 where the module was not called."""
    depth: int
    """How many names the path has; 0 for the root."""
    input_shapes: tuple[Shape, ...] = ()
    output_shapes: tuple[Shape, ...] = ()
    output_names: tuple[str, ...] = ()
    """Where each output stands in a nested one, such as ``"logits"`` or ``"hidden[0]"``; empty names for a bare tensor."""
    dtype: str = ""
    """The dtype of the first output, such as ``"float32"``."""
    device: str = ""
    own_params: int = 0
    """Elements of the parameters that this module itself holds; not again what a row above has counted (tied, or called before)."""
    trainable_params: int = 0
    """Those of `own_params` that require a gradient."""
    flops: int = 0
    """FLOPs of this call, submodules included; 2 per multiply-add."""
    activation_bytes: int = 0
    """Saved for the backward pass by this call with all that runs inside it; what is shared is counted once, where it was saved first."""
    formula: str = ""
    """The outputs' shapes in terms of the symbolic inputs, such as ``"(B, T, 4*D)"``; empty unless requested."""
    input_formula: str = ""
    """The inputs' shapes, likewise."""
    shards: Mapping[str, Sharding] = field(default_factory=dict)
    """Own parameters and outputs of which other ranks hold parts, by name; the output's is ``"output"``."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One op in the history of a tensor, with the shapes of its inputs and output."""

    op: str
    module: str
    input_shapes: tuple[Shape, ...]
    output_shape: Shape
    location: Location | None = None


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A change to the user's code."""

    code: str
    """What to write, such as ``"fc1 = nn.Linear(576, 10)"``; several edits stand on lines of their own."""
    verified: bool
    """Whether the forward succeeded on a copy of the model with this change."""
    why: str = ""
    edits: int = 1
    """How many places have to be changed."""
    changes: tuple[Edit, ...] = ()
    """The same as edits of the user's code; empty where the code alone does not say where it is to stand."""
    to_the_end: bool = False
    """Whether it was tried with the values themselves, up to the end of the step."""


@dataclass(frozen=True, kw_only=True)
class Failure(Finding):
    """Where the forward failed, and why."""

    module: str | None
    """Path of the innermost module that was running; None outside any."""
    op: str | None
    """The PyTorch function that failed, such as ``"linear"`` or ``"cat"``; None where Python code raised."""
    underlined: tuple[int, int] | None = None
    """Start and end of the failing expression in ``location.source``, as positions of characters; None where unknown or the whole line."""
    operand_shapes: tuple[Shape, ...]
    operand_names: tuple[str, ...] = ()
    explanation: str
    """One sentence that a person reads at a glance."""
    fixes: tuple[Fix, ...] = ()
    """The fewest edits first."""
    error: str
    """Type and text of the original."""
    chain: tuple[Step, ...] = ()
    """The ops that computed the mismatching operand, from the input on."""

    def __post_init__(self) -> None:
        if self.fixes and not self.fix:
            first = self.fixes[0]
            object.__setattr__(self, "fix", "write " + " and ".join(f"`{line}`" for line in first.code.splitlines()))
            object.__setattr__(self, "fix_state", "verified" if first.verified else "compiles" if first.changes else "advice")
            object.__setattr__(self, "edits", self.edits or first.changes)

    @property
    def stage(self) -> Stage:
        """What ran without an error is a fault, if it is one."""
        return "end" if self.error else "fault"

    @property
    def headline(self) -> str:
        """What failed, in few enough characters for a headline with the location."""
        return shortened(self.explanation, TITLE_CHARS - len(f" · {self.location}"))

    @property
    def reason(self) -> str:
        """The whole explanation where the headline leaves out a part; empty where it says all."""
        return "" if self.headline == self.explanation else self.explanation


@dataclass(frozen=True, kw_only=True)
class Need:
    """Estimated memory for training this model at this batch size."""

    optimizer: str
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    limit_bytes: int | None
    """Memory of the device, or the limit of this process; None where unknown."""
    limit: str = ""
    """What the limit is, such as ``"NVIDIA A100"`` or ``"memory of this machine"``."""
    batch: int | None = None
    largest_batch: int | None = None
    """The largest batch that fits the limit, by scaling the activations; 0 where none does, None where it is unknown."""

    @property
    def total_bytes(self) -> int:
        """The sum, without temporary buffers of kernels and without fragmentation."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the sum is below the limit."""
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    @property
    def sentence(self) -> str:
        """The memory needed, whether it fits, and which batch size would."""
        batch = "" if self.batch is None else f" at batch size {self.batch:,}"
        needed = f"training with {self.optimizer}{batch} needs about {byte_size(self.total_bytes)}"
        if self.limit_bytes is None:
            return needed
        limit = f"the {byte_size(self.limit_bytes)}{f' of {self.limit}' if self.limit else ''}"
        most = self.largest_batch
        if self.fits:
            return f"{needed}: fits {limit}{f'; so does batch size {count(most)}' if most and most != self.batch else ''}"
        rest = "" if most is None else f"; batch size {count(most)} fits" if most else "; no batch size fits"
        return f"{needed}: does not fit {limit}{rest}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The options that decide how the table is shown."""

    depth: int | None = None
    columns: tuple[str, ...] = ()
    sort: str = ""
    plot: bool = False


@dataclass(frozen=True, kw_only=True)
class ShapesReport(Report):
    """The whole table; `rows` are in the order of the calls."""

    model: str = ""
    """The type of the model; empty for a cell that called several."""
    inputs: str = ""
    """The input of the model, such as ``"x 1 x 3 x 224 x 224 float32"``."""
    rows: tuple[Row, ...] = ()
    total_params: int = 0
    trainable_params: int = 0
    buffer_count: int = 0
    total_flops: int = 0
    unchecked_ops: tuple[str, ...] = ()
    """Ops that refuse some values, and ran on tensors whose values are not known."""
    checked_ops: tuple[str, ...] = ()
    """Of these, those that were checked by running the forward on real tensors."""
    uncounted_ops: tuple[str, ...] = ()
    """Ops that ran and have no FLOP formula: elementwise ops, normalizations and the like."""
    param_bytes: int = 0
    sharded_over: int = 1
    """How many ranks hold parts of the parameters."""
    local_param_bytes: int | None = None
    """Of `param_bytes`, what this process holds; None where that is all."""
    has_shared_flops: bool = False
    """Whether ops computed on tensors that several ranks hold: FLOPs are then those of all these ranks together."""
    buffer_bytes: int = 0
    activation_bytes: int = 0
    unused: tuple[str, ...] = ()
    """Paths of modules with parameters that the forward never called."""
    mode: Mode = "fake"
    symbols: str = ""
    """What a letter of the formulas stands for where the model fixes it, such as ``"D = 768"``."""
    failure: Failure | None = None
    suspect: Failure | None = None
    """What ran without an error and is probably unintended; its `error` is empty."""
    last_error: str = ""
    """The error of the previous cell, where there is nothing else to report."""
    needs: tuple[Need, ...] = ()
    layout: Layout = Layout()

    @property
    def warning(self) -> str:
        """What ran without an error and is probably unintended, where, and what to change; empty for nothing."""
        return "" if self.suspect is None or self.failure is not None else _failed(self.suspect)

    @property
    def size(self) -> str:
        """Memory of the parameters, and of the part of them in this process."""
        whole = byte_size(self.param_bytes)
        if self.local_param_bytes is None:
            return whole
        return f"{whole}, sharded over {self.sharded_over} ranks: {byte_size(self.local_param_bytes)} here"

    @property
    def verdict(self) -> str:
        """The size and cost of the model, or where the forward failed and what to change."""
        if (wrong := self.failure or self.suspect) is not None:
            return _failed(wrong)
        if not self.rows:
            return f"{self.title}: {self.advice}"
        size = f"{self.model or 'the cell'}: {count(self.total_params)} parameters ({self.size})"
        if self.mode == "params":
            return f"{size}, {plural(len(self.rows), 'module')}; {self.advice}"
        ends = f", {self.inputs} → {_outputs(self.rows)}" if self.inputs else ""
        idle = f"; never called: {listed([f'`{path}`' for path in self.unused])}" if self.unused else ""
        return f"{size}{ends}, {self.cost}{idle}"

    @property
    def title(self) -> str:
        """The model, its input and output and its size, as far as a headline has room; or what failed, and where."""
        if (wrong := self.failure or self.suspect) is not None:
            return short_title(wrong.explanation, wrong.location)
        if not self.rows:
            return "cannot explain the last error" if self.last_error else "no module was called"
        model = shortened(self.model or "the cell", TITLE_CHARS // 2)
        ends = f"{self.inputs} → {_outputs(self.rows)}" if self.inputs else ""
        parts = [ends, f"{count(self.total_params)} parameters", f"{count(self.total_flops)} FLOPs"]
        if self.mode == "params":
            parts = [f"{count(self.total_params)} parameters ({self.size})", plural(len(self.rows), "module")]
        title = model
        for part in filter(None, parts):
            longer = f"{title}{': ' if title == model else ' · '}{part}"
            title = longer if len(longer) <= TITLE_CHARS else title
        return title

    @property
    def status(self) -> Status:
        """``good`` only if a forward ran, used all modules with parameters, and did nothing that is probably unintended."""
        if self.failure is not None:
            return "bad"
        return "warn" if self.warning else "good" if self.rows and not self.unused else "info"

    @property
    def cost(self) -> str:
        """FLOPs of a forward, and bytes of activations that it saves."""
        flops = f"{count(self.total_flops)} FLOPs{' of all ranks together' if self.has_shared_flops else ''}"
        return f"{flops}, {byte_size(self.activation_bytes)} of activations saved for backward"

    @property
    def advice(self) -> str:
        """How to call `%shapes` to see shapes, where this report has none; else the error that it cannot explain."""
        if self.mode == "params" and self.rows:
            return "pass an input to see shapes: `%shapes model (1, 3, 224, 224)`"
        ways = "put `%%shapes` above a cell that calls a model, or write `%shapes model input`, or `%shapes` right after a cell that failed"
        return self.last_error or ways


def _failed(failure: Failure) -> str:
    verified = [fix for fix in failure.fixes if fix.verified]
    fix = f" · verified fix: `{'; '.join(verified[0].code.splitlines())}`" if verified else ""
    return f"{located(failure.explanation, failure.location)}{fix}"


def _outputs(rows: tuple[Row, ...]) -> str:
    root = next((row for row in rows if row.depth == 0), rows[0])
    return listed([shape(sizes) or "scalar" for sizes in root.output_shapes]) or "nothing"


def compared(report: ShapesReport) -> Compared:
    """A digest of the input and output shapes of each module call."""
    sizes = {f"{row.path or '(root)'} call {row.call}": _digest(f"{row.input_shapes} {row.output_shapes}") for row in report.rows}
    moments = (Moment("shapes_differ", None, _digest(str(sizes))),) if sizes else ()
    failed = report.failure or report.suspect
    return Compared(
        worked=bool(report.rows or failed),
        found_at=None if failed is None else (0, 0),
        moments=moments,
        details={("shapes_differ", None): {name.removesuffix(" call 1"): digest for name, digest in sizes.items()}} if sizes else {},
    )


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())
