"""The one sentence of a nanhunt report."""

from __future__ import annotations

import math

from torchdebug_magics.format import number, plural
from torchdebug_magics.instruments.nanhunt.report import NanReport


def sentence(report: NanReport) -> str:
    """The first finding; or what was checked and found finite; or that there was nothing to check."""
    if report.finding is not None:
        more = len(report.findings) - 1
        return report.finding.sentence() + (f" · and {plural(more, 'more finding')}" if more > 0 else "")
    return "; ".join(part for part in (_checked(report), largest(report)) if part)


def headline(report: NanReport) -> str:
    """The title of a report without findings; empty where the first finding has one."""
    if report.finding is not None:
        return ""
    done = _done(report)
    if not done:
        return overflow(report) or f"Nothing to check{_until(report) or ': no backward(), optimizer step or model call'}"
    meant = ", except intentional inf," if report.meant_count else ""
    return f"No NaN or inf{meant} in {' and '.join(done[: 1 if report.raised else 2])}{_until(report)}"


def overflow(report: NanReport) -> str:
    """The steps that a GradScaler skipped by design; empty where there were none."""
    skipped = report.overflow_steps_count
    return f"{plural(skipped, 'step')} skipped by the GradScaler by design" if skipped else ""


def _done(report: NanReport) -> list[str]:
    return [
        plural(amount, noun, ending)
        for amount, noun, ending in (
            (report.backward_count, "backward pass", "es"),
            (report.steps_count, "optimizer step", "s"),
            (report.forward_count, "forward-only model call", "s"),
        )
        if amount
    ]


def _checked(report: NanReport) -> str:
    done = _done(report)
    if not done:
        return (
            overflow(report)
            or f"Nothing to check{_until(report)}: this cell ran no backward(), no optimizer and no model, or used torch.func alone"
        )
    meant = " except intentional infinities such as masks," if report.meant_count else ""
    skipped = f", apart from {overflow(report)}" if report.overflow_steps_count else ""
    return f"No NaN or inf{meant} in {subjects(report)}{skipped}{_until(report)}: {', '.join(done)} checked"


def _until(report: NanReport) -> str:
    return f" until {report.raised}" if report.raised else ""


def subjects(report: NanReport) -> str:
    """The tensors that were checked."""
    if not report.backward_count:
        return "the gradients" if report.steps_count and not report.forward_count else "the outputs"
    return "the loss, the gradients and the outputs" if report.forward_count else "the loss and all gradients"


def largest(report: NanReport) -> str:
    """The largest finite magnitude of the run; empty where no gradient was checked."""
    finite = [value for value in report.history if math.isfinite(value)]
    return f"the largest magnitude was {number(float(max(finite)))}" if finite else ""
