"""What a shapes run found: one row a module call, the totals, and, where the forward broke, why and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torchdebug_magics.format import byte_size, count, listed, plural
from torchdebug_magics.report import Location, Report, Sharding

__all__ = ["Failure", "Fix", "Layout", "Mode", "Need", "Row", "Shape", "ShapesReport", "Step"]

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
    """Of the first output, such as ``"float32"``."""
    device: str = ""
    own_params: int = 0
    """Elements of the parameters that this module itself holds; not again what a row above has counted (tied, or called before)."""
    trainable_params: int = 0
    """Those of `own_params` that require a gradient."""
    flops: int = 0
    """Of this call with all that runs inside it; 2 per multiply-add."""
    activation_bytes: int = 0
    """Saved for the backward pass by this call with all that runs inside it; what is shared is counted once, where it was saved first."""
    formula: str = ""
    """The outputs' shapes in terms of the symbolic inputs, such as ``"(B, T, 4*D)"``; empty unless asked for."""
    input_formula: str = ""
    """The inputs' shapes, likewise."""
    shards: Mapping[str, Sharding] = field(default_factory=dict)
    """Own parameters and outputs of which other ranks hold parts, by name; the output's is ``"output"``."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One op on the way of a tensor: what made it, and from which shapes."""

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
    """Whether the forward, tried on a copy with this change, came through."""
    why: str = ""
    edits: int = 1
    """How many places have to be changed."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Where the forward broke."""

    module: str | None
    """Path of the innermost module that was running; None outside any."""
    op: str | None
    """The function of torch's that failed, such as ``"linear"`` or ``"cat"``; None where Python code raised."""
    location: Location | None
    operand_shapes: tuple[Shape, ...]
    operand_names: tuple[str, ...] = ()
    explanation: str
    """One sentence that a person reads at a glance."""
    fixes: tuple[Fix, ...] = ()
    """The fewest edits first."""
    error: str
    """Type and text of the original."""
    chain: tuple[Step, ...] = ()
    """How the mismatching operand came about, from the input on."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What training this model at this batch takes, estimated."""

    optimizer: str
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    limit_bytes: int | None
    """Of the device, or of this process; None where it is not known."""
    limit: str = ""
    """What the limit is, such as ``"NVIDIA A100"`` or ``"memory of this machine"``."""
    batch: int | None = None
    largest_batch: int | None = None
    """The largest batch that fits the limit, by scaling the activations; 0 where none does, None where it cannot be told."""

    @property
    def total_bytes(self) -> int:
        """The sum; without what kernels need for a moment and what the allocator leaves unused."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it stays below the limit."""
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    @property
    def sentence(self) -> str:
        """What it takes, whether that fits, and what would."""
        batch = "" if self.batch is None else f" at batch {self.batch:,}"
        said = f"Training with {self.optimizer}{batch} needs about {byte_size(self.total_bytes)}"
        if self.limit_bytes is None:
            return f"{said}."
        limit = f"the {byte_size(self.limit_bytes)}{f' of {self.limit}' if self.limit else ''}"
        most = self.largest_batch
        if self.fits:
            return f"{said}: fits {limit}{f'; batch {count(most)} would too' if most and most != self.batch else ''}."
        rest = "" if most is None else f"; batch {count(most)} would" if most else "; no batch would"
        return f"{said}: does not fit {limit}{rest}."


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the table was asked to be shown."""

    depth: int | None = None
    columns: tuple[str, ...] = ()
    sort: str = ""
    plot: bool = False

    @classmethod
    def of(cls, *, depth: int | None = None, columns: str = "", sort: str = "", plot: bool = False, **_: object) -> Layout:
        """From the options of the magic."""
        return cls(depth=depth, columns=tuple(columns.replace(",", " ").split()), sort=sort, plot=plot)


@dataclass(frozen=True, kw_only=True)
class ShapesReport(Report):
    """The whole table; `rows` are in the order of the calls."""

    model: str
    """The type of the model; empty for a cell that called several."""
    inputs: str = ""
    """What it was called with, such as ``"x 1 x 3 x 224 x 224 float32"``."""
    rows: tuple[Row, ...]
    total_params: int
    trainable_params: int
    buffer_count: int
    total_flops: int
    unchecked_ops: tuple[str, ...] = ()
    """Ops that refuse some values, and ran on tensors whose values are not known."""
    checked_ops: tuple[str, ...] = ()
    """Of these, those that were asked for real, as the forward is a quick one."""
    uncounted_ops: tuple[str, ...] = ()
    """Ops that ran and whose arithmetic no formula counts: elementwise ones, normalisations and the like."""
    param_bytes: int
    sharded_over: int = 1
    """How many ranks hold parts of the parameters."""
    local_param_bytes: int | None = None
    """Of `param_bytes`, what this process holds; None where that is all."""
    has_shared_flops: bool = False
    """Whether ops computed on tensors that several ranks hold: FLOPs are then those of all these ranks together."""
    buffer_bytes: int = 0
    activation_bytes: int
    unused: tuple[str, ...] = ()
    """Paths of modules with parameters that the forward never called."""
    mode: Mode
    symbols: str = ""
    """What a letter of the formulas stands for where the model fixes it, such as ``"D = 768"``."""
    failure: Failure | None = None
    suspect: Failure | None = None
    """What came through, and is most likely not meant; its `error` is empty."""
    last_error: str = ""
    """In which the cell before ended, where nothing else is to be said."""
    needs: tuple[Need, ...] = ()
    layout: Layout = Layout()

    @property
    def warning(self) -> str:
        """What came through and is most likely not meant, where, and what to change; empty for nothing."""
        return "" if self.suspect is None or self.failure is not None else _broken(self.suspect)

    @property
    def size(self) -> str:
        """Of the parameters, and of the part of them in this process."""
        whole = byte_size(self.param_bytes)
        if self.local_param_bytes is None:
            return whole
        return f"{whole}, sharded over {self.sharded_over} ranks: {byte_size(self.local_param_bytes)} here"

    @property
    def verdict(self) -> str:
        """What it takes and gives, or where it broke and what to change."""
        if (wrong := self.failure or self.suspect) is not None:
            return _broken(wrong)
        if not self.rows and self.last_error:
            return f"the last error is not one I can explain: {self.last_error}"
        if not self.rows:
            ways = (
                "put `%%shapes` above a cell that calls a model, write `%shapes model input`, or `%shapes` right after a cell that failed"
            )
            return f"no module was called: {ways}"
        size = f"{self.model or 'the cell'}: {count(self.total_params)} parameters ({self.size})"
        if self.mode == "params":
            return f"{size}, {plural(len(self.rows), 'module')}; name an input to see shapes: `%shapes model (1, 3, 224, 224)`"
        ends = f", {self.inputs} → {_outputs(self.rows)}" if self.inputs and self.rows else ""
        flops = f"{count(self.total_flops)} FLOPs{' of all ranks together' if self.has_shared_flops else ''}"
        cost = f"{flops}, {byte_size(self.activation_bytes)} of activations kept for backward"
        return f"{size}{ends}, {cost}{_idle(self.unused)}"


def _broken(failure: Failure) -> str:
    verified = [fix for fix in failure.fixes if fix.verified]
    fix = f" · verified fix: `{'; '.join(verified[0].code.splitlines())}`" if verified else ""
    where = f" · {failure.location}" if failure.location is not None else ""
    line = f": `{failure.location.source}`" if failure.location is not None and failure.location.source else ""
    return f"{failure.explanation}{where}{line}{fix}"


def _idle(unused: tuple[str, ...]) -> str:
    if not unused:
        return ""
    return f"; never called: {listed([f'`{path}`' for path in unused])}"


def _outputs(rows: tuple[Row, ...]) -> str:
    root = next((row for row in rows if row.depth == 0), rows[0])
    shapes = [" x ".join(map(str, shape)) or "scalar" for shape in root.output_shapes]
    return listed(shapes) or "nothing"
