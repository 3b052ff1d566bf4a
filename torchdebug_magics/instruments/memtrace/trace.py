"""What was traced of a cell's memory and found in it, as plain data with the words for each finding; sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torchdebug_magics.format import byte_size, plural, share
from torchdebug_magics.report import Finding, Gauge, Location, Mark, Stage

Phase: TypeAlias = Literal["forward", "loss", "backward", "optimizer", "other"]
HELD_BEFORE = "held before the cell"
"""The kind, in a timeline, of memory that was allocated before the cell began."""
Rows: TypeAlias = "list[tuple[str, str]]"
"""Names and texts; an empty text is not shown."""
_LONGEST_NAME = 26
_FAR_MORE = 10
"""Times the live memory: then one tensor is too large, not the step."""
_TOO_LARGE = "shrink this allocation: freeing live tensors would not make room for it"


def start_of(path: str) -> str:
    """A path up to the autograd graph, whose nodes have a fold of their own."""
    return path.partition(".grad_fn")[0].partition(" -> ")[0]


def in_code(variable: str) -> str:
    """A variable as code; the end of a long one."""
    short = variable if len(variable) <= _LONGEST_NAME else f"…{variable[1 - _LONGEST_NAME :]}"
    return f"`{short}`" if variable else ""


@dataclass(frozen=True, kw_only=True)
class Growth(Finding):
    """Memory that every iteration adds."""

    bytes_per_iteration: int
    iterations_count: int
    holder: str
    """The variable's path, such as ``losses[0].grad_fn -> PowBackward0.saved_self``; empty where none was found."""
    variable: str = ""
    """The variable or collection at its start, as one writes it: ``losses``."""
    keeps_graph: bool = False
    """Whether it is the graph of the backward pass that is kept, and not only data."""
    others: tuple[str, ...] = ()
    """Other variables that grow; their memory is not included."""
    kept_at: Location | None = None
    """The line that stores it in the holder; None where it was not found."""
    frees_bytes: int = 0
    """Bytes that `fix` would have freed at the end, as nothing else holds them; 0 where that is unknown."""
    what: Literal["tensors", "objects", "workers", "profiler"] = "tensors"
    """What grows: tensors, Python objects, pages that DataLoader workers copied, or a profiler's events."""
    share_ratio: float = 1.0
    """The share of the growth of the process in the loop; 1 for tensors."""

    @property
    def fix_at(self) -> Location | None:
        """Where it is kept, if that is known; else where it is allocated."""
        return self.kept_at or self.location

    def happened(self, each: str) -> tuple[str, str]:
        """What happened; and how often, which a long headline can do without. `each` is what makes it grow, an iteration or a run."""
        size, times = byte_size(self.bytes_per_iteration), f" ({self.iterations_count:,} so far)"
        name = in_code(self.variable)
        if each == "run":
            return f"each run of this cell adds {size} " + (f"to {name}" if name else "that no known variable holds"), ""
        if self.what == "workers":
            return f"DataLoader workers copy {size} of {name or 'the dataset'} each iteration", ""
        if self.what == "profiler":
            return f"the profiler keeps {size} of events each iteration", times
        if self.what == "objects":
            return f"{name or 'the process'} grows by {size} of objects each iteration", times
        if self.keeps_graph and name:
            return f"{name} keeps each iteration's graph (+{size} each)", ""
        return f"{name or 'memory'} grows by {size} each iteration", times

    def rows(self, each: str) -> Rows:
        """What to change, who keeps it, how much."""
        frees = f" (frees {byte_size(self.frees_bytes)})" if self.fix and self.frees_bytes else ""
        total = f"{byte_size(self.bytes_per_iteration * self.iterations_count)} in {plural(self.iterations_count, each)}"
        kept = f"`{start_of(self.holder)}`" if self.holder else "no variable that could be found"
        put, made = self.kept_at, self.location
        if made is not None and put is not None and (made.file, made.line) != (put.file, put.line):
            kept += f", allocated at {made}: `{made.source}`"
        outside = "" if self.what == "tensors" else f"; {share(self.share_ratio)} of the growth of the process"
        return [
            ("fix", f"{self.fix}{frees}" if self.fix else ""),
            ("kept by", kept),
            ("growth", f"{byte_size(self.bytes_per_iteration)} each {each}, {total}{outside}"),
            ("also growing", ", ".join(f"`{other}`" for other in self.others)),
        ]


