"""Merges the records of all ranks into one report: that of the rank that failed first, with a row per rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torchdebug_magics.format import capitalised, plural
from torchdebug_magics.ranks.compared import RankRecord, says_cut
from torchdebug_magics.ranks.disagreements import Asked, disagreements, ranks_named
from torchdebug_magics.ranks.report import Rank, RankFinding, RankFindingKind, RanksReport
from torchdebug_magics.report import Report, fits_a_title

_MOST_ENDINGS = 2
_RANK = re.compile(r"Rank \d+|All \d+ ranks")
_NUMBER = re.compile(r"^(Rank \d+) of \d+: ")


def held_details(records: Sequence[RankRecord]) -> Asked:
    """Answers from records that still hold their details."""
    by_rank = {record.rank.rank: record.compared.details for record in records}
    return lambda kind, step, ranks: {rank: by_rank[rank].get((kind, step), {}) for rank in ranks}


def merged(
    instrument: str, records: Sequence[RankRecord], details: Asked, own: Report | None = None, problems: tuple[str, ...] = ()
) -> RanksReport:
    """Merge all ranks. `own` is the report of the launching process if that found something itself; `problems` are the launcher's."""
    records = sorted(records, key=lambda record: record.rank.rank)
    findings = disagreements(records, details)
    first = _first(records)
    if findings and findings[0].kind == "collective_overflow":
        first = None
    with_reports = [record for record in records if record.rank.report is not None]
    chosen = [*(report for report in with_reports if report.rank.rank == first), *with_reports]
    shown = own or (chosen[0].rank.report if chosen else None)
    sentences = [own.verdict] if own is not None else _sentences(records, first, findings, lambda rank: rank.verdict)
    titles = [own.title] if own is not None else _sentences(records, first, findings, lambda rank: rank.title)
    headline, beside = parted(titles)
    return RanksReport(
        instrument=instrument,
        ranks=tuple(replace(record.rank, found=record.compared.found_at is not None) for record in records),
        first=first if first is not None else next((finding.ranks[0] for finding in findings if not finding.is_harmless), None),
        rank_findings=findings,
        shown=shown,
        problems=(*problems, *_problems(records)),
        sentence=" · ".join(sentences),
        headline=headline,
        beside=beside,
    )


def _first(records: Sequence[RankRecord]) -> int | None:
    """The rank with the earliest finding; within a step, a rank's own finding comes before one that it received."""
    found = [(record.compared.found_at[0], record.compared.is_received, record.compared.found_at[1], record.rank.rank)
             for record in records if record.compared.found_at is not None]  # fmt: skip
    return min(found)[3] if found else None


def _sentences(
    records: Sequence[RankRecord], first: int | None, findings: Sequence[RankFinding], words_of: Callable[[Rank], str]
) -> list[str]:
    number = len(records)
    broken = [record.rank for record in records if record.rank.state == "raised" or _was_lost(record)]
    broken.sort(key=lambda one: one.state != "died")  # the others then raise only because it is gone
    parts = []
    if findings and findings[0].kind == "collective_overflow":
        parts.append(capitalised(findings[0].sentence))
    elif first is not None:
        cause = next(record for record in records if record.rank.rank == first)
        received = [record.rank.rank for record in records if record.compared.is_received and record is not cause]
        skipped = [record.rank.rank for record in records if cause.compared.found_backward in record.compared.skipped_backwards]
        parts.append(f"Rank {first} of {number}: {words_of(cause.rank)}")
        if received:
            parts.append(f"{ranks_named(received)} received it with the averaged gradients")
        if skipped:
            parts.append(f"{ranks_named(skipped)} received it with the averaged gradients and skipped the step (GradScaler)")
    parts += [capitalised(finding.sentence) for finding in findings if finding.kind != "collective_overflow" and not finding.is_harmless]
    if not parts or (first is None and findings[0].kind != "collective_overflow"):
        parts += _endings(broken)
    if not parts:
        parts += [*filter(None, [_agreement(records)]), _each(records, words_of)]
    return [*parts, *(finding.sentence for finding in findings if finding.is_harmless)]


def _endings(broken: Sequence[Rank]) -> list[str]:
    """How ranks ended, one part for all that ended alike."""
    by_ending: dict[str, list[int]] = {}
    for one in broken:
        by_ending.setdefault(one.ending, []).append(one.rank)
    return [f"{capitalised(ranks_named(ranks))} {ending}" for ending, ranks in by_ending.items()][:_MOST_ENDINGS]


def _was_lost(record: RankRecord) -> bool:
    """Whether it died on its own, or had not ended when the others had. A launcher sends SIGTERM because of another rank."""
    is_missing = record.rank.state == "interrupted" and record.rank.report is None
    return is_missing or (record.rank.state == "died" and not record.rank.is_terminated)


def _agreement(records: Sequence[RankRecord]) -> str:
    """What was compared and is as it should be; empty where nothing was."""
    moments: dict[RankFindingKind, list[int | None]] = {"replicas_part": [], "same_batch": []}
    for kind, steps in moments.items():
        noted = Counter(step for record in records for step in {moment.step for moment in record.compared.moments if moment.kind == kind})
        steps += [step for step, count in noted.items() if count > 1 and (step or kind == "same_batch")]
    if not moments["replicas_part"]:
        return ""
    batches = ", their batches differ" if moments["same_batch"] else ""
    compared = f"compared after {plural(len(moments['replicas_part']), 'step')}"
    return f"The weights of all {plural(len(records), 'rank')} agree{batches} ({compared})"


def _each(records: Sequence[RankRecord], words_of: Callable[[Rank], str]) -> str:
    verdicts = Counter(words_of(record.rank) for record in records)
    most, many = verdicts.most_common(1)[0]
    number = len(records)
    if many == number:
        return f"All {plural(number, 'rank')}: {most}" if number > 1 else f"Rank {records[0].rank.rank}: {most}"
    return f"{plural(number, 'rank')}, nothing found on any; rank {records[0].rank.rank}: {words_of(records[0].rank)}"


def _problems(records: Sequence[RankRecord]) -> tuple[str, ...]:
    """Each problem once, with the ranks that have it; that a report was shortened is a problem of that report alone."""
    by_problem: dict[str, list[int]] = {}
    for record in records:
        for problem in (*(record.rank.report.problems if record.rank.report is not None else ()), *record.problems):
            if not says_cut(problem):
                by_problem.setdefault(problem, []).append(record.rank.rank)
    return tuple(f"{ranks_named(ranks)}: {problem}" for problem, ranks in by_problem.items())


def parted(sentences: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The headline, and the sentences that stand below it."""
    shorter = list(_shorter(sentences[0]))
    headline, left = next(filter(fits_a_title, shorter), shorter[-1]), list(sentences[1:])
    while left and ": `" not in headline and fits_a_title(f"{headline} · {left[0]}"):  # a quoted line stands last
        headline += f" · {left.pop(0)}"
    return headline, tuple(left)


def _shorter(sentence: str) -> Iterator[str]:
    """The same with less: without the number of ranks, then without its line, the name of a tensor, or the message of an error."""
    yield sentence
    sentence = _NUMBER.sub(r"\1: ", sentence)
    yield sentence
    head, dot, rest = sentence.partition(" · ")
    place, colon, source = rest.partition(": `")
    yield f"{head}{dot}{place.partition(' in ')[0]}{colon}{source}"
    yield head
    head = head.partition(", first ")[0].partition("; ")[0]
    yield head
    rank, colon, what = head.partition(": ")
    yield f"{rank}: {what.partition(': ')[0]}" if _RANK.fullmatch(rank) else rank
