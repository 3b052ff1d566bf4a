"""A replay leaves the world as it found it: what is put aside before it, and put back after it, whatever happens in between.

What the user has hung into a step runs again in the replay: hooks of modules and tensors, and modes. They cannot be left out, as a
hook may change an output, and a mode any result: the replay would be that of another step. What they *did* is undone instead, with
everything else that can be reached from them: a counter counts on from where it was, a list of activations holds those of the run.
What leaves the process, a line written to a file or a request, is the matter of `probing.outside`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchdebug_magics.probing.contents import Contents, memory_of
from torchdebug_magics.probing.dispatch import OpListener, Run
from torchdebug_magics.probing.graphs import is_graph_leaf
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.ops import written_by
from torchdebug_magics.probing.outside.effects import Effects
from torchdebug_magics.probing.rerun.buffers import BufferKeeper
from torchdebug_magics.probing.rerun.step import Step
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.snapshot import Bound, Snapshot
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.probing.unsent_collectives import LoneRerun

_BOUND = Bound(objects=1_000_000, bytes=1 << 30)
_DATA_BYTES = 1 << 30
"""How much of tensors that are no part of a model or an optimizer is copied, the smallest first: a training rarely writes to its data."""


class ReplayState:
    """Everything that a replay may change, as it is now; the step's start in its place, and back again.

    `reached`: objects that the replayed code begins from. `before`: torch's random state before the first statement. `guard` notes what
    could not be put back. No context manager: an interrupt at the edge of one leaves it open, and this must never stay half done.
    """

    def __init__(
        self,
        step: Step,
        before: torch.Tensor | None,
        leaves: Iterable[torch.Tensor],
        modules: list[torch.nn.Module],
        reached: Iterable[object],
        guard: Guard,
        calls_models: bool = True,
    ) -> None:
        self._step, self._before, self._guard = step, before, guard
        self.alone = LoneRerun()
        self.alone.refuse(modules if calls_models else ())
        self._gradients = [(leaf, leaf.grad) for leaf in leaves]
        self._random, self._flags = RandomState.take(), Flags()
        self._buffers = BufferKeeper(inner for module in modules for inner in module.modules()).take()
        self._inputs = [(tensor, tensor.detach().clone()) for entry in step.entries for tensor, _ in entry.copies]
        written = [one for state in step.python for one in state.reached]
        self._objects = Snapshot([*written, *reached, *modules, *(leaf for leaf, _ in self._gradients), *listening()])
        self.writes = Writes()

    def start(self) -> None:
        """All as it was when the step began."""
        self.alone.start()
        for leaf, _ in self._gradients:
            leaf.grad = None
        for kept in self._step.buffers:
            kept.put_back()
        for state in self._step.python:
            state.put_back(self._guard)
        if self._step.entries:
            self._step.entries[0].random.put_back()
        if self._before is not None:
            torch.set_rng_state(self._before)
        _write_into((tensor, copy) for entry in self._step.entries for tensor, copy in entry.copies)

    def undo(self) -> None:
        """All as it was when this was made. May be done twice, where an interrupt has ended the first time."""
        self._flags.put_back()
        self.writes.put_back()
        _write_into(self._inputs)
        self._buffers.put_back()
        self._objects.put_back(self._guard)
        self.alone.put_back()
        for leaf, gradient in self._gradients:
            leaf.grad = gradient
        self._random.put_back()


def listening() -> list[object]:
    """What the user let torch call, or see, everywhere: global module hooks and modes."""
    tables = [table for name, table in vars(torch_module).items() if name.startswith("_global_") and name.endswith("_hooks")]
    hooks = [hook for table in tables if isinstance(table, dict) for hook in table.values()]
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin without keywords
    return [*hooks, saving, *_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


class Flags:
    """Flags of the process that nobody may have put back when an error, or an interrupt, ends the replay."""

    def __init__(self) -> None:
        self._streams, self._logging = (sys.stdout, sys.stderr), logging.root.manager.disable
        self._warnings = warnings.filters
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._deterministic = _deterministic()

    def put_back(self) -> None:
        """As they were when this was made."""
        sys.stdout, sys.stderr = self._streams
        logging.disable(self._logging)
        if warnings.filters is not self._warnings:
            warnings.filters = self._warnings
            warnings.resetwarnings.__globals__.get("_filters_mutated", lambda: None)()
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        if self._deterministic != _deterministic():
            torch.use_deterministic_algorithms(self._deterministic[0], warn_only=self._deterministic[1])


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _write_into(held: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, copy in held:
            tensor.data.copy_(copy)


def eager() -> contextlib.AbstractContextManager[Any]:
    """What is compiled runs op by op, and nothing is compiled, least of all our own hooks."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class Writes:
    """Listens to the ops of a replay."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        """Memory that ops of the replay made; its addresses were free before, so none can be older."""
        self.contents = Contents()

    def listener(self, owner: object = None) -> OpListener:
        """The mode that sees every op of the replay; a sweep of the owner's finds it."""
        return OpListener(self._before_write, owner)

    def put_back(self) -> None:
        """Undo the writes."""
        self.contents.put_back()

    def _before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        for tensor in written_by(func, args, kwargs):
            memory = memory_of(tensor)
            if memory and memory not in self._own:
                self.contents.keep(tensor)
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = run()
        self._own.update({memory_of(tensor) for tensor in tensors_in(result)} - given)
        return result


