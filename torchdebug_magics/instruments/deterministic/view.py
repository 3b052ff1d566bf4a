"""What a deterministic cell shows: the verdict, the line and the repair; then what was set, and what could not be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torchdebug_magics.format import duration, plural
from torchdebug_magics.html.page import Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.instruments.deterministic.report import StatusReport
from torchdebug_magics.instruments.deterministic.verdict import standing

if TYPE_CHECKING:
    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.deterministic.report import DeterministicReport, Divergence, LiveRitual, Loader
    from torchdebug_magics.report import Location

__all__ = ["after_cell", "page"]


_SEEDED = {
    "hand": "by hand",
    "ritual": "by %deterministic",
    "entropy": "from entropy: different in every run",
    "default": "torch's default",
    "unknown": "not known",
}
_SOURCES: Mapping[str, Format] = {"source": "code", "kind": "text", "seed": "text", "seeded": "text", "state": "code"}
_LOADERS: Mapping[str, Format] = {"loader": "code", "workers": "count", "seeds from": "text", "workers alive": "text"}
_DEPENDS: Mapping[str, Format] = {"on": "text", "what": "prose", "line": "prose", "fix": "prose"}
_POTENTIAL: Mapping[str, Format] = {"op": "code", "line": "prose", "module": "code", "differed": "text", "what to do": "prose"}
_WARNED: Mapping[str, Format] = {"op": "code", "line": "prose", "times": "count", "replacement": "prose"}


_OTHER = {"uninitialized_memory": "where it is read: "}
"""What the second line of a divergence is, by cause."""


def page(report: DeterministicReport | StatusReport) -> Page:
    """Of a cell, or of the state that everything is in."""
    if isinstance(report, StatusReport):
        return Page("deterministic", "info", report.verdict, tuple(_state(report)))
    return Page("deterministic", _status(report), report.verdict, tuple(_blocks(report)))


def after_cell(before: LiveRitual | None, now: LiveRitual) -> Page | None:
    """The cell in which it begins says that it lasts."""
    if before is not None:
        return None
    what = f"Seeded with {now.seed}, {plural(now.settings_count, 'setting')} changed, until `%deterministic off`"
    return Page("deterministic", "info", what)


def _status(report: DeterministicReport) -> Status:
    if report.divergence is not None or report.verified is False:
        return "bad"
    if (
        any(one.on != "carried_state" for one in report.depends_on)
        or report.warnings
        or report.potential
        or report.problems
        or report.not_verified
        or report.interrupted
        or not report.restored
    ):
        return "warn"
    return "good" if report.verified else "info"


def _blocks(report: DeterministicReport) -> Iterator[Block]:
    if report.divergence is not None:
        yield from _divergence(report.divergence)
    yield from _dependences(report)
    yield from _potential(report)
    yield from _warnings(report)
    yield from (Note(problem, "warn") for problem in report.problems)
    yield from (Note(one, "warn") for one in report.overruled)
    if report.unrestorable:
        yield Facts(tuple((one, "differed from the first run") for one in report.unrestorable), "Not restored for the second run")
    yield from _costs(report)
    yield from _ritual(report)


def _divergence(found: Divergence) -> Iterator[Block]:
    advice = tuple((name, text) for name, text in (("fix", found.fix), ("why", found.explanation)) if text)
    if advice:
        yield Facts(advice)
    yield from _code(found.location, "")
    is_other_run = found.cause == "control_flow" and not found.fix  # where the line is known that decides, there is something to change
    yield from _code(found.other, "the other run: " if is_other_run else _OTHER.get(found.cause, "where it comes from: "))
    nth = f"call {found.occurrence:,} at this line, " if found.occurrence > 1 else ""
    rows = (
        ("op", f"`{found.op}`" if found.op else ""),
        ("module", f"`{found.module}`" if found.module else ""),
        ("when", f"{nth}{found.phase}"),
        ("cause", found.cause.replace("_", " ")),
    )
    yield Facts(tuple(row for row in rows if row[1]))


def _code(location: Location | None, whose: str) -> Iterator[Block]:
    if location is not None and location.source:
        yield Code(((location.line, location.source),), location.line, f"{whose}{location}")


def _dependences(report: DeterministicReport) -> Iterator[Block]:
    """All of them; the first is in the verdict, save where two runs differed already."""
    if report.depends_on and report.divergence is None:
        yield from _code(report.depends_on[0].location, "")
        yield from _code(report.depends_on[0].other, "where it first matters: ")
    if len(report.depends_on) > 1:
        rows = tuple((one.on.replace("_", " "), one.what, standing(one.location) or None, one.fix or None) for one in report.depends_on)
        yield Table("What the numbers depend on", tuple(_DEPENDS), rows, _DEPENDS)
    if report.carried:
        names = ", ".join(f"`{name}`" if name.isidentifier() else name for name in report.carried)
        yield Facts((("the next run finds changed", names),))
    if report.runs_count:
        yield Note(f"{plural(report.runs_count, 'further run')} of this cell, in {duration(report.runs_s)}")


def _potential(report: DeterministicReport) -> Iterator[Block]:
    if report.potential:
        rows = tuple(
            (
                one.op,
                standing(one.location) or None,
                one.module,
                f"{one.differed_count:,} of {one.repetitions_count:,}" if one.repetitions_count else None,
                one.fix or one.explanation,
            )
            for one in report.potential
        )
        yield Table("What may differ in another run", tuple(_POTENTIAL), rows, _POTENTIAL)


def _warnings(report: DeterministicReport) -> Iterator[Block]:
    if report.warnings:
        rows = tuple((one.op, standing(one.location) or None, one.count, one.fix or None) for one in report.warnings)
        yield Table("Ops that torch calls non-deterministic", tuple(_WARNED), rows, _WARNED)


def _costs(report: DeterministicReport) -> Iterator[Block]:
    if report.costs:
        ordered = sorted(report.costs, key=lambda cost: -cost.ratio)
        rows = tuple((cost.setting, f"{cost.ratio:.2f}x") for cost in ordered)
        yield Table("Time of the cell with one setting alone, to its time with none", ("setting", "time"), rows, {"setting": "code"})


def _ritual(report: DeterministicReport) -> Iterator[Block]:
    """What was set, behind a fold: it is the same in every cell."""
    rows = tuple((name, _value(one.before), _value(one.during)) for name, one in report.settings.items())
    columns = ("setting", "before and after" if report.restored else "before", "during")
    blocks: list[Block] = [Table("Settings, and what they were", columns, rows, dict.fromkeys(columns, "code"))] if rows else []
    seeded = "Python, NumPy's global one, torch on every device"
    own = ", ".join(f"`{name}`" for name in report.generators)
    blocks.append(Facts((("seeded", f"{seeded}{', ' if own else ''}{own}"), ("threads", f"{report.threads_count:,}"))))
    blocks += [Note(one) for one in report.too_late]
    late = f", {plural(len(report.too_late), 'thing')} too late" if report.too_late else ""
    yield Fold(f"What was set: {plural(len(rows), 'setting')}{late}", tuple(blocks))


def _value(value: object) -> str:
    return "not set" if value is None else str(value)


# --- %deterministic status ------------------------------------------------------------------------------------------------------


def _state(report: StatusReport) -> Iterator[Block]:
    sources = tuple(
        (one.name, one.kind, None if one.seed is None else str(one.seed), _SEEDED[one.seeded], one.state) for one in report.sources
    )
    marked = frozenset(position for position, one in enumerate(report.sources) if one.seeded == "entropy")
    yield Table("Sources of random numbers", tuple(_SOURCES), sources, _SOURCES, marked)
    if report.loaders:
        yield Table("DataLoaders", tuple(_LOADERS), tuple(map(_loader, report.loaders)), _LOADERS)
    yield from (Note(problem, "warn") for problem in report.problems)
    yield Facts((("threads", f"{report.threads_count:,}"), ("hash seed", _hash_seed(report.hash_seed))))
    rows = tuple((name, _value(value)) for name, value in report.settings.items())
    yield Facts(rows, "Settings")


def _loader(one: Loader) -> tuple[str | int | None, ...]:
    alive = "yes: with the seeds of an earlier loop" if one.workers_alive else "no"
    return (one.name, one.workers_count, one.generator or "torch's global generator", alive)


def _hash_seed(seed: str) -> str:
    return "random: strings in sets are in another order with every start of the kernel" if seed == "random" else seed
