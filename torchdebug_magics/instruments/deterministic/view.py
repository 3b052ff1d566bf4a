"""What a deterministic cell shows: what differed, the fix and the line; then, folded, what else was found and what was set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchdebug_magics.format import Format, duration, plural
from torchdebug_magics.html.page import Block, Code, Facts, Fold, Note, Page, Status, Table, quoted_span
from torchdebug_magics.instruments.deterministic.report import (
    DeterministicReport,
    Lines,
    LiveRitual,
    StatusReport,
    lines_of,
    rows_of,
    standing,
)

_SEEDED = {
    "hand": "explicitly",
    "ritual": "by %deterministic",
    "entropy": "from entropy: different in every run",
    "default": "PyTorch's default seed",
    "unknown": "unknown",
}
_SOURCES: Mapping[str, Format] = {"generator": "code", "kind": "text", "seed": "text", "seeded": "text", "state": "code"}
_LOADERS: Mapping[str, Format] = {"loader": "code", "workers": "count", "seeded from": "text", "workers alive": "text"}
_DEPENDS: Mapping[str, Format] = {"on": "text", "what": "prose", "line": "prose", "fix": "prose"}
_WARNED: Mapping[str, Format] = {"op": "code", "line": "prose", "calls": "count", "fix": "prose"}


def page(report: DeterministicReport | StatusReport) -> Page:
    """Shows one cell's report, or the state of all generators and settings."""
    if isinstance(report, StatusReport):
        return Page("deterministic", "info", report.title, tuple(_state(report)))
    return Page("deterministic", _status(report), report.title, tuple(_blocks(report)))


def page_after_cell(before: LiveRitual | None, now: LiveRitual) -> Page | None:
    """Says, in the cell in which it begins, that a lasting session is open."""
    if before is not None:
        return None
    what = f"Seeded with {now.seed}, {plural(now.settings_count, 'setting')} changed, until `%deterministic off`"
    return Page("deterministic", "info", what)


def _status(report: DeterministicReport) -> Status:
    if report.divergence is not None or report.verified is False:
        return "bad"
    depends = any(one.on != "carried_state" for one in report.depends_on)
    if depends or report.warnings or report.problems or report.not_verified or report.interrupted or not report.restored:
        return "warn"
    return "good" if report.verified else "info"


def _blocks(report: DeterministicReport) -> Iterator[Block]:
    """The fix, the reason and the line; one table that was asked for; caveats; then the folds."""
    lines = _lines(report)
    facts = _facts(report)
    if facts:
        yield Facts(facts)
    yield from _excerpt(lines, " ".join(text for name, text in facts if name in {"fix", "why"}))
    tables = list(_tables(report))
    shown = tables[:1] if lines[0] is None and not facts else []
    yield from (table for _, table in shown)
    yield from (Note(problem, "warn") for problem in report.problems)
    if report.overruled:
        yield Note("; ".join(report.overruled), "warn")
    if report.interrupted and report.unchecked:
        yield Note(f"not checked because of the interrupt: {', '.join(report.unchecked)}", "warn")
    for name, table in tables[len(shown) :]:
        yield Fold(name, (table,))
    if details := _details(report):
        yield Fold("Details: how it was found", (Facts(details),))
    yield _settings(report)


def _lines(report: DeterministicReport) -> Lines:
    if report.divergence is not None:
        return lines_of(report.divergence, of_another=bool(report.against))
    if report.depends_on:
        return lines_of(report.depends_on[0])
    return (report.warnings[0].location if report.warnings else None, None, "")


def _facts(report: DeterministicReport) -> tuple[tuple[str, str], ...]:
    unrestored = ("not restored for the second run", "; ".join(report.unrestorable))
    rows = (*rows_of(report), *([unrestored] if report.unrestorable else ()))
    return rows or (_checked(report) if report.runs_count else ())


def _checked(report: DeterministicReport) -> tuple[tuple[str, str], ...]:
    return (("checked", f"reran the cell {plural(report.runs_count, 'time')}, {duration(report.runs_s)}"),)


def _excerpt(lines: Lines, words: str) -> Iterator[Block]:
    """The line to change; a second one of the same file stands in the same excerpt."""
    first, second, label = lines
    if first is None or not first.source:
        return
    text = [(first.line, first.source)]
    is_near = second is not None and bool(second.source) and (second.file, second.cell) == (first.file, first.cell)
    if second is not None and is_near and second.line != first.line:
        text.append((second.line, second.source))
    title = f"line {second.line}: {label}" if second is not None and len(text) > 1 else ""
    yield Code(tuple(sorted(text)), first.line, title, quoted_span(first.source, words))
    if second is not None and second.source and not is_near:
        yield Code(((second.line, second.source),), second.line, f"{label}: {second}")