class KeptState:
    """Everything that is reachable from `roots`, and the disk as `effects` keeps it; `guard` notes what could not be put back."""

    def __init__(self, roots: Iterable[object], guard: Guard, effects: Effects) -> None:
        self._guard, self.effects = guard, effects
        self._objects = Snapshot([*roots, *listening()], _BOUND)
        tensors = [one for one in self._objects.of_kind(torch.Tensor) if not is_lazy(one)]
        self._leaves = [(one, one.grad, one.requires_grad) for one in tensors if _is_leaf(one)]
        self._contents = Contents()
        trained = _trained(self._objects)
        for tensor in tensors:
            if id(tensor) in trained:
                self._contents.keep(_once(tensor))
        for _, gradient, _ in self._leaves:
            if gradient is not None:
                self._contents.keep(_once(gradient))
        room_bytes = _DATA_BYTES
        for tensor in sorted((one for one in tensors if id(one) not in trained), key=_size_bytes):
            room_bytes -= _size_bytes(tensor)
            if room_bytes < 0:
                break
            guard.run("keeping a tensor", self._contents.keep, _once(tensor))
        self._random = RandomState.take()
        self._settings = Flags()

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """What is reachable of a type."""
        return self._objects.of_kind(kind)

    def put_back(self) -> None:
        """Make all of it as it was. May be done again, also where an interrupt has ended the first time."""
        self.effects.again()
        self._settings.put_back()
        self._objects.put_back(self._guard)
        self._contents.put_back()
        for tensor, gradient, requires_grad in self._leaves:
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        self._random.put_back()


def _is_leaf(tensor: torch.Tensor) -> bool:
    return is_graph_leaf(tensor) and not tensor.is_inference() and (tensor.is_floating_point() or tensor.is_complex())


def _trained(objects: Snapshot) -> set[int]:
    """The ids of tensors that belong to a model or to an optimizer."""
    models = objects.of_kind(torch.nn.Module)
    own = [one for model in models for one in (*model._parameters.values(), *model._buffers.values()) if one is not None]
    for optimizer in objects.of_kind(torch.optim.Optimizer):
        own += [one for group in optimizer.param_groups for one in group["params"]]
        entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
        own += [one for entry in entries for one in entry.values() if isinstance(one, torch.Tensor)]
    return set(map(id, own))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Of an expanded tensor, each number once: what stands for several cannot be written."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor


def _size_bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
