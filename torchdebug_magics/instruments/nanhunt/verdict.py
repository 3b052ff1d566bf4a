"""The one sentence of a nanhunt report."""

from __future__ import annotations

import math

from torchdebug_magics.format import number, plural
from torchdebug_magics.instruments.nanhunt.report import NanFinding, NanReport
from torchdebug_magics.ranks.compared import Compared, Sum

_MOST_SKIPPED = 64
_STAGES = ("data", "parameter", "forward", "loss", "backward", "optimizer")


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


def compared(report: NanReport) -> Compared:
    """The step of its first non-finite value, and whether that came from another rank."""
    worked = bool(report.steps_count or report.backward_count or report.forward_count or report.found)
    finding = report.finding
    if finding is None:
        return Compared(worked=worked, skipped_backwards=_skipped(report))
    is_received = finding.diagnosis == "averaged_from_other_ranks"
    # What could not be traced comes after all that could: it may be another rank's.
    is_traced = finding.op is not None or finding.diagnosis is not None
    stage = _STAGES.index(finding.phase) + (0 if is_traced else len(_STAGES))
    return Compared(
        worked=worked, found_at=(finding.step, stage), is_received=is_received, found_backward=finding.backward, sum=_sum(finding)
    )


def _skipped(report: NanReport) -> tuple[int, ...]:
    if not report.overflow_steps_count:
        return ()
    first = report.backward_count - len(report.history)
    return tuple(first + place for place, peak in enumerate(report.history) if not math.isfinite(peak))[-_MOST_SKIPPED:]


def _sum(finding: NanFinding) -> Sum | None:
    given = finding.averaging
    if given is None:
        return None
    return Sum(dtype=given.dtype, local_peak=given.local_peak, limit=given.limit, tensor=given.tensor, location=finding.location)
