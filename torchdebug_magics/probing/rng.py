"""The states of all random generators a step can draw from: taken, and put back."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["RandomKeeper", "RandomState", "same_state"]

_MT19937_BYTES = 625 * 4
"""Its 624 words, and how many of them were used."""


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
        numpy = sys.modules.get("numpy")
        return cls._with(numpy.random.get_state() if numpy else None)

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[None]:
        """Inside, whatever is drawn is drawn from states that nobody sees."""
        before = cls.take()
        try:
            yield
        finally:
            before.put_back()

    @classmethod
    def _with(cls, numpy: Any) -> RandomState:
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        xpu = tuple(torch.xpu.get_rng_state_all()) if torch.xpu.is_initialized() else ()
        mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        return cls(random.getstate(), numpy, torch.get_rng_state(), cuda, xpu, mps)

    def put_back(self) -> None:
        """Make every generator continue from here."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        if self.xpu:
            torch.xpu.set_rng_state_all(list(self.xpu))
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)

    def holds(self) -> bool:
        """Whether every generator stands where it stood; one that came up since, such as CUDA's, is nothing to compare."""
        now = RandomState.take()
        mine, others = (
            (one.python, one.numpy, one.cpu, one.mps, *one.cuda[: len(self.cuda)], *one.xpu[: len(self.xpu)]) for one in (self, now)
        )
        return same_state(mine, others)


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of a generator, of whatever they are made, are equal."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if hasattr(one, "tolist"):  # a tensor or an array
        return bool(one.tolist() == other.tolist())
    return bool(one == other)


class RandomKeeper:
    """Takes the states again and again. NumPy's, which is slow to read, is read anew only where something was drawn from it."""

    def __init__(self) -> None:
        self._memory = b""
        self._numpy: Any = None

    def take(self) -> RandomState:
        """As `RandomState.take`."""
        numpy = sys.modules.get("numpy")
        return RandomState._with(self._numpy_state(numpy) if numpy else None)

    def _numpy_state(self, numpy: Any) -> Any:
        memory = _memory_of(numpy)
        # A normal number that is kept for the next draw stands outside this memory: it can only go, never come, without a trace here.
        if not memory or memory != self._memory or self._numpy[3]:
            self._memory, self._numpy = memory, numpy.random.get_state()
        return self._numpy


def _memory_of(numpy: Any) -> bytes:
    """What NumPy's global generator holds, by the address that NumPy tells; empty where it is of another kind."""
    generator: Any = getattr(numpy.random, "get_bit_generator", lambda: None)()
    if type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
