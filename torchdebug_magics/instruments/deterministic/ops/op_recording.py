"""What can be told of an op before it runs, from its schema: read once an op."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from torchdebug_magics.probing.ops import is_movement, is_overwriting, is_pointwise, is_uninitialised, is_writing_in_part, op_name
from torchdebug_magics.probing.source.lines import Line

_SEEN = struct.Struct("<IIQQ")
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
_INDEX_AT = {"index": 1, "index_put": 1, "masked_select": 1, "masked_fill": 1, "take": 1, "embedding": 1} | dict.fromkeys(
    ("index_select", "gather", "scatter", "index_copy", "index_fill", "index_add"), 2
)
_ATTENTION = "run it under `sdpa_kernel(SDPBackend.MATH)`, or use `--strict`: PyTorch then selects a deterministic backward"
_REPAIRS: Mapping[str, str] = {
    "put_": "assign to the flat view `.view(-1)` by index, which is deterministic",
    "max_unpool": "scatter into zeros with `.scatter`, both flattened by `.flatten(-2)`, which is deterministic",
    "flash attention": _ATTENTION,
    "memory efficient attention": _ATTENTION,
    "upsample": "use `mode='nearest'` in `F.interpolate`",
    "grid_sampler": "compute it on the CPU: call `F.grid_sample` with `.cpu()` tensors",
    "cumsum": "compute it on the CPU, as `.cpu().cumsum(0)` does",
    "adaptive_avg_pool": "where the sizes divide, average each dimension with `.unflatten` and `.mean(-1)`",
    "avg_pool3d": "average each dimension with `.unflatten` and `.mean(-1)`",
    "adaptive_max_pool": "use `F.max_pool2d` of a fixed size",
    "fractional_max_pool": "use `F.max_pool2d` of a fixed size",
    "reflection_pad": "use `mode='constant'`, or pad by indexing",
    "nll_loss2d": "flatten first: `.movedim(1, -1).flatten(0, -2)` for the scores, `.flatten()` for the targets",
    "ctc_loss": "compute it on the CPU: call `F.ctc_loss` with `.cpu()` tensors",
    "histc": "count on the CPU, as `.cpu().histc()` does",
    "bincount": "add the weights to zeros with `.index_add_`, which is deterministic",
    "scatter_reduce": "reduce on the CPU; `reduce='sum'` and `'mean'` are deterministic",
    "median": "take the value from `torch.sort`",
    "embedding_bag": "use `mode='sum'` or `'mean'`",
}
_SETTING = "`torch.use_deterministic_algorithms(True)` makes it deterministic"
_WITH_SETTING = (
    "embedding_dense_backward", "index_add", "index_copy", "index_put", "put", "replication_pad", "scatter",
)  # fmt: skip
_ON_GPUS = ("convolution", "cudnn_convolution", "bmm", "max_pool3d", "repeat_interleave", "gather", "index_select")
"""Only there, and only without the setting, which holds in each run that is compared."""


@dataclass(frozen=True)
class Plan:
    """Of one op."""

    name: str
    """The dispatcher's, such as ``aten.add.Tensor``."""
    base: str
    """Without namespace and overload, such as ``add``."""
    is_view: bool
    """Whether all that it gives is memory that it was given; such as by `set_`, which takes a storage that came from another process."""
    is_random: bool
    """Whether it draws from a generator."""
    is_empty: bool
    """Whether it gives memory that nobody has written."""
    is_overwriting: bool
    """Whether what it writes does not depend on what was there."""
    is_steady: bool
    """Whether equal inputs always give equal results: it moves numbers, or computes each by itself."""
    passes_on: bool
    """Whether memory that nobody has written may be in what it gives, and it has not looked at it."""
    index_at: int
    """The place of the argument that says which numbers to move, and so is read; -1 where there is none."""
    is_collective: bool
    """Whether it gives what other ranks have sent, perhaps later: nothing is read of it, and who reads it is given it from outside."""


def is_collective(name: str) -> bool:
    """Whether an op of that name, such as ``c10d._allgather_base_.default``, communicates with other ranks."""
    return name.partition(".")[0] in _COLLECTIVES