def _tables(report: DeterministicReport) -> Iterator[tuple[str, Table]]:
    """Each with the words for a fold, the one to be seen first at the head."""
    if len(report.warnings) > 1 or (report.warnings and (report.divergence is not None or report.verified is not None)):
        warned = tuple((warning.op, standing(warning.location) or None, warning.count, warning.fix or None) for warning in report.warnings)
        name = "Ops without a deterministic implementation"
        yield f"{name}: {len(warned)}", Table(name, tuple(_WARNED), warned, _WARNED)
    if len(report.depends_on) > 1:
        rows = tuple((one.on.replace("_", " "), one.what, standing(one.location) or None, one.fix or None) for one in report.depends_on)
        also = ", ".join(dict.fromkeys(one.on.replace("_", " ") for one in report.depends_on[1:]))
        yield f"The numbers also depend on: {also}", Table("What the numbers depend on", tuple(_DEPENDS), rows, _DEPENDS)


def _details(report: DeterministicReport) -> tuple[tuple[str, str], ...]:
    found = report.divergence
    rows = []
    if found is not None:
        nth = f", call {found.occurrence:,} on this line" if found.occurrence > 1 else ""
        rows.append(("first op that differs", f"`{found.op}` ({found.phase}{nth})" if found.op else ""))
        rows.append(("module", f"`{found.module}`" if found.module else ""))
    rows.append(("changed for the next run", ", ".join(f"`{name}`" if name.isidentifier() else name for name in report.carried)))
    if report.ops_count and (found is not None or report.depends_on):
        rows.append(("compared", f"{plural(report.ops_count, 'op')} with seed {report.seed}"))
    if report.runs_count and (found is not None or report.depends_on or report.not_verified or report.unrestorable):
        rows += _checked(report)
    return tuple(row for row in rows if row[1])


def _settings(report: DeterministicReport) -> Block:
    """What was set, behind a fold: it is the same in every cell."""
    rows = tuple((name, _value(one.before), _value(one.during)) for name, one in report.settings.items())
    columns = ("setting", "before and after" if report.restored else "before", "during")
    blocks: list[Block] = [Table("Settings", columns, rows, dict.fromkeys(columns, "code"))] if rows else []
    own = "".join(f", `{name}`" for name in report.generators)
    seeded = f"Python, NumPy's global generator, torch on every device{own}"
    blocks.append(Facts((("seeded", seeded), ("threads", f"{report.threads_count:,}"))))
    blocks += [Note(one) for one in report.too_late]
    is_in_title = report.verified is None and report.divergence is None and not report.warnings
    after = "changed and restored" if report.restored else "changed"
    name = "Settings and seeds" if is_in_title or not rows else f"{plural(len(rows), 'setting')} {after}"
    return Fold(" · ".join([name, *(one.partition(":")[0] for one in report.too_late)]), tuple(blocks))


def _value(value: object) -> str:
    return "not set" if value is None else str(value)


# --- %deterministic status ------------------------------------------------------------------------------------------------------


def _state(report: StatusReport) -> Iterator[Block]:
    sources = tuple(
        (source.name, source.kind, None if source.seed is None else str(source.seed), _SEEDED[source.seeded], source.state)
        for source in report.sources
    )
    marked = frozenset(position for position, one in enumerate(report.sources) if one.seeded == "entropy")
    yield Table("Random number generators", tuple(_SOURCES), sources, _SOURCES, marked)
    yield from (Note(problem, "warn") for problem in report.problems)
    if report.loaders:
        alive = {True: "yes, with the seeds of an earlier loop", False: "no"}
        loaders = tuple(
            (one.name, one.workers_count, one.generator or "torch's global generator", alive[one.workers_alive]) for one in report.loaders
        )
        yield Fold(f"DataLoaders: {len(report.loaders)}", (Table("DataLoaders", tuple(_LOADERS), loaders, _LOADERS),))
    rows = tuple((name, _value(value)) for name, value in report.settings.items())
    is_random = report.hash_seed == "random"
    hash_seed = "random: the order of string sets changes with every start of the kernel" if is_random else report.hash_seed
    process = (("threads", f"{report.threads_count:,}"), ("hash seed", hash_seed))
    yield Fold(f"Settings: {len(rows)}", (Facts((*rows, *process)),))