@dataclass(frozen=True, kw_only=True)
class GraphGrowth(Finding):
    """Autograd nodes that every iteration adds: a few hundred bytes each, and time in the backward pass."""

    nodes_per_iteration: int
    iterations_count: int
    holder: str
    variable: str = ""
    """The variable or collection at the start of `holder`, as one writes it."""

    def happened(self, _each: str) -> tuple[str, str]:
        """As of `Growth`."""
        nodes = plural(self.nodes_per_iteration, "node")
        return f"{in_code(self.variable) or 'a variable'} keeps each iteration's graph (+{nodes} each)", ""

    def rows(self, _each: str) -> Rows:
        """As of `Growth`."""
        nodes = plural(self.nodes_per_iteration, "autograd node")
        return [
            ("fix", self.fix),
            ("kept by", f"`{self.holder}`" if self.holder else ""),
            ("growth", f"{nodes} each iteration, {plural(self.iterations_count, 'iteration')} so far"),
        ]


@dataclass(frozen=True, kw_only=True)
class Cycle(Finding):
    """Objects that refer to each other: their memory is freed only when Python's collector runs."""

    path: str
    freed_bytes: int
    """Bytes of this cell's tensors that a collection at the end freed."""
    count: int = 1
    """How often the cycle was created, at least."""

    def happened(self, _each: str) -> tuple[str, str]:
        """As of `Growth`."""
        return f"{byte_size(self.freed_bytes)} stayed in reference cycles until Python's collector ran", ""

    def rows(self, _each: str) -> Rows:
        """As of `Growth`."""
        return [("fix", self.fix), ("cycle", f"`{self.path}`"), ("made", f"{plural(self.count, 'time')} in this cell")]


@dataclass(frozen=True, kw_only=True)
class Undeleted(Finding):
    """Memory that outlives its use: its variable was deleted, or the call that allocated it has failed."""

    name: str
    """The deleted variable; empty where an error that is being handled holds the tensors of the failed call."""
    location: Location
    """The line of the ``del``, or of the call made while the error is handled."""
    live_bytes: int
    holder: str

    def happened(self, _each: str) -> tuple[str, str]:
        """As of `Growth`."""
        size = byte_size(self.live_bytes)
        of_error = f"{size} of the failed call stay allocated while its error is handled"
        return f"`del {self.name}` freed none of its {size}" if self.name else of_error, ""

    def rows(self, _each: str) -> Rows:
        """As of `Growth`."""
        return [("fix", self.fix), ("kept by", f"`{self.holder}`")]


@dataclass(frozen=True)
class Advice:
    """A remedy, and how much memory it would save on this model."""

    what: str
    saved_bytes: int
    how: str = ""
    changes_training: bool = field(default=False, kw_only=True)
    """Whether training would give different numbers."""


