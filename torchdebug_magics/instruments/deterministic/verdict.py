"""Puts a deterministic cell into words: the title says what differed and where, the sentence adds the reason and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from torchdebug_magics.format import listed, plural
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import Cause, Dependence, DeterministicReport, Divergence


_CAUSES: Final[Mapping[Cause, str]] = {
    "unseeded_generator": "unseeded torch generator",
    "python_random": "unseeded Python random",
    "numpy_random": "unseeded NumPy generator",
    "wall_clock": "the clock is read",
    "os_entropy": "the system's entropy is read",
    "hash_order": "hashes or memory addresses are used",
    "control_flow": "the runs took different branches",
    "uninitialized_memory": "uninitialized memory is read",
    "nondeterministic_op": "nondeterministic op",
    "worker_seed": "unseeded DataLoader workers",
    "state_leak": "the first run changed the input",
    "outside_data": "input from outside PyTorch",
}
_AGAINST: Final[Mapping[Cause, str]] = {
    "unseeded_generator": "random draws",
    "nondeterministic_op": "same inputs, different result",
    "outside_data": "input from outside PyTorch",
}
"""Causes that a comparison with an earlier run can name; an edited line speaks for itself."""
_ONLY: Final[Mapping[str, str]] = {
    "seed": "Reproducible only with the seed set here",
    "settings": "Reproducible only with the determinism settings set here",
    "order": "Same numbers twice, but they depend on an arbitrary order",
    "entropy": "Same numbers in this process, different ones in the next",
    "race": "Same numbers twice, but a nondeterministic op ran",
}
"""By what the numbers depend on most."""
_NEXT_TIME = "Same numbers twice, but different when the cell runs again"
_LONGEST_NAME = 24
"""Of an earlier run in a title: its file may lie deep."""


class Lines(NamedTuple):
    """The line to change, and a second one that belongs to it."""

    first: Location | None
    second: Location | None = None
    label: str = ""
    """What the second line is."""


def title(report: DeterministicReport) -> str:
    """What happened and where; the reason and the fix have rows of their own."""
    return " · ".join([_headline(report), *(["interrupted"] if report.interrupted else [])])


def sentence(report: DeterministicReport) -> str:
    """The most urgent first, with the reason and the fix."""
    parts = [_headline(report), *_reason(report)]
    if report.not_verified and report.divergence is None and report.verified is None:
        parts.append(report.not_verified)
    if fixes := fixes_of(report):
        parts.append(f"fix: {'; '.join(fixes)}")
    if report.interrupted:
        parts.append(f"interrupted before {listed(report.unchecked)} could be checked" if report.unchecked else "interrupted")
    return " · ".join(parts)


def lines_of(found: Divergence | Dependence, *, of_another: bool = False) -> Lines:
    """The line to change first. `of_another`: the run is compared with an earlier one, and not with a second run of itself."""
    here, other = found.location, None if found.other == found.location else found.other
    cause = getattr(found, "cause", "")
    if of_another or not cause:
        label = "the earlier run's line" if cause == "control_flow" else "where the numbers first differ" if not cause else "a related line"
        return Lines(here, other, label)
    if other is None:
        return Lines(here)
    if cause == "uninitialized_memory":
        return Lines(here, other, "where the memory is read")
    if cause == "control_flow" and not found.fix:
        return Lines(here, other, "where the other run went")
    return Lines(other, here, "where the numbers first differ")


def standing(location: Location | None) -> str:
    """A line and its text; empty where it is not known."""
    if location is None:
        return ""
    return f"{location}: `{location.source}`" if location.source and "`" not in location.source else str(location)


def fixes_of(report: DeterministicReport) -> tuple[str, ...]:
    """What to change, each once. One change alone may not end it."""
    if report.divergence is not None:
        found = (report.divergence.fix, *(one.fix for one in report.divergence.further))
    elif (first := _first(report)) is not None:
        found = tuple(_placed(one, first) for one in report.depends_on if one.on == first.on)
    elif report.verified is None and report.warnings:
        found = (report.warnings[0].fix,)
    else:
        found = ()
    return tuple(dict.fromkeys(one for one in found if one))


def _placed(found: Dependence, first: Dependence) -> str:
    """The fix of a line that the page does not show, with its place."""
    if found.location is None or found.location == first.location:
        return found.fix
    return found.fix.replace("this line", found.location.place)


def _headline(report: DeterministicReport) -> str:
    if report.divergence is not None:
        what, where = _what(report), _at(lines_of(report.divergence, of_another=bool(report.against)).first)
        return f"{_differs(report.against)}{f': {what}' if what else ''}{f' · {where}' if where else ''}"
    if report.verified is False:
        return f"{_differs(report.against)}: no PyTorch op could be identified as the cause"
    if report.verified:
        return _agreement(report)
    return f"{_met(report) or _settings(report)}{' · runs not compared' if report.not_verified else ''}"


def _reason(report: DeterministicReport) -> list[str]:
    first = _first(report)
    return [report.divergence.explanation] if report.divergence is not None else [] if first is None else [first.what]


def _what(report: DeterministicReport) -> str:
    found = report.divergence
    assert found is not None
    if report.against:
        return _AGAINST.get(found.cause, "")
    if found.cause == "outside_data" and found.on is not None:
        return "results arrive in varying order" if found.on == "order" else "the order of threads varies"
    return _CAUSES.get(found.cause, found.op)


def _differs(against: str) -> str:
    if not against:
        return "Different every run"
    return f"Different from {_name(against)}"


def _name(against: str) -> str:
    """A file without its folders."""
    short = against.replace("\\", "/").rsplit("/", 1)[-1]
    return short if len(short) <= _LONGEST_NAME else f"...{short[-_LONGEST_NAME:]}"


def _first(report: DeterministicReport) -> Dependence | None:
    """What equal numbers depend on most."""
    return next(iter(report.depends_on), None) if report.verified and not report.against else None


def _agreement(report: DeterministicReport) -> str:
    if not report.ops_count and not report.depends_on:
        return f"Seeded with {report.seed}; no PyTorch op ran, so there was nothing to compare"
    first = _first(report)
    if first is not None:
        where = _at(first.location)
        return f"{_ONLY.get(first.on, _NEXT_TIME)}{f' · {where}' if where else ''}"
    whom = f"as {_name(report.against)}" if report.against else "twice"
    how = "bit-identical" if report.rtol is None else f"equal to within {report.rtol:g}"
    ops = f": {plural(report.ops_count, 'op')} {'is' if report.ops_count == 1 else 'are'} {how}" if report.ops_count else ""
    return f"Same numbers {whom}{ops} (seed {report.seed})"


def _met(report: DeterministicReport) -> str:
    """What torch itself has warned of."""
    if not report.warnings:
        return ""
    many, first = len(report.warnings), report.warnings[0]
    where = _at(first.location)
    what = f"Nondeterministic op {first.op}" if many == 1 else f"{many} nondeterministic ops, first {first.op}"
    return f"{what}{f' · {where}' if where else ''}"


def _settings(report: DeterministicReport) -> str:
    seeded = f"Seeded with {report.seed}"
    if not report.restored:
        return f"{seeded}; not every setting could be restored"
    if not report.settings:
        return f"{seeded}; no setting had to change"
    return f"{seeded}; {plural(len(report.settings), 'setting')} changed and restored{', RNG states kept' if report.keep_rng else ''}"


def _at(location: Location | None) -> str:
    """A line and its text, for a title: without the name of its function."""
    if location is None:
        return ""
    return f"{location.place}: `{location.source}`" if location.source and "`" not in location.source else location.place
