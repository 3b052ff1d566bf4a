"""Generators of random numbers that the user has made: found by name, seeded, and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from torchdebug_magics.probing.rng import same_state
from torchdebug_magics.probing.ways import ways_of

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.kinds import Kind
    from torchdebug_magics.probing.names import Named

__all__ = ["Held", "derived_seed", "is_shared", "put_state", "seed_generator", "state_of"]


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each, the same in every process: two that began alike would draw the same numbers."""
    return crc32(name.encode(), seed)


def state_of(generator: Any) -> Any:
    """Where it stands; `same_state` compares two of them."""
    return _kind(generator).read(generator)


def put_state(generator: Any, state: Any) -> None:
    """Let it go on from there."""
    _kind(generator).write(generator, state)


class Held:
    """Some generators, and where they stood."""

    def __init__(self, generators: Sequence[Named], guard: Guard) -> None:
        self._guard = guard
        # All are read before the first is seeded: two may draw from the same source.
        self._states = [(one, state) for one in generators if (state := guard.run(f"reading {one.name}", state_of, one.value))]

    def seed(self, seed: int) -> None:
        """Begin each anew."""
        for one, _ in self._states:
            self._guard.run(f"seeding {one.name}", seed_generator, one.value, derived_seed(seed, one.name))

    def put_back(self) -> None:
        """Make each go on from where it stood."""
        for one, state in self._states:
            self._guard.run(f"putting back {one.name}", put_state, one.value, state)

    def is_back(self) -> bool:
        """Whether each stands where it stood."""
        return all(same_state(state_of(one.value), state) for one, state in self._states)


def seed_generator(generator: Any, seed: int) -> None:
    """Begin it anew."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random) or not hasattr(generator, "bit_generator"):
        generator.seed(seed)
    else:
        source = generator.bit_generator
        source.state = type(source)(seed).state


def _kind(generator: Any) -> Kind:
    return ways_of(generator)[0]


def is_shared(generator: object) -> bool:
    """Whether it is one of the global ones, which are seeded by their own functions."""
    return any(generator is one for one in _shared())


def _shared() -> Iterator[object]:
    yield getattr(random, "_inst", None)
    yield torch.default_generator
    yield from torch.cuda.default_generators
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy.mtrand._rand
