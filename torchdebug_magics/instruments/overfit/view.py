"""The page of an overfit report: the cause, the fix, the loss curve; in folds, the curve with the fix and the trials."""

from __future__ import annotations

import math

from torchdebug_magics.format import duration, listed, number, plural
from torchdebug_magics.html.page import Block, Chart, Code, Facts, Fold, Note, Page, Status, Table
from torchdebug_magics.instruments.overfit.report import OverfitReport, Progress

_LEARNED = 0.05
"""Share of the first loss at which the scale of a curve ends, unless the curve falls below it."""


def page(report: OverfitReport) -> Page:
    """The cause and the fix, the loss curve, and the rest in folds."""
    notes = [*(Note(problem, "warn") for problem in report.problems), *map(Note, report.notes)]
    if not report.losses and not report.error:
        return Page("overfit", "warn", report.title, (*([Facts((("reason", report.reason),))] if report.reason else []), *notes))
    blocks: list[Block] = [Facts(_first_facts(report))]
    if report.excerpt:
        blocks.append(Code(report.excerpt, report.location.line if report.location is not None else None))
    if len(report.losses) > 1:
        blocks.append(Chart("Loss", report.losses, "step", "loss", span=_span(report)))
    blocks += notes
    if len(report.cured_losses) > 1:
        change = f"{number(report.cured_losses[0])} -> {number(report.cured_losses[-1])}"
        curve = Chart("Loss with the fix", report.cured_losses, "step", "loss", span=_span(report))
        blocks.append(Fold(f"With the fix: loss {change} in {plural(len(report.cured_losses), 'step')}", (curve,)))
    if report.trials:
        results = ["learns" if trial.learns else trial.error or "does not learn" for trial in report.trials]
        suspects = [(trial.suspect or "").replace("_", " ") for trial in report.trials]
        named = zip(suspects, report.trials, results, strict=True)
        cells = [(suspect, trial.change, trial.last_loss, result) for suspect, trial, result in named]
        columns = ("suspect", "change", "last loss", "result")
        table = Table("Trials, each with one change", columns, cells, {"last loss": "number"}, is_sequence=True)
        blocks.append(Fold(f"Trials: {plural(len(cells), 'training')}, each with one change", (table,)))
    least = "" if report.cause == "conflicting_labels" else f"; the least possible loss is {number(report.floor or 0.0)}"
    rows = (
        ("loss", report.loss_change.removeprefix("loss ") if report.losses and report.headline else ""),
        ("stalls at", report.floor_name),
        ("loss of guessing", f"{number(report.chance)}{least}" if report.chance is not None else ""),
        ("in each step", listed([*report.held_still])),
    )
    if details := tuple((name, text) for name, text in rows if text):
        blocks.append(Fold("Details: loss values, and what is the same in each step", (Facts(details),)))
    status: Status = "good" if report.passed and report.cause is None else "bad" if report.cause is not None else "warn"
    return Page("overfit", status, report.title, tuple(blocks))


def _first_facts(report: OverfitReport) -> tuple[tuple[str, str], ...]:
    proof = "a training with this change learns the samples" if report.verified else "not verified: no trial can make this change"
    where = report.location
    leaks = f"the output for sample 0 depends on sample{'s' if len(report.leaks) > 1 else ''} {listed([*map(str, report.leaks)])}"
    took = f"; all trainings took {duration(report.seconds_s)}" if report.seconds_s else ""
    rows = (
        ("fix", report.fix),
        ("proof", proof if report.fix else ""),
        ("error", "" if report.headline else report.error),
        ("next", "" if report.headline or not report.error else "`%torchdebug` in the next cell explains the error, where it can"),
        ("why" if report.headline else "but" if report.passed else "stopped" if report.is_stopped else "tried", report.why),
        ("at", f"{where}: `{where.source}`" if where is not None and not report.excerpt else ""),
        ("leak", leaks if report.leaks else ""),
        ("unchanged", f"model, optimizer, gradients, RNG state and files{took}"),
    )
    return tuple((name, text) for name, text in rows if text)


def _span(report: OverfitReport) -> tuple[float, float] | None:
    """The common scale of both curves, down to the loss that counts as learned."""
    values = [loss for loss in (*report.losses, *report.cured_losses) if math.isfinite(loss) and loss > 0]
    if not values:
        return None
    return min(*values, max(report.floor or 0.0, _LEARNED * values[0])), max(values)


def live_page(progress: Progress) -> Page:
    """The page during the training."""
    blocks = (Chart("Loss", progress.losses, "step", "loss"),) if len(progress.losses) > 1 else ()
    now = f"step {len(progress.losses):,}, loss {number(progress.losses[-1])}" if progress.losses else "begins"
    return Page("overfit", "busy", f"{progress.doing}: {now}", blocks)
