"""A fix is shown when the bad step, run again with it, was finite. A second birth behind the first is met, and repaired, on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from torchdebug_magics.instruments.nanhunt.fixes.remedies import remedies
from torchdebug_magics.instruments.nanhunt.fixes.source_edits import Sources, changed_lines, in_force, user_functions
from torchdebug_magics.probing.rerun.attempt import CannotReplay
from torchdebug_magics.probing.where import span

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
    from torchdebug_magics.instruments.nanhunt.replay.bad_step import StepReplay
    from torchdebug_magics.instruments.nanhunt.report import Finding

__all__ = ["Again", "Next", "with_verified_fix"]

Again: TypeAlias = "Callable[[], StepReplay]"
"""Runs the bad step once more."""
Next: TypeAlias = "Callable[[StepReplay], Evidence | None]"
"""The birth of what is bad in a replay; None where nothing is."""

_MOST_S = 5.0
_MOST_RUNS = 8
_MOST_BIRTHS = 3
_MOST_SHOWN = 110


class _Search:
    def __init__(self, again: Again, birth: Next) -> None:
        self._again = again
        self._birth = birth
        self._functions = user_functions()
        self._runs = 0
        self._until = time.process_time() + _MOST_S

    def cure(self, evidence: Evidence, sources: Sources, births: int = 1) -> Sources | None:
        """Sources with which the step is finite."""
        seen = _site(evidence)
        for changed in islice(remedies(evidence, sources), _MOST_RUNS):
            if self._runs >= _MOST_RUNS or time.process_time() > self._until:
                return None
            self._runs += 1
            try:
                with in_force(changed, self._functions):
                    replayed = self._again()
                    behind = self._birth(replayed) if replayed.finished else evidence
            except (CannotReplay, SyntaxError, ValueError):
                continue
            if behind is None:
                return changed
            if _site(behind) != seen and births < _MOST_BIRTHS:
                cured = self.cure(behind, changed, births + 1)
                if cured is not None:
                    return cured
        return None


_CURABLE = frozenset(
    [
        "all_ignored", "degenerate_matrix", "div_zero", "empty_mean", "exp_overflow", "bf16_overflow", "fp16_overflow", "infeasible_ctc",
        "log_negative", "log_zero", "mask_sign", "masked_row", "no_slope_at_zero", "pole", "pow_negative", "pow_zero", "sqrt_negative",
        "sqrt_zero", "where_trap", "zero_variance",
    ]
)  # fmt: skip
"""Causes that lie in the expression itself. A run that diverged is not repaired where it happened to leave the range."""


def with_verified_fix(finding: Finding, evidence: Evidence, again: Again, birth: Next, what: str) -> Finding:
    """The finding with code that was tried; as it was where none of what was tried ends it."""
    if finding.diagnosis not in _CURABLE:
        return finding
    try:
        cured = _Search(again, birth).cure(evidence, {})
    except Exception:  # noqa: BLE001 - the finding stands without code for its fix
        return finding
    lines = [] if cured is None else changed_lines(cured)
    if not lines or any(len(text) > _MOST_SHOWN * 2 for _, _, text in lines):
        return finding
    here = finding.location.line if finding.location is not None else 0
    said = [f"`{text}`" + (f" in line {line}" if line != here or len(lines) > 1 else "") for _, line, text in lines]
    sign = "; also check why it is negative" if finding.diagnosis.endswith("_negative") else ""
    return replace(finding, fix=f"write {' and '.join(said)}: rerun with it, {what} is finite{sign}")


def _site(evidence: Evidence) -> tuple[object, ...]:
    op = evidence.forward or evidence.op
    if op is None:
        return ()
    where = span(*op.place) if op.place is not None else None
    return op.name, op.line, where and where[:2], op.call.path if op.call is not None else None