@cache
def plan_of(func: Any) -> Plan:
    """The plan of an op."""
    returns = [one.alias_info for one in func._schema.returns]
    base = op_name(func)
    is_view = base == "set_" or (bool(returns) and all(alias is not None and not alias.is_write for alias in returns))
    return Plan(
        name=str(func),
        base=base,
        is_view=is_view,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_empty=is_uninitialised(base) and base != "_efficientzerotensor",
        is_overwriting=is_overwriting(func),
        is_steady=is_view or is_movement(func) or is_pointwise(func),
        passes_on=is_movement(func) or is_writing_in_part(func),
        index_at=_INDEX_AT.get(base.removesuffix("_"), -1),
        is_collective=is_collective(str(func)),
    )


class Empty(NamedTuple):
    """An op that made memory which nobody has written."""

    plan: Plan
    line: Line | None


class Seen(NamedTuple):
    """One op of a run, by numbers: 24 bytes where it is kept."""

    op: int
    line: int
    given: int
    """Of its plain arguments, and of tensors that no op before it made."""
    gave: int
    """Of what it returned, or wrote."""


class Op(NamedTuple):
    """One op that has just run."""

    place: int
    """How many ops ran before it."""
    seen: Seen
    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: Line | None
    result: Any
    written: list[torch.Tensor]
    empty: Empty | None
    """What made memory that nobody has written as a whole, and that it was given; None where there is none such."""


def view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Which part of its memory it is."""
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in a value, as an op takes and gives it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def is_documented(base: str) -> bool:
    """Whether torch's documentation calls an op non-deterministic on some device; by its ATen name without the overload."""
    name = base.lstrip("_")
    return name.startswith((*_WITH_SETTING, *_REPAIRS))


def repair(op: str) -> str:
    """What to write in the place of an op, by its ATen name or the one in torch's warning; empty where nothing is known."""
    name = op.lower().lstrip("_")
    known = next((text for begin, text in _REPAIRS.items() if name.startswith(begin)), "")
    return known or (_SETTING if name.startswith((*_WITH_SETTING, *_ON_GPUS)) else "")


@dataclass
class Recording:
    """What was seen so far; `ops` and `lines` are shared by recordings that are to be compared."""

    ops: dict[str, int] = field(default_factory=dict)
    """Name -> number, in the order of the numbers."""
    lines: dict[tuple[str, int], int] = field(default_factory=dict)
    """(file, line) -> number; 0 is no line of the user's."""
    places: list[Line | None] = field(default_factory=lambda: [None])
    """Number -> line."""
    lent: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = field(default_factory=dict)
    """Address -> the storage there, and whether others may write to it."""
    _seen: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self._seen) // _SEEN.size

    def __getitem__(self, place: int) -> Seen:
        return Seen(*_SEEN.unpack_from(self._seen, place * _SEEN.size))

    def __iter__(self) -> Iterator[Seen]:
        return map(Seen._make, _SEEN.iter_unpack(self._seen))

    def add(self, seen: Seen) -> None:
        """One more op."""
        self._seen += _SEEN.pack(*seen)

    def another(self) -> Recording:
        """An empty one with the same numbers for ops and lines, to be compared with this one."""
        return Recording(self.ops, self.lines, self.places, self.lent)

    def is_lent(self, storage: torch.UntypedStorage, memory: int) -> bool:
        """Whether others may write to it at any time, such as an array of NumPy's; a later run says of it what the first one has said."""
        known = self.lent.get(memory)
        if known is not None and known[0]() is storage:
            return known[1]
        is_lent = storage.device.type == "cpu" and not storage.resizable() and not storage.is_shared()
        self.lent[memory] = weakref.ref(storage), is_lent
        return is_lent

    def number_of_line(self, line: Line | None) -> int:
        """The same for the same line of the same file, whichever code object it is in."""
        if line is None:
            return 0
        number = self.lines.setdefault((line.file, line.line), len(self.places))
        if number == len(self.places):
            self.places.append(line)
        return number

    def occurrence(self, place: int) -> int:
        """Which call of that op at that line it is, 1-based."""
        op, line, *_ = self[place]
        return sum(seen[:2] == (op, line) for seen in islice(self, place + 1))
