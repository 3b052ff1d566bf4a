"""From the main thread to the root: who waits for whom, whether that is a circle, and whether anybody on the way still moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.machine.process_state import has_proc

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant

__all__ = ["Chain", "follow", "goes_on", "moving"]

_THREAD_COMPUTES = 0.03
_PROCESS_COMPUTES = 0.15
"""Shares of a core, above what our own looks take."""


@dataclass(frozen=True)
class Chain:
    """The way from the main thread to the root."""

    path: tuple[Participant, ...]
    is_circle: bool
    """Whether the last waits for one that stands before it, or for itself."""

    @property
    def root(self) -> Participant:
        """Whom everybody waits for; of a circle, the first that is reached."""
        return self.circle[0] if self.is_circle else self.path[-1]

    @property
    def circle(self) -> tuple[Participant, ...]:
        """Those that wait for each other."""
        if not self.is_circle:
            return ()
        back = next((at for at, one in enumerate(self.path) if one.who in self.path[-1].targets), len(self.path) - 1)
        return self.path[back:]

    @property
    def names(self) -> tuple[str, ...]:
        """Each `who`; of a circle, the first comes again at the end."""
        return (*(one.who for one in self.path), *((self.circle[0].who,) if self.is_circle else ()))


def follow(look: Look, moved: Mapping[str, bool], still_s: float) -> Chain:
    """The way to whoever still moves, if the main thread waits for such a one; else to who has ended, to a circle, or to the last.

    Only for the first counts who could end a wait without being known to.
    """
    wide, narrow = (_best(_ways(look, (look.main,), set(), is_wide=is_wide), moved, still_s) for is_wide in (True, False))
    return wide if goes_on(wide, moved, still_s) else narrow


def _best(ways: Iterator[Chain], moved: Mapping[str, bool], still_s: float) -> Chain:
    return max(ways, key=lambda chain: _weight(chain, moved, still_s))


def goes_on(chain: Chain, moved: Mapping[str, bool], still_s: float) -> bool:
    """Whether somebody on the way moves, or does not wait for ever."""
    return any(moved.get(one.who) or _ends_by_itself(one, still_s) for one in chain.path)


def _ends_by_itself(one: Participant, still_s: float) -> bool:
    """Whether it sleeps, or waits for something outside, or for a time that is not over."""
    if one.kind == "sleep" or (one.kind == "input" and one.who == "main" and not one.is_child):
        return True
    if any(one.facts.get(fact) for fact in ("network", "compiling", "may_end")):
        return True
    if not one.process and one.kind != "dead" and not one.sleeps_in.startswith(("read pipe", "write pipe")):
        return True  # a program of its own, of which nothing is known
    if one.kind in {"python", "native"} and (one.sleeps_in not in {"", "futex"} or not has_proc()):
        return True  # a file, a device or a server
    return one.timeout_s is not None and one.timeout_s > 0 and still_s < one.timeout_s


def _ways(look: Look, path: tuple[Participant, ...], met: set[str], *, is_wide: bool) -> Iterator[Chain]:
    """The ways on from the end of a path; each participant is gone on from once."""
    last, before = path[-1], {one.who for one in path}
    met.add(last.who)
    further = [who for who in (*last.targets, *(last.able if is_wide else ())) if who in look.everybody]
    fresh = [who for who in further if who not in met]
    if not fresh:
        yield Chain(path, is_circle=any(who in before for who in further))
    for who in fresh:
        if who not in met:
            yield from _ways(look, (*path, look.everybody[who]), met, is_wide=is_wide)


def _weight(chain: Chain, moved: Mapping[str, bool], still_s: float) -> tuple[int, int]:
    end = chain.path[-1]
    if end.facts.get("debugger"):
        weight = 6
    elif goes_on(chain, moved, still_s):
        weight = 5
    elif end.kind == "dead":
        weight = 4 if end.error is not None or end.exit_code else 2
    elif chain.is_circle:
        weight = 3
    else:
        weight = 0 if end.facts.get("idle") else 2
    return weight, len(chain.path)


def moving(looks: Sequence[Look]) -> dict[str, bool]:
    """Whether each participant has moved between any two of these looks: its lines, its small values, or time that it has computed."""
    first, last = looks[0], looks[-1]
    took_s = max(last.at_s - first.at_s, 1e-3)
    moved = {}
    for who, one in last.everybody.items():
        others = [look.everybody[who] for look in looks if who in look.everybody]
        computed = (one.cpu_s - others[0].cpu_s) / took_s
        least = _THREAD_COMPUTES if one.facts.get("is_waiting") else _PROCESS_COMPUTES
        moved[who] = any(other.at != one.at for other in others) or computed > least
    return moved
