"""Takes the fingerprint of a run."""

from __future__ import annotations

import linecache
import math
import sys
import weakref
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from torchdebug_magics.instruments.deterministic.fingerprint import OVERWRITTEN, RECORD, Fingerprint, Update
from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, Seen, tensors
from torchdebug_magics.probing.compiler import away_from_the_compiler
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, location
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Location


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
        places: list[Location | None] = [None if line is None else line.location for line in self._recording.places]
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
            code=tuple(self._code({place.file for place in places if place is not None})),
        )

    def _code(self, files: set[str]) -> Iterator[Location]:
        for file in (*self._files, *sorted(files - self._files.keys())):
            for number in range(1, len(linecache.getlines(file)) + 1):
                line = location(file, number, "")
                if line.cell is not None and line.source:
                    yield line

    def seen(self, seen: Seen, op: Op) -> None:
        """One more op."""
        if not self._count:
            self._files = dict.fromkeys(frame.f_code.co_filename for frame in frames_above(sys._getframe(1)) if is_user_code(frame.f_code))
        running = self._calls.current
        module = self._modules.setdefault("" if running is None else running.path, len(self._modules))
        is_backward = torch._C._current_autograd_node() is not None
        bits = is_backward | op.plan.is_random << 1 | (op.empty is not None and op.plan.passes_on) << 2
        self._records += RECORD.pack(seen.op, seen.line, module, bits, seen.given, seen.gave, *self._summary(op))
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
                given[maker | OVERWRITTEN if op.plan.is_overwriting and id(tensor) in written else maker] = None
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
