"""From a row of looks to a finding: slow where somebody on the way to the root moves, or will by itself; stuck where nobody does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.hangwatch.causes.slow import slow
from torchdebug_magics.instruments.hangwatch.causes.stuck import debugger, stopped
from torchdebug_magics.instruments.hangwatch.everybody.chain import follow, goes_on, moving
from torchdebug_magics.instruments.hangwatch.everybody.rank_states import rank_states
from torchdebug_magics.instruments.hangwatch.hang_evidence import Evidence

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Look
    from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
    from torchdebug_magics.instruments.hangwatch.report import Finding

__all__ = ["debugger_now", "judged"]


def judged(looks: list[Look], progress: Progress, still_s: float, doing: Counter[str]) -> Finding:
    """Why there was no progress for `still_s`."""
    case = _evidence(looks, progress, still_s, doing)
    if progress.passes.carrier is not None and progress.passes.began_s:
        return slow(case)
    if not goes_on(case.chain, case.moved, still_s) and (found := stopped(case)) is not None:
        return found
    return slow(case)


def debugger_now(look: Look, progress: Progress) -> Finding | None:
    """A prompt in another process needs no second look."""
    return debugger(_evidence([look], progress, progress.still_s, Counter()))


def _evidence(looks: list[Look], progress: Progress, still_s: float, doing: Counter[str]) -> Evidence:
    moved = moving(looks) if len(looks) > 1 else {}
    return Evidence(looks, follow(looks[-1], moved, still_s), moved, rank_states(looks[-1]), progress, still_s, doing)
