"""Writes the verdict of an autograd report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.format import plural

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.report import AutogradReport

__all__ = ["verdict"]


def verdict(report: AutogradReport) -> AutogradReport:
    """The report with its sentence."""
    return replace(report, sentence=_sentence(report))


def _sentence(report: AutogradReport) -> str:
    if report.finding is not None:
        more = len(report.findings) - 1
        return report.finding.sentence() + (f" · and {plural(more, 'more finding')}" if more else "")
    if report.raised:
        return f"Autograd did not raise this {report.raised}; no fault was found before it"
    if report.last_error and not report.backward_count:
        return f"Autograd did not raise the last error: {report.last_error}"
    if not report.backward_count:
        return "No backward() in this cell: nothing to check"
    recorded = f" ({report.recorded_count} recorded)" if report.recorded_count < report.backward_count else ""
    passes = f"{plural(report.backward_count, 'backward pass', 'es')}{recorded}"
    return f"No autograd fault: {passes}, {plural(report.steps_count, 'optimizer step')} checked"
