"""The one sentence of a nanhunt report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import NanReport

__all__ = ["overflow", "sentence"]


def sentence(report: NanReport) -> str:
    """The first finding; or what was checked and found finite; or that there was nothing to check."""
    if report.finding is not None:
        more = len(report.findings) - 1
        return report.finding.sentence() + (f" · and {plural(more, 'more finding')}" if more > 0 else "")
    return "; ".join(part for part in (_checked(report), _largest(report)) if part)


def overflow(report: NanReport) -> str:
    """The steps that a GradScaler skipped, which is no fault; empty where there were none."""
    skipped = report.overflow_steps_count
    return f"{plural(skipped, 'step')} skipped by the GradScaler by design" if skipped else ""


def _checked(report: NanReport) -> str:
    done = [
        plural(amount, noun, ending)
        for amount, noun, ending in (
            (report.backward_count, "backward pass", "es"),
            (report.steps_count, "optimizer step", "s"),
            (report.forward_count, "forward-only model call", "s"),
        )
        if amount
    ]
    if not done:
        return (
            overflow(report)
            or f"Nothing to check{_until(report)}: this cell ran no backward(), no optimizer and no model, or left all that to torch.func"
        )
    found = "No NaN, and no infinity but those put there on purpose," if report.meant_count else "No NaN and no infinity"
    skipped = f" but in {overflow(report)}" if report.overflow_steps_count else ""
    return f"{found} in {_subjects(report)}{skipped}{_until(report)}: {', '.join(done)} checked"


def _until(report: NanReport) -> str:
    return f" until {report.raised} ended the cell" if report.raised else ""


def _subjects(report: NanReport) -> str:
    if not report.backward_count:
        return "the gradients" if report.steps_count and not report.forward_count else "the outputs"
    return "the loss, the gradients and the outputs" if report.forward_count else "the loss and all gradients"


def _largest(report: NanReport) -> str:
    finite = [value for value in report.history if math.isfinite(value)]
    return f"the largest magnitude was {number(float(max(finite)))}" if finite else ""
