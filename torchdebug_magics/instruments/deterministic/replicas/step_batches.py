"""Digests the batches of the first steps, so that ranks that draw the same ones can be found."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from multiprocessing import current_process, parent_process
from typing import Any

import torch

from torchdebug_magics.instruments.deterministic.ritual.status import Seedable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import locate, user_frame
from torchdebug_magics.probing.state.digest import EMPTY, folded, of_tensor
from torchdebug_magics.probing.state.rng import same_state
from torchdebug_magics.probing.tensors import is_traced, tensors_in
from torchdebug_magics.probing.wrappers import wrap
from torchdebug_magics.ranks.launching import start_method
from torchdebug_magics.report import Location

_DIGEST = (1 << 32) - 1
Batch = tuple[int, "Location | None"]
"""Its digest, and where it was drawn, or else where the model was called."""
_STEPS_COUNT = 8


class StepBatches:
    """Digests of the inputs of the first 8 steps.

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
        own = (known for known in seedables if known.name == "random" or (known.seeded in {"entropy", "unknown"} and not is_fork))
        self._seeded = [(known, known.read()) for known in own]
        for name, function in (("torch", "manual_seed"), ("random", "seed"), ("numpy.random", "seed")):
            if (module := sys.modules.get(name)) is not None:
                wrap(stack, self._owner, module, function, functools.partial(self._seed, name))

    @property
    def is_wanted(self) -> bool:
        """Whether this step is looked at."""
        return self._steps_count < _STEPS_COUNT

    def drawn(self) -> None:
        """A DataLoader gives a batch."""
        self._drawn = line_here() if self.is_wanted else None

    def given(self, module: torch.nn.Module, arguments: object) -> None:
        """A model is called."""
        varied = [tensor for tensor in tensors_in(arguments) if is_varied(tensor)]
        for tensor in varied:
            self._digest = folded(self._digest, of_tensor(tensor))
        if varied and next(module.parameters(), None) is not None:
            self.called = line_here() or self.called

    def stepped(self) -> Batch | None:
        """Return the batch of the step that an optimizer has taken; None if it is not one of the first, or had no data."""
        batch = None
        if self._digest != EMPTY:
            self._doubt()
            batch = self._digest & _DIGEST, self._drawn or self.called
        self._steps_count += 1
        self._digest, self._drawn = EMPTY, None
        return batch

    def _seed(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._guard.run("the look at a seed", self._seeded_by_user, name, args or tuple(kwargs.values()))
        return original(*args, **kwargs)

    def _seeded_by_user(self, name: str, given: tuple[Any, ...]) -> None:
        """Note that the user has seeded a generator: only what was drawn before may depend on the magic's seed."""
        if given and given[0] is not None:
            self._doubt(name)
            self._seeded = [(known, state) for known, state in self._seeded if known.name != name]

    def _doubt(self, name: str = "") -> None:
        """Become doubtful if one of the generators, or the one of that name, was drawn from."""
        moved = (not same_state(known.read(), state) for known, state in self._seeded if name in {"", known.name})
        self.is_doubtful = self.is_doubtful or any(moved)


def line_here() -> Location | None:
    """The user's line that runs."""
    frame = user_frame(sys._getframe(1))
    return None if frame is None else locate(frame)


def is_varied(tensor: torch.Tensor) -> bool:
    """Whether it can tell one batch from another: data, of which some differ."""
    if is_traced(tensor) or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() < 2:  # noqa: PLR2004
        return False
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.is_quantized:
        return False
    return not bool((tensor == tensor.flatten()[0]).all())
