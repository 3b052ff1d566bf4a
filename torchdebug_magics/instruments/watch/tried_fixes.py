"""Fixes of a cell, tried: its first steps are made again with each, and what the cell then raises, or learns, says which helps."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from torchdebug_magics import catalog
from torchdebug_magics.format import capitalised, number, plural
from torchdebug_magics.instrument import SCRIPT
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.source.edited_source import cells
from torchdebug_magics.probing.source.syntax import FUNCTIONS, blocks, nodes
from torchdebug_magics.probing.state.training_again import Run, TrainingAgain
from torchdebug_magics.report import Edit, Finding, Report, changed
from torchdebug_magics.session import Session

_STEPS, _STEPS_OF_A_CHANGE, _STEPS_TO_AN_ERROR = 150, 120, 20
"""Of a run: as many as the slowest rule needs to find what it finds; as show whether a loss falls; and as an error mostly comes within."""
_STEPS_TO_A_LEVEL = 1_000
"""Of a run that shows how far a setting brings the loss."""
_LEAST_S = 10.0
"""That trials may take which a mere suspicion asks for, however short the cell was."""
_OTHER_SEED = 20
_OF_A_WHOLE_GRAPH = ("graph a second time", "modified by an inplace operation")
"""Errors that a graph which was cut has hidden."""
_ENDS = (ast.Return, ast.Break, ast.Continue)
"""What may be left over from a test; a `raise` may be the very error."""
_MOST_LEFT_OVER = 3
_FEW, _AS_FIRST, _AS_LAST = 8, 0.5, 0.2
"""Steps that tell anything; how far the first and the last loss of a trial may be from those of the cell, as a share of them."""
_DIVERGED = 10.0
"""Times the first loss, above which a training diverges, wherever it began."""
_THROWN = 3.0
"""Times its mean, above which a loss is thrown up once."""
_LOWER, _FALLEN, _MUCH_LOWER = 0.8, 0.9, 0.7
"""What a change may leave of the loss that the training as written comes to, of the loss that it begins with, and of what an earlier
change comes to, to be better."""


def tried(
    name: str,
    report: Report,
    again: TrainingAgain,
    progress: Callable[[str], object],
    *,
    steps: int,
    raised: bool,
    has_stalled: bool = False,
) -> Report:
    """The report of an instrument with the alternative that a trial has shown, or with its fix as verified; else as it was.

    `steps` is how many the cell made, `raised` whether an error of the user's code ended it, and `has_stalled` whether its loss does not
    fall, which it must do with a fix.
    """
    finding, alternatives = report.main_finding(), getattr(report, "alternatives", ())
    is_open = finding is not None and bool(finding.edits) and finding.fix_state == "compiles"
    runs_code = finding is not None and any(
        "weights_only=False" in edit.new for edit in finding.edits
    )  # the user must trust the file first
    lines = list(islice(_left_over(), _MOST_LEFT_OVER)) if raised and finding is not None and not finding.edits else []
    if not (alternatives or is_open or lines) or runs_code or not again.can_run:
        return report
    result: Report = report
    try:
        with again.opened():
            progress("changes of the training are tried" if alternatives and not raised else "the fix is tried")
            if raised:
                result = _without_error(report, again, min(_STEPS, steps + _STEPS_TO_AN_ERROR), lines)
            elif any(each.kind == "stalled" for each in alternatives):
                result = _with_lower_loss(report, again, min(_STEPS_TO_A_LEVEL, max(steps // len(alternatives), _STEPS)))
            elif alternatives:
                goes_on = bool(report.cut_short)  # it would have
                result = _with_best_change(report, again, _STEPS_OF_A_CHANGE if goes_on else min(_STEPS_OF_A_CHANGE, max(steps, 2 * _FEW)))
            elif hasattr(report, "findings"):
                result = _without_finding(name, report, again, min(_STEPS, max(steps, 1)), must_learn=has_stalled)
    except Irrevocable:
        pass
    return result


def _without_error(report: Any, again: TrainingAgain, steps: int, lines: Sequence[_LeftOver]) -> Any:
    """The report with the first of its fixes as verified with which the cell raises nothing, where it raises as it is written.

    Where it has none, a line that was left over may be the cause.
    """
    finding = report.main_finding()
    candidates = [each for each in (finding, *getattr(report, "alternatives", ())) if each is not None and each.edits]
    bare = replace(finding, fixes=()) if hasattr(finding, "fixes") else finding
    candidates += [replace(bare, fix=line.fix, edits=line.edits) for line in lines]
    if (as_written := again.run((), steps)) is None or not as_written.error:
        return report
    for candidate in candidates:
        session: Session[Any] = Session(catalog.instrument("autograd").probe({}, SCRIPT))
        run = again.run(candidate.edits, steps, session)
        is_done = run is not None and run.is_complete and not run.error and all(map(math.isfinite, run.losses))
        is_sound = session.has_ended and all(other.is_hint for other in session.report.findings)
        if is_done and is_sound:
            return _with_finding(report, finding, _as_verified(candidate))
    return report


def _as_verified(finding: Any) -> Any:
    """The finding with its fix, the first of several, as one that was tried to the end."""
    fixes = getattr(finding, "fixes", ())
    first = {"fixes": (replace(fixes[0], verified=True, to_the_end=True), *fixes[1:])} if fixes else {}
    return replace(finding, fix_state="verified", **first)


def _with_best_change(report: Any, again: TrainingAgain, steps: int) -> Any:
    """The report with the alternative as its finding that lets the loss fall furthest, if any does."""
    as_written = again.run((), steps)
    if as_written is None or as_written.error or len(as_written.losses) < _FEW or not _is_like(as_written, report):
        return report
    best: tuple[Any, Run] | None = None
    is_past_best_rate = False
    for finding in (*report.findings[:1], *report.alternatives):
        if not finding.edits or (finding.value and is_past_best_rate):
            continue
        run = again.run(finding.edits, steps)
        if run is not None and _helps(run, as_written, keeps_loss=finding.keeps_loss):
            best = (finding, run) if best is None or _is_much_better((finding, run), best) else best
        elif best is not None:
            is_past_best_rate = True
    if best is None:
        return report
    finding, run = best
    others = [again.run(edits, steps, seed=_OTHER_SEED) for edits in ((), finding.edits)]
    if others[0] is None or others[1] is None or not _helps(others[1], others[0], keeps_loss=finding.keeps_loss):
        return report  # by chance
    why = f"with the fix, {plural(len(run.losses), 'step')} from the start bring the loss from {number(run.losses[0])} to "
    why += f"{number(_last(run.losses))}; as written, from {number(as_written.losses[0])} to {number(_last(as_written.losses))}"
    finding = replace(finding, explanation=why, fix_state="verified")
    return replace(_with_finding(report, report.finding, finding), doubts=())


def _is_much_better(new: tuple[Any, Run], best: tuple[Any, Run]) -> bool:
    """Whether a change lets the loss fall much further: by its share, as it may be another loss; by the loss itself where both keep it."""
    pairs = [(finding.keeps_loss or finding.kind == "diverging", run) for finding, run in (new, best)]
    first = [1.0 if all(keeps for keeps, _ in pairs) else _first(run.losses) for _, run in pairs]
    shares = [_last(run.losses) / of for (_, run), of in zip(pairs, first, strict=True)]
    return shares[0] < _MUCH_LOWER * shares[1]


def _with_lower_loss(report: Any, again: TrainingAgain, steps: int) -> Any:
    """The report with the alternative as its finding that brings a loss that has stopped falling far below where it stopped."""
    as_written = again.run((), steps)
    if as_written is None or as_written.error or not as_written.is_complete or not _is_like(as_written, report):
        return report
    most_s = max(_LEAST_S, again.spent_s * report.steps_count / max(1, len(as_written.losses)))  # about as long as the cell took
    for finding in report.alternatives:
        run = again.run(finding.edits, steps) if finding.edits and again.spent_s < most_s else None
        if run is None or not _ends_at(run) < min(finding.goal, finding.goal / finding.value * _ends_at(as_written)):
            continue
        other = again.run(finding.edits, steps, seed=_OTHER_SEED)
        if other is not None and _ends_at(other) < finding.goal:  # and not by chance
            why = f"with the fix, {plural(len(run.losses), 'step')} from the start bring the loss to {number(_ends_at(run))}; "
            why += f"as written, {report.steps_count:,} bring it to {number(finding.value)}"
            return _with_finding(report, None, replace(finding, explanation=why, fix_state="verified"))
    return report


def _ends_at(run: Run) -> float:
    """The loss of its last fifth; infinite where an error has ended it, or any loss is no number."""
    is_sound = not run.error and len(run.losses) >= _FEW and all(map(math.isfinite, run.losses))
    return _last(run.losses) if is_sound and _last(run.losses) >= 0 else math.inf


def with_fix_of(other: Report, report: Report) -> Report:
    """The report of a fault for which only advice is known, with what another instrument has shown to mend the training."""
    finding, helpful = report.main_finding(), other.main_finding()
    if finding is None or helpful is None or helpful.fix_state != "verified":
        return report
    mended = replace(finding, fix=helpful.fix, edits=helpful.edits, fix_state="verified")
    result: Report = changed(report, lambda part: mended if part is finding else part)
    return result


def _is_like(as_written: Run, report: Any) -> bool:
    """Whether the run as written goes as the cell did: a model that was trained, or otherwise prepared, before the cell goes otherwise."""
    width = report.steps_per_value
    again = as_written.losses[width - 1 :: width] or as_written.losses  # the report keeps the last loss of so many steps
    own = [math.nan if loss is None else loss for loss in report.losses][: len(again)]
    first, last = own[0], _last(own)
    both_diverge = not (last <= _DIVERGED * abs(first) or _last(again) <= _DIVERGED * abs(again[0]))
    if abs(again[0] - first) > _AS_FIRST * abs(first):
        return both_diverge  # from other weights, which large inputs multiply
    steps = [abs(later - earlier) for earlier, later in pairwise(own)]
    scatter = statistics.fmean(steps) if steps and all(map(math.isfinite, steps)) else 0.0
    if not last <= first + scatter:  # it diverges, or is thrown about
        return not _last(again) < _FALLEN * again[0]
    return abs(_last(again) - last) <= _AS_LAST * abs(last) + scatter


def _helps(run: Run, as_written: Run, *, keeps_loss: bool = False) -> bool:
    """Whether the loss falls, and further than as written: by its share, as without a factor it is another one, unless it is the same."""
    if run.error or len(run.losses) < len(as_written.losses) // 2 or not all(map(math.isfinite, run.losses)):
        return False
    first, last = _first(run.losses), _last(run.losses)
    level = statistics.fmean(as_written.losses) if keeps_loss and all(map(math.isfinite, as_written.losses)) else 0.0
    if max(as_written.losses) < _THROWN * level:  # where the first loss was low by chance
        first = max(first, level)
    scale = run.losses[0] / as_written.losses[0] if as_written.losses[0] and not keeps_loss else 1.0
    other = _last(as_written.losses[: len(run.losses)]) * scale
    return 0 <= last < _FALLEN * first and (not math.isfinite(other) or last < _LOWER * other)


def _first(losses: list[float]) -> float:
    """What it began with: the mean of three, or the first, as a loss that jumps up has not fallen when it comes back."""
    return min(losses[0], statistics.fmean(losses[:3]))


def _last(losses: list[float]) -> float:
    """The mean of the last fifth."""
    return statistics.fmean(losses[-max(1, len(losses) // 5) :])


def _without_finding(name: str, report: Any, again: TrainingAgain, steps: int, *, must_learn: bool) -> Any:
    """The report with its first fix as verified, where the same instrument finds less of the kind with it, and nothing else breaks.

    An edit that breaks the training, or after which all is found again, is no repair: the fix stays, as advice.
    """
    finding = report.main_finding()
    session: Session[Any] = Session(catalog.instrument(name).probe({}, SCRIPT))
    watched: AbstractContextManager[object] = session
    run = again.run(finding.edits, steps, watched)
    is_done = run is not None and (run.error or (run.is_complete and len(run.losses) >= min(steps, report.steps_count)))
    if run is None or not session.has_ended or not is_done:
        return report
    if report.steps_count > steps:  # what is found may lie behind these steps
        again.run((), steps, written := Session(catalog.instrument(name).probe({}, SCRIPT)))
        if not written.has_ended or not any(_is_same(finding, other, ()) for other in written.report.findings):
            return report
    is_found = any(_is_same(finding, other, finding.edits) for other in session.report.findings)
    meets_another = not is_found and (run.was_stopped or (name == "autograd" and any(part in run.error for part in _OF_A_WHOLE_GRAPH)))
    may_not_help = not run.error and must_learn and ((as_written := again.run((), steps)) is None or not _helps(run, as_written))
    if meets_another or may_not_help:
        return report
    if not run.error and not is_found:
        return _with_finding(report, finding, replace(finding, fix_state="verified")) if all(map(math.isfinite, run.losses)) else report
    if not run.error or ((as_written := again.run((), steps)) is not None and not as_written.error):
        return _with_finding(report, finding, replace(finding, edits=(), fix_state="advice", has_failed=True))
    return report


def _is_same(finding: Any, other: Any, edits: Sequence[Edit]) -> bool:
    """Whether a finding of a run with the edits is the same fault: of its kind, at its line, which the edits may have moved."""
    before, after = finding.location, other.location
    if other.kind != finding.kind or before is None or after is None:
        named = [tuple(getattr(each, name, None) for name in ("tensor", "module")) for each in (finding, other)]
        return bool(other.kind == finding.kind) and named[0] == named[1]
    above = [edit for edit in edits if edit.file == before.file and edit.line <= before.line]
    moved = sum(len(edit.new.split("\n")) - len(edit.old.split("\n") if edit.old else []) for edit in above)
    return after.file == before.file and after.line in {before.line, before.line + moved}


def _with_finding(report: Any, old: Finding | None, new: Any) -> Any:
    """The report with another finding in the place of its first; the alternatives were to be tried, and are no more."""
    if not hasattr(report, "findings") or (old is not None and new.fix == old.fix):  # what it says stays
        return changed(report, lambda part: new if part is old else part)
    return replace(report, findings=(new, *report.findings[1:]), alternatives=(), sentence=capitalised(new.sentence()))


class _LeftOver(NamedTuple):
    """A statement to remove, as a fix."""

    fix: str
    edits: tuple[Edit, ...]


def _left_over() -> Iterator[_LeftOver]:
    """Of the user's functions, the statements after which others of their block stand that never run."""
    for cell in cells():
        for function in nodes(FUNCTIONS, cell.tree):
            if any(True for _ in nodes((ast.Yield, ast.YieldFrom), function)):
                continue  # an empty generator
            for first, _ in (pair for node in ast.walk(function) for block in blocks(node) for pair in pairwise(block)):
                is_plain = not isinstance(first, ast.Return) or isinstance(first.value, (ast.Constant, ast.Name, type(None)))
                if isinstance(first, _ENDS) and is_plain and len(cell.beside(first)) == 1:
                    text = cell.text(first)
                    owners = [owner.name for owner in nodes(ast.ClassDef, cell.tree) if function in owner.body]
                    fix = f"remove `{text}` from {'.'.join([*owners, function.name])}(): nothing after it runs"
                    yield _LeftOver(fix, (cell.replacing(first, ""),))
