"""All that code can reach from some objects, and the disk, as they are now, and back again, whatever interrupts come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchdebug_magics.probing.outside.effects import Effects
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.snapshot import Bound, Snapshot

_BOUND = Bound(objects=1_000_000, bytes=1 << 30)
_DATA_BYTES = 1 << 30
"""How much of tensors that are no part of a model or an optimizer is copied, the smallest first: a training rarely writes to its data."""


def listening() -> list[object]:
    """What the user let torch call, or see, everywhere: global module hooks and modes."""
    tables = [table for name, table in vars(torch_module).items() if name.startswith("_global_") and name.endswith("_hooks")]
    hooks = [hook for table in tables if isinstance(table, dict) for hook in table.values()]
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin without keywords
    return [*hooks, saving, *_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


def eager() -> contextlib.AbstractContextManager[Any]:
    """What is compiled runs op by op, and nothing is compiled, least of all our own hooks."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class KeptState:
    """Everything that is reachable from `roots`, and the disk as `effects` keeps it; `guard` notes what could not be put back."""

    def __init__(self, roots: Iterable[object], guard: Guard, effects: Effects) -> None:
        self._guard, self.effects = guard, effects
        self._kept = Snapshot([*roots, *listening()], _BOUND)
        contents = self._kept.contents
        tensors = [tensor for tensor in self._kept.of_kind(torch.Tensor) if not is_lazy(tensor)]
        trained = _trained(self._kept)
        for tensor in (*(tensor for tensor in tensors if id(tensor) in trained), *(leaf.gradient for leaf in self._kept.gradients)):
            if tensor is not None:
                contents.keep(tensor)
        room_bytes = _DATA_BYTES
        for tensor in sorted((tensor for tensor in tensors if id(tensor) not in trained), key=_size_bytes):
            room_bytes -= _size_bytes(tensor)
            if room_bytes < 0:
                break
            guard.run("keeping a tensor", contents.keep, tensor)

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """What is reachable of a type."""
        return self._kept.of_kind(kind)

    def put_back(self) -> None:
        """Make all of it as it was. May be done again, also where an interrupt has ended the first time."""
        self.effects.again()
        self._kept.put_back(self._guard)


def _trained(objects: Snapshot) -> set[int]:
    """The ids of tensors that belong to a model or to an optimizer."""
    models = objects.of_kind(torch.nn.Module)
    own = [parameter for model in models for parameter in (*model._parameters.values(), *model._buffers.values()) if parameter is not None]
    for optimizer in objects.of_kind(torch.optim.Optimizer):
        own += [one for group in optimizer.param_groups for one in group["params"]]
        entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
        own += [one for entry in entries for one in entry.values() if isinstance(one, torch.Tensor)]
    return set(map(id, own))


def _size_bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
