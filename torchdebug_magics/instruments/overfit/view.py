"""What an overfit report shows: the verdict, the fix, both curves and the trials."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchdebug_magics.format import duration, listed, number, plural
from torchdebug_magics.html.page import Chart, Facts, Note, Page, Table
from torchdebug_magics.instruments.overfit.report import in_words

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.overfit.report import OverfitReport
    from torchdebug_magics.instruments.overfit.training.steps import Progress

__all__ = ["live", "page"]

_LEARNED = 0.05
"""Of the first loss: where the scale of a curve ends that does not come so far."""


def page(report: OverfitReport) -> Page:
    """The whole report."""
    facts = []
    if report.fix:
        proof = "a training with this change learns the samples" if report.verified else "not verified: no trial can make this change"
        facts += [("fix", report.fix), ("proof", proof)]
    facts += [("at", f"{report.location}: `{report.location.source}`")] if report.location is not None else []
    if report.losses:
        facts.append(("loss", f"{number(report.first_loss)} -> {number(report.last_loss)} in {plural(len(report.losses), 'step')}"))
    if report.floor_name:
        facts.append(("stalls at", report.floor_name))
    if report.chance is not None:
        least = "" if report.cause == "conflicting_labels" else f"; the least possible loss is {number(report.floor or 0.0)}"
        facts.append(("loss by chance", f"{number(report.chance)}{least}"))
    if report.leaks:
        facts.append(
            ("leak", f"the output for sample 0 depends on sample{'s' if len(report.leaks) > 1 else ''} {listed([*map(str, report.leaks)])}")
        )
    if not report.losses and not report.error:
        return Page("overfit", "warn", report.verdict, tuple(Note(problem) for problem in report.problems))
    facts.append(("in each step", listed([*report.held_still])))
    facts.append(("took", f"{duration(report.seconds_s)}; model, optimizer, gradients and random state are as before"))
    blocks: list[Block] = [Facts(tuple(facts))]
    if len(report.losses) > 1:
        blocks.append(Chart("Loss", report.losses, "step", "loss", span=_span(report)))
    if len(report.cured_losses) > 1:
        blocks.append(Chart("Loss with the fix", report.cured_losses, "step", "loss", span=_span(report)))
    if report.trials:
        rows = [
            (in_words(one.suspect), one.change, one.last_loss, "learns" if one.learns else one.error or "does not learn")
            for one in report.trials
        ]
        blocks.append(
            Table(
                "Trials, each with one change",
                ("suspect", "change", "last loss", "result"),
                rows,
                {"last loss": "number"},
                is_sequence=True,
            )
        )
    blocks += [Note(problem) for problem in report.problems]
    status: Status = "good" if report.passed and report.cause is None else "bad" if report.cause is not None else "warn"
    return Page("overfit", status, report.verdict, tuple(blocks))


def _span(report: OverfitReport) -> tuple[float, float] | None:
    """One scale for both curves, down to what counts as learned."""
    values = [one for one in (*report.losses, *report.cured_losses) if math.isfinite(one) and one > 0]
    if not values:
        return None
    return min(*values, max(report.floor or 0.0, _LEARNED * values[0])), max(values)


def live(progress: Progress) -> Page:
    """While it trains."""
    blocks: tuple[Block, ...] = (Chart("Loss", progress.losses, "step", "loss"),) if len(progress.losses) > 1 else ()
    now = f"step {len(progress.losses):,}, loss {number(progress.losses[-1])}" if progress.losses else "begins"
    return Page("overfit", "busy", f"{progress.doing}: {now}", blocks)
