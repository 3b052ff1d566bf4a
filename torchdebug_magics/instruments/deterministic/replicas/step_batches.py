"""Digests the inputs of each step, and tells whether seeding by the magic may have made them equal on every rank."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from multiprocessing import current_process, parent_process
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.ops.digest import EMPTY, folded, of_tensor
from torchdebug_magics.probing.children.launching import start_method
from torchdebug_magics.probing.rng import same_state
from torchdebug_magics.probing.tensors import is_traced, tensors_in
from torchdebug_magics.probing.where import locate, user_frame
from torchdebug_magics.probing.wrappers import wrap

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torchdebug_magics.instruments.deterministic.ritual.seedable import Seedable
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.report import Location

__all__ = ["Batch", "StepBatches", "is_varied"]

Batch = tuple[int, "Location | None"]
"""Its digest, and where it was drawn, or else where the model was called."""
_FIRST, _LAST, _EVERY = 8, 64, 8
_DIGEST = (1 << 32) - 1


class StepBatches:
    """Digests of the inputs of the first 8 steps, then of every 8th until the 64th.

    The ritual gives all generators the same state on each rank. In a run without it, each process begins with its own, save that a fork has
    its parent's, of torch's and NumPy's. So what may be drawn from those is the user's fault only where the user has seeded them alike.
    """

    def __init__(self, owner: object, guard: Guard) -> None:
        self._owner = owner
        self._guard = guard
        self._seeded: list[tuple[Seedable, Any]] = []
        """Generators that only the magic has seeded, with their states right after."""
        self.is_doubtful = False
        """Whether a batch may be the same by the ritual's seed."""
        self._steps_count = 0
        self._digest = EMPTY
        self._drawn: Location | None = None
        self.called: Location | None = None
        """The line of the last model call."""

    def attach(self, stack: ExitStack, seedables: Iterable[Seedable]) -> None:
        """Attach after everything was seeded."""
        is_fork = parent_process() is not None and start_method(current_process()) == "fork"
        self._seeded = [
            (one, one.read()) for one in seedables if one.name == "random" or (one.seeded in {"entropy", "unknown"} and not is_fork)
        ]
        for name, function in (("torch", "manual_seed"), ("random", "seed"), ("numpy.random", "seed")):
            if (module := sys.modules.get(name)) is not None:
                wrap(stack, self._owner, module, function, functools.partial(self._seed, name))

    @property
    def is_wanted(self) -> bool:
        """Whether this step is looked at."""
        return self._steps_count < _FIRST or (self._steps_count < _LAST and self._steps_count % _EVERY == 0)

    def drawn(self) -> None:
        """A DataLoader gives a batch."""
        frame = user_frame(sys._getframe()) if self.is_wanted else None
        self._drawn = None if frame is None else locate(frame)

    def given(self, module: torch.nn.Module, arguments: object) -> None:
        """A model is called."""
        varied = [one for one in tensors_in(arguments) if is_varied(one)]
        for one in varied:
            self._digest = folded(self._digest, of_tensor(one))
        frame = user_frame(sys._getframe()) if varied else None
        if frame is not None and next(module.parameters(), None) is not None:
            self.called = locate(frame)

    def step(self) -> Batch | None:
        """Return the batch of the current step; None if the step is not one of those, or had no data."""
        if self._digest == EMPTY:
            return None
        self._doubt()
        return self._digest & _DIGEST, self._drawn or self.called

    def forget(self) -> None:
        """That step is over."""
        self._steps_count += 1
        self._digest, self._drawn = EMPTY, None

    def _seed(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._guard.run("the look at a seed", self._seeded_by_user, name, args or tuple(kwargs.values()))
        return original(*args, **kwargs)

    def _seeded_by_user(self, name: str, given: tuple[Any, ...]) -> None:
        """Note that the user has seeded a generator: only what was drawn before may depend on the magic's seed."""
        if given and given[0] is not None:
            self._doubt(name)
            self._seeded = [(one, state) for one, state in self._seeded if one.name != name]

    def _doubt(self, name: str = "") -> None:
        """Become doubtful if one of the generators, or the one of that name, was drawn from."""
        moved = (not same_state(one.read(), state) for one, state in self._seeded if name in {"", one.name})
        self.is_doubtful = self.is_doubtful or any(moved)


def is_varied(tensor: torch.Tensor) -> bool:
    """Whether it can tell one batch from another: data, of which some differ."""
    if is_traced(tensor) or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() < 2:  # noqa: PLR2004
        return False
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.is_quantized:
        return False
    return not bool((tensor == tensor.flatten()[0]).all())
