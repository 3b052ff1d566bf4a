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

_TWISTER_BYTES = 4 * (624 + 1)
"""Of a Mersenne Twister: its words, and the position among them."""


@dataclass(frozen=True)
class RandomState:
    """Python's, NumPy's (where imported) and torch's generators, with those of the devices that are in use."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    xpu: tuple[torch.Tensor, ...] = ()
    mps: torch.Tensor | None = None
    numpy_words: bytes = b""
    """The memory of NumPy's generator, which is quick to read; empty for a kind that is not known."""

    @classmethod
    def take(cls, earlier: RandomState | None = None) -> RandomState:
        """The states as they are now. Never initialises CUDA.

        NumPy needs 46 µs to give its state, which is taken from `earlier` where nothing was drawn since.
        """
        numpy = sys.modules.get("numpy")
        words = _words(numpy.random) if numpy else b""
        # A normal number that is kept for the next draw stands outside this memory: it can only go, never come, without a trace here.
        is_same = bool(words) and earlier is not None and earlier.numpy_words == words and not earlier.numpy[3]
        of_numpy = earlier.numpy if earlier is not None and is_same else _read(numpy.random) if numpy else None
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        xpu = tuple(torch.xpu.get_rng_state_all()) if torch.xpu.is_initialized() else ()
        mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        return cls(random.getstate(), of_numpy, torch.get_rng_state(), cuda, xpu, mps, words)

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


def _generator_of(numpy_random: Any) -> Any:
    """NumPy's global one; None from a NumPy that does not tell."""
    return numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None


def _read(numpy_random: Any) -> Any:
    """The state of NumPy's global generator. Of any kind but the usual one, NumPy gives a dict, and warns where a tuple is asked for."""
    generator = _generator_of(numpy_random)
    return numpy_random.get_state(legacy=generator is None or _is_twister(generator))


def _words(numpy_random: Any) -> bytes:
    generator = _generator_of(numpy_random)
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES) if _is_twister(generator) else b""


def _is_twister(generator: Any) -> bool:
    return type(generator).__name__ == "MT19937"
