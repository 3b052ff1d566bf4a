"""Generators of the user's that took their seed from the system: this magic seeds them for its cell, and nothing does in other runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.ritual.generators import state_of
from torchdebug_magics.instruments.deterministic.ritual.status import source_of
from torchdebug_magics.probing.rng import same_state

if TYPE_CHECKING:
    from torchdebug_magics.probing.names import Named

__all__ = ["Unseeded"]


class Unseeded:
    """Those among some generators; to be asked before the magic seeds them."""

    def __init__(self, generators: Sequence[Named] = ()) -> None:
        self._found = [one for one in generators if source_of(one).seeded == "entropy"]
        self._begins: list[Any] = []

    def begin(self) -> None:
        """The run begins: they stand where the magic has put them."""
        self._begins = [state_of(one.value) for one in self._found]

    def drawn_from(self) -> tuple[Named, ...]:
        """Those that the run has drawn from."""
        pairs = zip(self._found, self._begins, strict=False)
        return tuple(one for one, begin in pairs if not same_state(state_of(one.value), begin))
