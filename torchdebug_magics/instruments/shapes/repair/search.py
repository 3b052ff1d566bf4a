"""The fewest edits with which the forward comes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.repair.facts import Facts, facts_of
from torchdebug_magics.instruments.shapes.repair.rules import diagnosis
from torchdebug_magics.instruments.shapes.report import Fix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.shapes.repair.edit import Edit
    from torchdebug_magics.instruments.shapes.repair.trial import Trials

__all__ = ["fixes"]

_MOST_EDITS = 3
_SHOWN = 4
_WIDE = 5
"""How many half-way states are taken further from each round."""


@dataclass(frozen=True, eq=False)
class _State:
    """Edits that take the forward further than it came before, and where it breaks then."""

    edits: tuple[Edit, ...]
    facts: Facts
    reached: int

    @property
    def rank(self) -> tuple[int, int]:
        return sum(edit.rank for edit in self.edits), -self.reached


def fixes(candidates: Sequence[Edit], facts: Facts, reached: int, trials: Trials | None) -> tuple[Fix, ...]:
    """Those that were tried and let the whole forward through: the fewest edits first, then the most natural.

    Failing that, the first candidates, not tried or not enough.
    """
    if trials is None or not candidates:
        return tuple(_fix((edit,), verified=False) for edit in _by_rank(candidates)[:2])
    states = [_State((), facts, reached)]
    through: list[tuple[int, tuple[Edit, ...]]] = []
    in_vain: set[str] = set()
    while states and not any(_natural(edits) for _, edits in through) and _many(states[0].edits) < _MOST_EDITS:
        following: list[_State] = []
        for state in states:
            for edit in _by_rank(candidates if not state.edits else diagnosis(state.facts).edits):
                if not trials.left or (through and _worse(edit, state, through)):
                    break
                if not _try(trials, state, edit, through, following):
                    in_vain.add(edit.code)
        states = sorted(following, key=lambda one: one.rank)[:_WIDE]
    if not through:
        left = [edit for edit in _by_rank(candidates) if edit.code not in in_vain]
        return tuple(_fix((edit,), verified=False) for edit in left[:2])
    through.sort(key=lambda one: (not _natural(one[1]), _many(one[1]), one[0]))
    return tuple(_fix(edits, verified=True) for _, edits in through[:_SHOWN])


def _natural(edits: tuple[Edit, ...]) -> bool:
    return all(edit.natural for edit in edits)


def _many(edits: tuple[Edit, ...]) -> int:
    return sum(edit.many for edit in edits)


def _worse(edit: Edit, state: _State, through: Sequence[tuple[int, tuple[Edit, ...]]]) -> bool:
    """Whether it could only add to a list that is full."""
    return len(through) >= _SHOWN and state.rank[0] + edit.rank > max(rank for rank, _ in through)


def _try(trials: Trials, state: _State, edit: Edit, through: list[tuple[int, tuple[Edit, ...]]], following: list[_State]) -> bool:
    """Whether it led further, or that cannot be told."""
    edits = (*state.edits, edit)
    run = trials.run(edits)
    if run is None:
        return True
    if run.error is None:
        through.append((sum(one.rank for one in edits), edits))
        return True
    if run.reached > state.reached + len(edit.calls):  # a changed argument is one call more
        following.append(_State(edits, facts_of(run), run.reached))
        return True
    return False


def _by_rank(edits: Sequence[Edit]) -> list[Edit]:
    seen: dict[str, Edit] = {}
    for edit in sorted(edits, key=lambda one: (one.many, one.rank)):
        seen.setdefault(edit.code, edit)
    return list(seen.values())


def _fix(edits: tuple[Edit, ...], *, verified: bool) -> Fix:
    whys = dict.fromkeys(edit.why for edit in edits if edit.why)
    return Fix(code="\n".join(edit.code for edit in edits), verified=verified, why="; ".join(whys), edits=_many(edits))
