"""One sentence on a deterministic cell: what differed and where, or what holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from torchdebug_magics.format import listed, plural

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import DeterministicReport, Divergence
    from torchdebug_magics.report import Location

__all__ = ["sentence", "standing"]

_IN_WORDS = {"aten.lift_fresh.default": "data that enters torch"}
"""What is an op to torch alone."""
_ONLY: Final[Mapping[str, str]] = {
    "seed": "Equal only because this magic seeded it",
    "settings": "Equal only because this magic set torch to be deterministic",
    "order": "Same numbers here, others where the order differs",
    "entropy": "Same numbers in this process, others in the next one",
    "race": "Same numbers in these two runs, by chance",
}
"""By what the numbers depend on most."""
_WORTH_SAYING = 1.05
"""A smaller ratio may be the machine's."""


def sentence(report: DeterministicReport) -> str:
    """The most urgent first."""
    untried = f" before {listed(report.unchecked)} could be tried" if report.unchecked else ""
    return f"{_of_runs(report)}{f' · interrupted{untried}' if report.interrupted else ''}"


def _of_runs(report: DeterministicReport) -> str:
    if report.divergence is not None:
        return _difference(report.divergence, report.against)
    if report.verified is False:
        return f"{_differs(report.against)}, and no PyTorch op could be identified as the cause"
    if report.verified:
        return _agreement(report)
    parts = [_met(report) or _ritual(report)]
    if report.not_verified:
        parts.append(f"not compared: {report.not_verified}")
    return " · ".join([*parts, *_slower(report)])


def standing(location: Location | None) -> str:
    """A line and its text; empty where it is not known."""
    if location is None:
        return ""
    return f"{location}: `{location.source}`" if location.source and "`" not in location.source else str(location)


def _difference(found: Divergence, against: str) -> str:
    what = f"{_IN_WORDS.get(found.op, found.op)}{' (backward)' if found.phase == 'backward' else ''}"
    module = f"`{found.module}`" if found.module else ""
    fix = "; ".join(one for one in (found.fix, *(one.fix for one in found.further)) if one)
    parts = (what, module, standing(found.location), found.explanation, f"fix: {fix}" if fix else "")
    return f"{_differs(against)}: {' · '.join(filter(None, parts))}"


def _differs(against: str) -> str:
    return f"Different from {against}" if against else "Different every run"


def _agreement(report: DeterministicReport) -> str:
    if not report.ops_count and not report.depends_on:
        return f"Seeded with {report.seed}; no PyTorch op ran, so there was nothing to compare"
    whom = f"as {report.against}" if report.against else "twice"
    how = "bit-identical" if report.rtol is None else f"equal to within {report.rtol:g}"
    first = None if report.against else next(iter(report.depends_on), None)
    ops = f": {plural(report.ops_count, 'op')} {'is' if report.ops_count == 1 else 'are'} {how}" if report.ops_count else ""
    same = f"Same numbers {whom}{ops} (seed {report.seed})"
    parts = [same if first is None else _ONLY.get(first.on, f"{same}, others when this cell runs again")]
    if first is not None:
        fixes = dict.fromkeys(one.fix for one in report.depends_on if one.on == first.on and one.fix)  # one alone would not end it
        parts += [standing(first.location), first.what, f"fix: {'; '.join(fixes)}" if fixes else ""]
    return " · ".join([*filter(None, parts), *_slower(report)])


def _met(report: DeterministicReport) -> str:
    """What torch itself has warned of."""
    if not report.warnings:
        return ""
    first = report.warnings[0]
    where = f" at {standing(first.location)}" if first.location else ""
    more = f", and {plural(len(report.warnings) - 1, 'more op')}" if len(report.warnings) > 1 else ""
    fix = f" · fix: {first.fix}" if first.fix else ""
    return f"Seeded with {report.seed}, yet `{first.op}`{where} may give different numbers in every run{more}{fix}"


def _ritual(report: DeterministicReport) -> str:
    seeded = f"Seeded with {report.seed}"
    if not report.restored:
        return f"{seeded}; not all of what was set could be put back"
    if not report.settings:
        return f"{seeded}; no setting had to change"
    kept = ", the generators left as they are" if report.keep_rng else ""
    many = len(report.settings)
    return f"{seeded}; {plural(many, 'setting')} changed, {'all' if many > 1 else 'and'} put back{kept}"


def _slower(report: DeterministicReport) -> list[str]:
    ratio = report.slowdown_ratio
    if ratio is None:
        return []
    most = max(report.costs, key=lambda cost: cost.ratio, default=None)
    by = f", most by {most.setting} ({most.ratio:.2f}x)" if most is not None and ratio > _WORTH_SAYING < most.ratio else ""
    return [f"determinism settings slow this cell down {ratio:.2f}x{by}"]
