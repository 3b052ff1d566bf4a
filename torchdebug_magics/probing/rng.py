"""The states of all random generators a step can draw from: taken, and put back."""

from __future__ import annotations

import _random
import ctypes
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_WORDS_COUNT, _WORD_BYTES = 624, 4
"""Of a Mersenne Twister."""
_MARK_BYTES = 64
"""Of its words: so many differ in any two states that a seed, or drawing, leads to."""


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
        return cls._with(random.getstate(), _read(numpy.random) if numpy else None)

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
    def _with(cls, python: Any, numpy: Any) -> RandomState:
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        xpu = tuple(torch.xpu.get_rng_state_all()) if torch.xpu.is_initialized() else ()
        mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        return cls(python, numpy, torch.get_rng_state(), cuda, xpu, mps)

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
    """Takes the states again and again. Python's and NumPy's, which are slow to read, are read anew only where something was drawn."""

    def __init__(self) -> None:
        self._python_twister = _python_twister()
        self._python_mark = b""
        self._python: Any = (None, None, None)
        self._numpy_generator: Any = None
        self._numpy_twister: _Twister | None = None
        self._numpy_mark = b""
        self._numpy: Any = None

    def take(self) -> RandomState:
        """As `RandomState.take`."""
        numpy = sys.modules.get("numpy")
        return RandomState._with(self._python_state(), self._numpy_state(numpy.random) if numpy else None)

    def _python_state(self) -> Any:
        twister = self._python_twister
        if twister is None:
            return random.getstate()
        # A normal number that is kept for the next draw is an attribute.
        if (mark := twister.mark()) != self._python_mark or twister.owner.gauss_next != self._python[2]:
            self._python_mark, self._python = mark, random.getstate()
        return self._python

    def _numpy_state(self, numpy_random: Any) -> Any:
        generator = _generator_of(numpy_random)
        if generator is not self._numpy_generator:
            self._numpy_generator, self._numpy_twister, self._numpy_mark = generator, _numpy_twister(generator), b""
        if self._numpy_twister is None:
            return _read(numpy_random)
        # A normal number that is kept for the next draw stands outside this memory: it can only go, never come, without a trace here.
        if (mark := self._numpy_twister.mark()) != self._numpy_mark or self._numpy[3]:
            self._numpy_mark, self._numpy = mark, numpy_random.get_state()
        return self._numpy


class _Twister:
    """A Mersenne Twister, looked at where it lies in memory."""

    def __init__(self, owner: Any, words_address: int, position_address: int) -> None:
        self.owner = owner
        """Keeps the memory."""
        self._words = (ctypes.c_char * _MARK_BYTES).from_address(words_address)
        self._position = (ctypes.c_char * _WORD_BYTES).from_address(position_address)

    def mark(self) -> bytes:
        """The same only in the same state: each draw moves the position, and once all words were used they are all made anew."""
        return bytes(self._position.raw + self._words.raw)


def _python_twister() -> _Twister | None:
    """The one behind the module `random`; None where CPython does not keep it in the object itself, its position before its words."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return None
    *words, position = generator.getstate()[1]
    memory = ctypes.string_at(id(generator), _random.Random.__basicsize__)
    place = memory.find(struct.pack(f"={len(words) + 1}I", position, *words))
    return None if place < 0 else _Twister(generator, id(generator) + place + _WORD_BYTES, id(generator) + place)


def _generator_of(numpy_random: Any) -> Any:
    """NumPy's global one; None from a NumPy that does not tell."""
    return numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None


def _read(numpy_random: Any) -> Any:
    """The state of NumPy's global generator. Of any kind but the usual one, NumPy gives a dict, and warns where a tuple is asked for."""
    generator = _generator_of(numpy_random)
    return numpy_random.get_state(legacy=generator is None or _is_twister(generator))


def _is_twister(generator: Any) -> bool:
    return type(generator).__name__ == "MT19937"


def _numpy_twister(generator: Any) -> _Twister | None:
    """NumPy's global one, by the address that NumPy tells; None where it is of another kind."""
    if not _is_twister(generator):
        return None
    address = generator.ctypes.state_address
    return _Twister(generator, address, address + _WORDS_COUNT * _WORD_BYTES)
