"""What each op of a run gave, in a few bytes: taken while it runs; plain data, to be kept, written and compared elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import linecache
import math
import struct
import sys
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, Seen, tensors
from torchdebug_magics.probing.compiler import away_from_the_compiler
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, location
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Location

_RECORD = struct.Struct("<IIIBQQdd")
"""Op, place, module, bits, and the four numbers of `OpPrint`; 45 bytes."""
_OVERWRITTEN = 1 << 31
"""Added to the number of an op whose result is not read, but written over."""


class OpPrint(NamedTuple):
    """One op."""

    op: str
    place: Location | None
    module: str
    is_backward: bool
    is_random: bool
    is_unread: bool
    """Whether it only moved memory that nobody had written: what it gave need not agree."""
    given: int
    """A digest of its plain arguments, and of data that no op before it made."""
    gave: int
    """A digest of what it returned or wrote."""
    total: float
    """The sum of its floating outputs; 0 without any."""
    magnitude: float
    """The sum of their absolute values."""


class Update(NamedTuple):
    """One step of an optimizer, as it began."""

    first: int
    """The number of its first op."""
    end: int
    """The number of the first op after it."""
    optimizer: str
    """Its class."""
    state: tuple[str, ...]
    """Names of the tensors that it goes on with, such as ``exp_avg``; none at its first step."""
    settings: tuple[tuple[str, str], ...]
    """Learning rate and other numbers of its parameter groups, by name."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """One run, op by op. Names and places are stored once; `records` holds a fixed number of bytes for each op."""

    torch_version: str
    device: str
    """Of the accelerator in use, or ``"cpu"``."""
    threads_count: int
    ops: tuple[str, ...]
    places: tuple[Location | None, ...]
    modules: tuple[str, ...]
    records: bytes
    flow: bytes = b""
    """For each op, how many numbers follow, then the numbers of the ops that made what it is given, as `Printer` wrote them."""
    updates: tuple[Update, ...] = ()
    code: tuple[Location, ...] = ()
    """Every line of the cells that ran."""

    def __len__(self) -> int:
        return len(self.records) // _RECORD.size

    def __iter__(self) -> Iterator[OpPrint]:
        for op, place, module, bits, *numbers in _RECORD.iter_unpack(self.records):
            yield OpPrint(self.ops[op], self.places[place], self.modules[module], bool(bits & 1), bool(bits & 2), bool(bits & 4), *numbers)

    def flows(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each op the numbers of the ops that made, wrote or first met what it reads, and what it writes over; empty in an old file."""
        numbers = iter(array("I", self.flow))
        for _ in range(len(self)):
            given = [*islice(numbers, next(numbers, 0))]
            yield tuple(one for one in given if one < _OVERWRITTEN), tuple(one - _OVERWRITTEN for one in given if one >= _OVERWRITTEN)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; bytes as base64."""
        return {**dataclasses.asdict(self), **{name: base64.b64encode(getattr(self, name)).decode("ascii") for name in ("records", "flow")}}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Fingerprint:
        """Of what `to_dict` wrote; a KeyError or a TypeError where it is something else."""
        return cls(
            torch_version=held["torch_version"],
            device=held["device"],
            threads_count=held["threads_count"],
            ops=tuple(held["ops"]),
            places=tuple(None if place is None else Location(**place) for place in held["places"]),
            modules=tuple(held["modules"]),
            records=base64.b64decode(held["records"]),
            flow=base64.b64decode(held.get("flow", "")),
            updates=tuple(
                Update(first, end, optimizer, tuple(state), tuple((name, value) for name, value in settings))
                for first, end, optimizer, state, settings in held.get("updates", ())
            ),
            code=tuple(Location(**place) for place in held.get("code", ())),
        )


class Printer:
    """Writes down every op that a recorder sees."""

    def __init__(self, recording: Recording, hooks: Hooks) -> None:
        self._recording = recording
        self._hooks = hooks
        self._calls = ModuleCalls((), hooks)
        self._modules: dict[str, int] = {"": 0}
        self._records = bytearray()
        self._devices: set[str] = set()
        self._flow = array("I")
        self._makers: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Storage, by address, and the number of the op that made, wrote or first met what it holds."""
        self._count = 0
        self._updates: list[Update] = []
        self._files: dict[str, None] = {}
        """Those that the first op was called through."""

    def attach(self, stack: ExitStack, modules: Iterable[torch.nn.Module], guard: Guard) -> None:
        """Follow the calls of modules and the steps of optimizers from here until the stack closes."""
        self._calls = ModuleCalls(modules, self._hooks)
        self._calls.attach(stack)
        away_from_the_compiler(stack, self._hooks, guard)
        self._hooks.optimizer_steps(stack, self._before_update, self._after_update)

    def fingerprint(self) -> Fingerprint:
        """Of all ops so far."""
        places = [None if line is None else line.location for line in self._recording.places]
        files = (*self._files, *sorted({place.file for place in places if place is not None} - self._files.keys()))
        lines = (location(file, number, "") for file in files for number in range(1, len(linecache.getlines(file)) + 1))
        return Fingerprint(
            torch_version=torch.__version__,
            device=", ".join(sorted(self._devices - {"cpu"})) or "cpu",
            threads_count=torch.get_num_threads(),
            ops=tuple(self._recording.ops),
            places=tuple(places),
            modules=tuple(self._modules),
            records=bytes(self._records),
            flow=self._flow.tobytes(),
            updates=tuple(self._updates),
            code=tuple(line for line in lines if line.cell is not None and line.source),
        )

    def seen(self, seen: Seen, op: Op) -> None:
        """One more op."""
        if not self._count:
            self._files = dict.fromkeys(frame.f_code.co_filename for frame in frames_above(sys._getframe(1)) if is_user_code(frame.f_code))
        running = self._calls.current
        module = self._modules.setdefault("" if running is None else running.path, len(self._modules))
        is_backward = torch._C._current_autograd_node() is not None
        bits = is_backward | op.plan.is_random << 1 | (op.empty is not None and op.plan.passes_on) << 2
        self._records += _RECORD.pack(seen.op, seen.line, module, bits, seen.given, seen.gave, *self._summary(op))
        self._follow(op)
        self._count += 1

    def _follow(self, op: Op) -> None:
        written = {id(tensor) for tensor in op.written}
        given: dict[int, None] = {}
        met = []
        for tensor in (*tensors(op.args), *tensors(tuple(op.kwargs.values()))):
            maker = self._maker(tensor)
            if maker is None:
                met.append(tensor)
            else:
                given[maker | _OVERWRITTEN if op.plan.is_overwriting and id(tensor) in written else maker] = None
        self._flow.extend((len(given), *given))
        made = [tensor for tensor in tensors(op.result) if id(tensor) not in written and self._maker(tensor) is None]
        for tensor in (*met, *made, *op.written):
            memory = memory_of(tensor)
            if memory:
                self._makers[memory] = weakref.ref(tensor.untyped_storage()), self._count

    def _maker(self, tensor: torch.Tensor) -> int | None:
        known = self._makers.get(memory_of(tensor))
        return known[1] if known is not None and known[0]() is tensor.untyped_storage() else None

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        state: dict[str, Any] = next(iter(optimizer.state.values()), {})
        names = tuple(sorted(name for name, value in state.items() if value is not None and name != "step"))
        settings: dict[str, str] = {}
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, (bool, int, float)) or (isinstance(value, tuple) and all(isinstance(one, float) for one in value)):
                    settings[f"{name} of group {number}" if len(optimizer.param_groups) > 1 else name] = repr(value)
        self._updates.append(Update(self._count, self._count, type(optimizer).__name__, names, tuple(settings.items())))

    def _after_update(self, _optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if self._updates:
            self._updates[-1] = self._updates[-1]._replace(end=self._count)

    def _summary(self, op: Op) -> tuple[float, float]:
        if op.plan.is_view or op.plan.is_empty or op.plan.is_collective:
            return 0.0, 0.0
        total = magnitude = 0.0
        for tensor in tensors_in(op.result) if op.result is not None else op.written:
            self._devices.add(tensor.device.type)
            if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta:
                plain: Any = tensor.detach()
                total += plain.sum(dtype=torch.float64).item()
                magnitude += plain.abs().sum(dtype=torch.float64).item()
        return total, magnitude if not math.isnan(total) else math.nan
