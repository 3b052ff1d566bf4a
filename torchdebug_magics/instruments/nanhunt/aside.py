"""A replay leaves the world as it found it: what is put aside before it, and put back after it, whatever happens in between.

What the user has hung into a step runs again in the replay: hooks of modules and tensors, and modes. They cannot be left out, as a
hook may change an output, and a mode any result: the replay would be that of another step. What they *did* is undone instead, with
everything else that can be reached from them: a counter counts on from where it was, a list of activations holds those of the run.
What leaves the process (a request, a line written to a file) cannot be taken back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchdebug_magics.instruments.nanhunt.writes import Writes
from torchdebug_magics.probing.buffers import BufferKeeper
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.snapshot import Snapshot

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.step import Step
    from torchdebug_magics.probing.guard import Guard

__all__ = ["as_at_the_start", "eager"]


@contextlib.contextmanager
def as_at_the_start(
    step: Step,
    before: torch.Tensor | None,
    leaves: Iterable[torch.Tensor],
    modules: list[torch.nn.Module],
    reached: Iterable[object],
    guard: Guard,
) -> Iterator[Writes]:
    """The state at the step's start inside, the present one again outside. `reached`: objects that the replayed code begins from.

    `before`: torch's random state before the first statement. `guard` notes what could not be put back.
    """
    leaves = list(leaves)
    gradients = [leaf.grad for leaf in leaves]
    random, parts = RandomState.take(), [inner for module in modules for inner in module.modules()]
    buffers = BufferKeeper(parts).take()
    inputs = [(tensor, tensor.detach().clone()) for entry in step.entries for tensor, _ in entry.copies]
    written = [one for state in step.python for one in state.reached]
    objects = Snapshot([*written, *reached, *modules, *leaves, *_listening()])
    flags, writes = _Flags(), Writes()

    def put_back() -> None:
        flags.put_back()
        writes.put_back()
        _write_into(inputs)
        buffers.put_back()
        objects.put_back(guard)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        random.put_back()

    try:
        for leaf in leaves:
            leaf.grad = None
        for kept in step.buffers:
            kept.put_back()
        for state in step.python:
            state.put_back(guard)
        if step.entries:
            step.entries[0].random.put_back()
        if before is not None:
            torch.set_rng_state(before)
        _write_into((tensor, copy) for entry in step.entries for tensor, copy in entry.copies)
        yield writes
    finally:
        _to_the_end(put_back)


def _listening() -> list[object]:
    """What the user let torch call, or see, everywhere: global module hooks and modes."""
    tables = [table for name, table in vars(torch_module).items() if name.startswith("_global_") and name.endswith("_hooks")]
    hooks = [hook for table in tables if isinstance(table, dict) for hook in table.values()]
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin without keywords
    return [*hooks, saving, *_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


class _Flags:
    """Settings that a context manager of the user's need not have put back when an error ends the replay."""

    def __init__(self) -> None:
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._deterministic = _deterministic()

    def put_back(self) -> None:
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        if self._deterministic != _deterministic():
            torch.use_deterministic_algorithms(self._deterministic[0], warn_only=self._deterministic[1])


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _to_the_end(work: Callable[[], None]) -> None:
    """An interrupt in the middle of it may not leave it half done: all of it can be done twice."""
    try:
        work()
    except BaseException:
        work()
        raise


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
