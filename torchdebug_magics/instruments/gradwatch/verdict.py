"""Writes the verdict of a gradwatch report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.format import capitalised, number, plural

if TYPE_CHECKING:
    from torchdebug_magics.instruments.gradwatch.report import GradReport

__all__ = ["verdict"]


def verdict(report: GradReport) -> GradReport:
    """The report with its sentence."""
    return replace(report, sentence=_sentence(report))


def _sentence(report: GradReport) -> str:
    until = f" until {report.raised}" if report.raised else ""
    if report.finding is not None:
        more = len(report.findings) - 1
        return capitalised(report.finding.sentence()) + (f" · and {plural(more, 'more finding')}" if more else "")
    if not report.steps_count:
        passes = f": {plural(report.backward_count, 'backward pass', 'es')}, no optimizer step" if report.backward_count else ""
        return f"No optimizer step in this cell{until}: nothing to watch" if not passes else f"Nothing to watch{until}{passes}"
    if not report.rows:
        return f"No gradients to watch{until}: {plural(report.steps_count, 'optimizer step')} without gradients"
    if report.nonfinite_step is not None:
        return f"Gradients are NaN or inf from step {report.nonfinite_step} on, without growth before: `%%nanhunt` names the op"
    what = f"{plural(report.steps_count, 'step')} of {plural(len(report.modules), 'module')}{until}"
    if report.doubts:
        return f"No fault in {what}, but {report.doubts[0]}"
    return f"Gradients and updates look healthy: {what}{_losses(report) if not until else ''}"


def _losses(report: GradReport) -> str:
    known = [one for one in report.losses if one is not None]
    return f", loss {number(known[0])} -> {number(known[-1])}" if len(known) > 1 else ""
