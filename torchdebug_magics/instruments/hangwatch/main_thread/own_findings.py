"""What the main thread alone shows: a loop that cannot end, one call that holds the GIL, a long pause in a cell that has ended."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.format import duration
from torchdebug_magics.instruments.hangwatch.report import Finding, Wait

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

__all__ = ["held_the_gil", "never_ends", "went_slow"]


def never_ends(line: int, condition: str, main: Wait, still_s: float) -> Finding:
    """A loop whose condition nothing in it changes."""
    is_forever = condition == "True"
    why = "no `break` or `return` can be reached" if is_forever else "the loop does not change its condition"
    return Finding(
        state="stuck",
        cause="infinite_loop",
        headline=f"`while {condition}:` on line {line} never ends: {why}",
        fix="leave the loop with `break` or `return`" if is_forever else "update a variable of the condition inside the loop, or `break`",
        location=main.location,
        root=replace(main, kind="python", waits_for=None, what=f"while {condition}"),
        waits=(replace(main, kind="python", waits_for=None),),
        chain=("main",),
        since_s=still_s,
    )


def held_the_gil(late_s: float, where: Location | None) -> Finding:
    """A call in which no Python thread got a turn."""
    root = Wait(who="main", pid=os.getpid(), location=where, kind="gil", waits_for=None, what="one call that holds the GIL")
    return Finding(
        state="slow",
        cause="gil_held",
        headline=f"one call held the GIL for {late_s:.0f} s: no other Python thread could run",
        fix="call it less often, on smaller data, or in a separate process",
        reason="live views, other threads and Stop wait until the call returns",
        location=where,
        root=root,
        waits=(root,),
        chain=("main",),
        since_s=late_s,
    )


def went_slow(longest_s: float, hint: str, kind: str, what: str, where: Location | None) -> Finding:
    """The longest pause of a cell that has ended before anybody was asked."""
    waited = hint or "the main thread computed without a step or output"
    root = Wait(who="main", pid=os.getpid(), location=where, kind=kind, waits_for=None, what=what)
    headline = f"{waited} for {duration(longest_s)}"
    return Finding(state="slow", cause=None, headline=headline, location=where, root=root, waits=(root,), chain=("main",))