@dataclass(frozen=True, kw_only=True)
class Oom(Finding):
    """An allocation that was refused."""

    asked_bytes: int
    op: str
    module: str
    phase: Phase
    iteration: int | None
    """1-based iteration of the loop; 0 outside a loop, and None where the cell was not traced."""
    kind: Literal["sizing", "leak", "fragmentation", "handled error"]
    live_bytes: int
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    unused_reserved_bytes: int = 0
    """Bytes that the caching allocator has reserved on the device and that no tensor uses."""
    advice: tuple[Advice, ...] = ()
    """Remedies, those that change training least first; `best` is the one to begin with."""

    @property
    def stage(self) -> Stage:
        """It ended the cell, unless its error was handled."""
        return "end"

    @property
    def best(self) -> Advice | None:
        """The remedy for the cause; without a cause, the one that saves most and does not change training."""
        if self.kind != "sizing":
            return self.advice[-1] if self.advice else None
        return max(self.advice, key=lambda one: one.saved_bytes * (not one.changes_training), default=None)

    def happened(self, _each: str) -> tuple[str, str]:
        """As of `Growth`."""
        refused = f"{byte_size(self.asked_bytes)} refused" if self.asked_bytes else "memory refused"
        return f"out of memory: {refused} {self._when()}".rstrip(), ""

    def rows(self, _each: str) -> Rows:
        """As of `Growth`."""
        best = self.best
        how = "" if best is None else f"{best.what} (saves {byte_size(best.saved_bytes)}): {best.how}"
        return [
            ("fix", _TOO_LARGE if self.asked_bytes > _FAR_MORE * self.live_bytes else how),
            ("allocated", f"{byte_size(self.live_bytes)} in live tensors when it was refused"),
            ("operation", " in ".join(f"`{text}`" for text in (self.op, self.module) if text)),
        ]

    def _when(self) -> str:
        if self.iteration is None:
            return ""
        if self.kind == "fragmentation":
            return f"though {byte_size(self.unused_reserved_bytes)} are reserved and unused"
        if self.kind == "handled error":
            return "while an error is handled"
        if self.kind == "leak":
            return f"in iteration {self.iteration:,}, after steady growth"
        if self.iteration > 1:
            return f"in iteration {self.iteration:,}, though nothing grew"
        return "in the first iteration" if self.iteration else "in a single allocation"


Leading: TypeAlias = Growth | GraphGrowth | Cycle | Undeleted | Oom
PARAMETER, GRADIENT, OPTIMIZER_STATE = "parameter", "gradient", "optimizer state"
ACTIVATION, BUFFER, TEMPORARY, OTHER = "activation", "buffer", "temporary", "other"


@dataclass(frozen=True, kw_only=True)
class Site:
    """The memory that one line allocated, in one module and phase."""

    location: Location | None
    """None for memory whose op was not traced: in compiled code, in another thread, or in a step that was only counted."""
    module: str
    """Module path; for a backward op, that of its forward op."""
    category: str
    """``parameter``, ``gradient``, ``optimizer state``, ``activation``, ``buffer``, ``temporary`` or ``other``."""
    phase: Phase
    allocated_bytes: int
    """Bytes allocated in total."""
    live_bytes: int
    """Bytes of these that were still allocated at the end."""
    count: int
    """Number of allocations."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment at which live memory was largest."""

    phase: Phase
    op: str
    """The op that allocated last before the peak, such as ``aten.addmm``; empty where it was not traced."""
    location: Location | None
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    """Bytes allocated in the cell, by module path."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """PyTorch's memory on one device."""

    device: str
    net_bytes: int
    peak_bytes: int
    """The peak of traced memory."""
    allocated_bytes: int | None = None
    """Bytes in tensors at the end, counted by the device's allocator; None for a device without one."""
    allocated_peak_bytes: int | None = None
    """The allocator's own peak; None where the counter, which is not reset, was as high before the cell."""
    reserved_bytes: int | None = None
    """Bytes that the allocator had reserved on the device at the end, tensors included."""
    reserved_peak_bytes: int | None = None
    """As `allocated_peak_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A variable that holds memory which the cell allocated."""

    path: str
    """Path to the first tensor."""
    variable: str
    """The variable at the start of the path."""
    live_bytes: int
    location: Location | None
    """The line that allocated most of it."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live bytes by category over the events of the cell."""

    categories: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stretches: tuple[tuple[Phase, int], ...] = ()
    """Each uninterrupted period of a phase, and the point at which it begins."""
    peak: int = 0
    """The point of the peak."""
    marks: tuple[int, ...] = ()
    """The points of the marks, in order."""
    counted: int | None = None
    """The point from which steps were only counted unless their memory changed; None where all were traced."""


@dataclass(frozen=True, kw_only=True)
class TraceMark(Mark):
    """A mark taken while the cell was traced."""

    torch_bytes: int
    """Bytes in tensors on all devices, as traced."""
    phase: Phase


@dataclass(frozen=True)
class LiveMemory:
    """Memory while the cell runs."""

    now_bytes: int
    """Bytes in traced tensors."""
    peak_bytes: int
    phase: Phase
    steps_count: int
    gauges: tuple[Gauge, ...]
