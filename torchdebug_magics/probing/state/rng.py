"""The states of all random generators a step can draw from: taken, and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomState:
    """Python's, NumPy's (where imported) and torch's generators, with those of the devices that are in use."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    xpu: tuple[torch.Tensor, ...] = ()
    mps: torch.Tensor | None = None

    @classmethod
    def take(cls) -> RandomState:
        """The states as they are now. Never initialises CUDA."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        xpu = tuple(torch.xpu.get_rng_state_all()) if torch.xpu.is_initialized() else ()
        mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        return cls(random.getstate(), _numpy_state(), torch.get_rng_state(), cuda, xpu, mps)

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[None]:
        """Inside, whatever is drawn is drawn from states that nobody sees."""
        before = cls.take()
        try:
            yield
        finally:
            before.put_back()

    def put_back(self) -> None:
        """Make every generator continue from here."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        elif torch.cuda.is_initialized():  # since then: its generators began with their seeds
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())
        if self.xpu:
            torch.xpu.set_rng_state_all(list(self.xpu))
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)

    def holds(self) -> bool:
        """Whether every generator stands where it stood; one that came up since, such as CUDA's, is nothing to compare."""
        now = RandomState.take()
        mine, others = (
            (rng.python, rng.numpy, rng.cpu, rng.mps, *rng.cuda[: len(self.cuda)], *rng.xpu[: len(self.xpu)]) for rng in (self, now)
        )
        return same_state(mine, others)


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of a generator, of whatever they are made, are equal."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_state, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if hasattr(a, "tolist"):  # a tensor or an array
        return bool(a.tolist() == b.tolist())
    return bool(a == b)


def _numpy_state() -> Any:
    """NumPy gives a dict for any kind of generator but the usual one, and warns where a tuple is asked for."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.get_bit_generator() if hasattr(numpy.random, "get_bit_generator") else None
    return numpy.random.get_state(legacy=generator is None or type(generator).__name__ == "MT19937")
