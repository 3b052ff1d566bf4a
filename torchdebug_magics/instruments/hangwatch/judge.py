"""From a row of looks to a finding: slow where somebody on the way to the root moves, or will by itself; stuck where nobody does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.hangwatch.causes.slow import slow
from torchdebug_magics.instruments.hangwatch.causes.stuck import debugger, stopped
from torchdebug_magics.instruments.hangwatch.chain import follow, moving
from torchdebug_magics.instruments.hangwatch.hang_evidence import Evidence
from torchdebug_magics.instruments.hangwatch.rank_states import rank_states
from torchdebug_magics.machine.process_state import has_proc

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.participants import Look
    from torchdebug_magics.instruments.hangwatch.progress import Progress
    from torchdebug_magics.instruments.hangwatch.report import Finding

__all__ = ["debugger_now", "judged"]


def judged(looks: list[Look], progress: Progress, still_s: float, doing: Counter[str]) -> Finding:
    """Why there was no progress for `still_s`."""
    case = _evidence(looks, progress, still_s, doing)
    if progress.carried is not None and progress.backward_s:
        return slow(case)
    if not _ends_by_itself(case) and (found := stopped(case)) is not None:
        return found
    return slow(case)


def debugger_now(look: Look, progress: Progress) -> Finding | None:
    """A prompt in another process needs no second look."""
    return debugger(_evidence([look], progress, progress.still_s, Counter()))


def _evidence(looks: list[Look], progress: Progress, still_s: float, doing: Counter[str]) -> Evidence:
    moved = moving(looks) if len(looks) > 1 else {}
    return Evidence(looks, follow(looks[-1], moved), moved, rank_states(looks[-1]), progress, still_s, doing)


def _ends_by_itself(case: Evidence) -> bool:  # noqa: PLR0911 - a reason a line
    """Whether somebody on the way moves, sleeps, or waits for something outside, or for a time that is not over."""
    root = case.root
    if any(case.moved.get(one.who) for one in case.chain.path):
        return True
    if root.kind == "sleep" or root.facts.get("network") or root.facts.get("compiling") or (root.kind == "input" and root.who == "main"):
        return True
    if root.facts.get("may_end"):
        return True  # a timer, an event loop or a signal handler could do it
    if root.facts.get("op") == "init_process_group" and not root.targets:
        joining = [one for one in case.look.everybody.values() if one.facts.get("op") == "init_process_group"]
        if len(joining) >= (root.process.get("world_size") or 0):
            return True  # all ranks are here: they only connect
    if not root.process and root.kind != "dead" and not root.sleeps_in.startswith(("read pipe", "write pipe")):
        return True  # a program of its own, of which nothing is known
    if root.kind in {"python", "native"} and (root.sleeps_in not in {"", "futex"} or not has_proc()):
        return True  # it waits for something outside, such as a file, a device or a server
    return any(one.timeout_s is not None and one.timeout_s > 0 and case.still_s < one.timeout_s for one in case.chain.path)
