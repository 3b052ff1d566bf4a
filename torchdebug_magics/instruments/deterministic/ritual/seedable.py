"""Each generator that a cell may draw from: how it was seeded before the cell, where it stands, and a way to seed it alone."""

from __future__ import annotations

import importlib
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchdebug_magics.instruments.deterministic.ritual.generators import put_state, seed_generator, state_of
from torchdebug_magics.instruments.deterministic.ritual.status import global_sources, source_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import SeededBy
    from torchdebug_magics.probing.names import Named

__all__ = ["Seedable", "seedables", "sow_numpy"]


_MADE = {"Generator": "np.random.default_rng(42)", "RandomState": "np.random.RandomState(42)", "Random": "random.Random(42)"}
"""How the user makes one with a seed, by its class; torch's own is told by its module."""


class Seedable(NamedTuple):
    """One generator."""

    name: str
    """``"torch"``, ``"numpy.random"``, ``"random"``, or as the user writes it."""
    seeded: SeededBy
    """Before the magic seeded it."""
    read: Callable[[], Any]
    write: Callable[[Any], object]
    sow: Callable[[int], object]
    fix: str
    """The user's line that seeds it."""
    is_global: bool = True


def seedables(named: Iterable[Named]) -> tuple[Seedable, ...]:
    """The global generators, and the user's own; to be asked before the magic seeds them."""
    own = (_own(one) for one in named)
    return (*_global(), *own)


def _global() -> Iterator[Seedable]:
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # which NumPy itself puts off until somebody draws
    seeded = {one.name: one.seeded for one in global_sources()}
    yield Seedable("torch", seeded["torch"], torch.get_rng_state, torch.set_rng_state, torch.manual_seed, "torch.manual_seed(42)")
    if "numpy.random" in seeded:
        yield Seedable("numpy.random", seeded["numpy.random"], _numpy_state, _set_numpy_state, sow_numpy, "np.random.seed(42)")
    is_by_hand = seeded["torch"] == seeded.get("numpy.random") == "hand"  # who seeds both by hand seeds all three
    yield Seedable("random", "hand" if is_by_hand else "unknown", random.getstate, random.setstate, random.seed, "random.seed(42)")


def _own(found: Named) -> Seedable:
    value = found.value
    make = next(
        (text for name, text in _MADE.items() if type(value).__name__ == name and not isinstance(value, torch.Generator)),
        "torch.Generator().manual_seed(42)",
    )
    return Seedable(
        found.name,
        source_of(found).seeded,
        lambda: state_of(value),
        lambda state: put_state(value, state),
        lambda seed: seed_generator(value, seed),
        f"{found.name} = {make}",
        is_global=False,
    )


def _numpy_state() -> Any:
    return operator.attrgetter("random.get_state")(sys.modules["numpy"])()


def _set_numpy_state(state: Any) -> None:
    operator.attrgetter("random.set_state")(sys.modules["numpy"])(state)


def sow_numpy(seed: int) -> None:
    """Seed NumPy's global generator. `np.random.seed` would also hide whether the user has seeded it, see `seed_seq`."""
    numpy: Any = sys.modules["numpy"]
    numpy.random.set_state(numpy.random.RandomState(seed).get_state())
