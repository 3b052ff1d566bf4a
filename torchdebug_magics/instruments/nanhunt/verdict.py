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
        return report.finding.sentence() + (f" (and {more} more)" if more > 0 else "")
    return "; ".join(part for part in (_checked(report), _largest(report), overflow(report)) if part)


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
        return "" if report.overflow_steps_count else "Nothing to check: this cell ran no backward() and no model"
    infinity = "no infinity but such as were put there on purpose" if report.meant_count else "no infinity"
    return f"Nothing non-finite: {', '.join(done)}; no NaN and {infinity} in {_subjects(report)}"


def _subjects(report: NanReport) -> str:
    if not report.backward_count:
        return "the gradients" if report.steps_count and not report.forward_count else "the outputs"
    return "the loss, the gradients and the outputs" if report.forward_count else "the loss and all gradients"


def _largest(report: NanReport) -> str:
    finite = [value for value in report.history if math.isfinite(value)]
    return f"largest magnitude {number(float(max(finite)))}" if finite else ""
