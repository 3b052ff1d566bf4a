"""Ranks put together: the report of the rank in which it began, with a row for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.format import capitalised, plural
from torchdebug_magics.ranks.disagreements import disagreements, ranks_named
from torchdebug_magics.ranks.report import RanksReport
from torchdebug_magics.ranks.transport import says_cut

if TYPE_CHECKING:
    from torchdebug_magics.ranks.compared import RankRecord
    from torchdebug_magics.ranks.disagreements import Asked
    from torchdebug_magics.ranks.report import RankFinding
    from torchdebug_magics.report import Report

__all__ = ["held_details", "merged"]

_AT_LEAST = 2


def held_details(records: Sequence[RankRecord]) -> Asked:
    """Of records that came with their details."""
    by_rank = {one.rank.rank: one.compared.details for one in records}
    return lambda kind, step, ranks: {rank: by_rank[rank].get((kind, step), {}) for rank in ranks}


def merged(
    instrument: str, records: Sequence[RankRecord], details: Asked, own: Report | None = None, problems: tuple[str, ...] = ()
) -> RanksReport:
    """One report of all ranks; `own` is that of the process that launched them, where it found something itself, `problems` are its."""
    records = sorted(records, key=lambda one: one.rank.rank)
    findings = disagreements(records, details)
    first = _first(records)
    if findings and findings[0].kind == "collective_overflow":
        first = None
    shown = _shown(records, first) if own is None else own
    return RanksReport(
        instrument=instrument,
        ranks=tuple(replace(one.rank, found=one.compared.found_at is not None) for one in records),
        first=first if first is not None else next((one.ranks[0] for one in findings if not one.is_harmless), None),
        rank_findings=findings,
        shown=shown,
        problems=(*problems, *_problems(records)),
        sentence=own.verdict if own is not None else _sentence(records, first, findings),
    )


def _first(records: Sequence[RankRecord]) -> int | None:
    """The rank whose finding came first: of the same step, one that is its own comes before one that came from elsewhere."""
    found = [(one.compared.found_at[0], one.compared.is_received, one.compared.found_at[1], one.rank.rank)
             for one in records if one.compared.found_at is not None]  # fmt: skip
    return min(found)[3] if found else None


def _shown(records: Sequence[RankRecord], first: int | None) -> Report | None:
    with_reports = [one for one in records if one.rank.report is not None]
    chosen = [one for one in with_reports if one.rank.rank == first] or with_reports
    return chosen[0].rank.report if chosen else None


def _sentence(records: Sequence[RankRecord], first: int | None, findings: Sequence[RankFinding]) -> str:
    number = len(records)
    broken = [one.rank for one in records if one.rank.state == "raised" or _was_lost(one)]
    broken.sort(key=lambda one: one.state != "died")  # what the others raise then is that it is gone
    parts = []
    if findings and findings[0].kind == "collective_overflow":
        parts.append(capitalised(findings[0].sentence))
    elif first is not None:
        received = [one.rank.rank for one in records if one.compared.is_received and one.rank.rank != first]
        others = f" · {ranks_named(received)} received it with the averaged gradients" if received else ""
        report = next(one.rank for one in records if one.rank.rank == first)
        parts.append(f"Rank {first} of {number}: {report.verdict}{others}")
    parts += [capitalised(one.sentence) for one in findings if one.kind != "collective_overflow" and not one.is_harmless]
    if not parts or (first is None and findings[0].kind != "collective_overflow"):
        parts += [f"Rank {one.rank} {one.ending}" for one in broken[:_AT_LEAST]]
    if not parts:
        parts.append(_all_well(records))
    return " · ".join((*parts, *(one.sentence for one in findings if one.is_harmless)))


def _was_lost(record: RankRecord) -> bool:
    """Whether it died by itself, or had not ended when the others had; a launcher's SIGTERM comes because of another rank."""
    is_missing = record.rank.state == "interrupted" and record.rank.report is None
    return is_missing or (record.rank.state == "died" and record.rank.exit_code != -15)  # noqa: PLR2004 - SIGTERM


def _all_well(records: Sequence[RankRecord]) -> str:
    verdicts = Counter(one.rank.verdict for one in records)
    most, many = verdicts.most_common(1)[0]
    number = len(records)
    if many == number:
        return f"All {plural(number, 'rank')}: {most}" if number > 1 else f"Rank {records[0].rank.rank}: {most}"
    return f"{plural(number, 'rank')}, nothing found on any; rank {records[0].rank.rank}: {records[0].rank.verdict}"


def _problems(records: Sequence[RankRecord]) -> tuple[str, ...]:
    """Each once, with the ranks that have it; that a rank was shortened to travel is said by its own report alone."""
    by_problem: dict[str, list[int]] = {}
    for one in records:
        for problem in (*(one.rank.report.problems if one.rank.report is not None else ()), *one.problems):
            if says_cut(problem):
                continue
            by_problem.setdefault(problem, []).append(one.rank.rank)
    return tuple(f"{ranks_named(ranks)}: {problem}" for problem, ranks in by_problem.items())
