"""Takes the fingerprint of a run."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.fingerprint import RECORD, Fingerprint
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdebug_magics.instruments.deterministic.ops.op import Op
    from torchdebug_magics.instruments.deterministic.ops.recording import Recording, Seen
    from torchdebug_magics.probing.hooks import Hooks
    from torchdebug_magics.report import Location

__all__ = ["Printer"]


class Printer:
    """Writes down every op that a recorder sees."""

    def __init__(self, recording: Recording, hooks: Hooks) -> None:
        self._recording = recording
        self._hooks = hooks
        self._calls = ModuleCalls((), hooks)
        self._modules: dict[str, int] = {"": 0}
        self._records = bytearray()
        self._devices: set[str] = set()

    def attach(self, stack: ExitStack, modules: Iterable[torch.nn.Module]) -> None:
        """Follow module calls from here until the stack closes."""
        self._calls = ModuleCalls(modules, self._hooks)
        self._calls.attach(stack)

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
        )

    def seen(self, seen: Seen, op: Op) -> None:
        """One more op."""
        running = self._calls.current
        module = self._modules.setdefault("" if running is None else running.path, len(self._modules))
        is_backward = torch._C._current_autograd_node() is not None
        bits = is_backward | op.plan.is_random << 1 | (op.empty is not None and op.plan.passes_on) << 2
        self._records += RECORD.pack(seen.op, seen.line, module, bits, seen.given, seen.gave, *self._summary(op))

    def _summary(self, op: Op) -> tuple[float, float]:
        if op.plan.is_view or op.plan.is_empty:
            return 0.0, 0.0
        total = magnitude = 0.0
        for tensor in tensors_in(op.result) if op.result is not None else op.written:
            self._devices.add(tensor.device.type)
            if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta:
                plain: Any = tensor.detach()
                total += plain.sum(dtype=torch.float64).item()
                magnitude += plain.abs().sum(dtype=torch.float64).item()
        return total, magnitude if not math.isnan(total) else math.nan
