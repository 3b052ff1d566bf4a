"""Fixes of a training that raised nothing, tried: the first steps of the cell are made again with each, and the loss tells what helps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchdebug_magics import catalog
from torchdebug_magics.format import capitalised, number, plural
from torchdebug_magics.instrument import SCRIPT
from torchdebug_magics.instruments.watch.report import WatchReport
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.state.training_again import Run, TrainingAgain
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session

_STEPS, _STEPS_OF_A_RATE = 150, 60
"""Of a run: as many as the slowest rule needs to find what it finds; as many as show whether a loss falls."""
_FEW = 8
_LOWER, _FALLEN = 0.8, 0.9
"""What a change must leave of the loss that the training as written comes to, and of the loss that it begins with."""


def tried(report: WatchReport, again: TrainingAgain, progress: Callable[[str], object]) -> Mapping[str, Report]:
    """The reports, with the cause that a trial has shown, or with the fix that leads as verified; the same where nothing can be tried."""
    reports, leading = dict(report.reports), report.instrument
    finding = report.main_finding()
    is_of_the_rate = leading in {None, "gradwatch"} or getattr(finding, "has_diverged", False)
    alternatives = getattr(reports.get("gradwatch"), "alternatives", ()) if is_of_the_rate else ()
    is_code = leading in {"autograd", "gradwatch"} and finding is not None and bool(finding.edits) and finding.fix_state == "compiles"
    if not (alternatives or is_code) or report.error or not again.can_run:
        return reports
    steps = max(2 * _FEW, report.steps_count)  # of a cell that ended early, more than it made
    try:
        with again.opened():
            if alternatives:
                progress("other learning rates are tried")
                reports["gradwatch"] = _with_best_rate(reports["gradwatch"], again, min(_STEPS_OF_A_RATE, steps))
            elif leading is not None:
                progress("the fix is tried")
                reports[leading] = _verified(leading, reports[leading], again, min(_STEPS, steps))
    except Irrevocable:
        pass
    return reports


def _with_best_rate(report: Any, again: TrainingAgain, steps: int) -> Any:
    """The report with the alternative as its finding that lets the loss fall furthest, if any does."""
    as_written = again.run((), steps)
    if as_written is None or as_written.error or len(as_written.losses) < _FEW:
        return report
    helpful: list[tuple[float, Any, Run]] = []
    for finding in report.alternatives:
        run = again.run(finding.edits, steps) if finding.edits else None
        if run is not None and _helps(run, as_written):
            helpful.append((_last(run.losses), finding, run))
        elif helpful:
            break  # further away from the rate that helps
    if not helpful:
        return report
    _, finding, run = min(helpful, key=lambda trial: trial[0])
    why = f"with the fix, {plural(len(run.losses), 'step')} from the start bring the loss from {number(run.losses[0])} to "
    why += f"{number(_last(run.losses))}; as written, to {number(_last(as_written.losses))}"
    finding = replace(finding, explanation=why, fix_state="verified")
    return replace(report, findings=(finding,), doubts=(), alternatives=(), sentence=capitalised(finding.sentence()))


def _helps(run: Run, as_written: Run) -> bool:
    if run.error or len(run.losses) < len(as_written.losses) // 2 or not all(map(math.isfinite, run.losses)):
        return False
    first, last = statistics.fmean(run.losses[:3]), _last(run.losses)
    other = _last(as_written.losses[: len(run.losses)])
    return 0 <= last < _FALLEN * first and (not math.isfinite(other) or last < _LOWER * other)


def _last(losses: list[float]) -> float:
    """The mean of the last fifth."""
    return statistics.fmean(losses[-max(1, len(losses) // 5) :])


def _verified(name: str, report: Any, again: TrainingAgain, steps: int) -> Any:
    """The report with its first fix as verified, where the same instrument finds less of the kind with it, and nothing else breaks.

    An edit that breaks the training, or after which all is found again, is no repair: the fix stays, as advice.
    """
    finding = report.findings[0]
    session: Session[Any] = Session(catalog.instrument(name).probe({}, SCRIPT))
    run = again.run(finding.edits, steps, session)
    if run is None or not session.has_ended or not (run.error or run.is_complete):
        return report
    before, after = (sum(other.kind == finding.kind for other in each.findings) for each in (report, session.report))
    if not run.error and after < before:
        finding = replace(finding, fix_state="verified") if all(map(math.isfinite, run.losses)) else finding
    elif not run.error or ((as_written := again.run((), steps)) is not None and not as_written.error):
        finding = replace(finding, edits=(), fix_state="advice", has_failed=True)
    return replace(report, findings=(finding, *report.findings[1:]))
