"""Shows a report of many ranks: the headline, where ranks differ, one row per rank, then the page of the rank that failed first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchdebug_magics.format import Format
from torchdebug_magics.html.page import Block, Cell, Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.ranks.report import Rank, RankFinding, RanksReport
from torchdebug_magics.report import Report

_COLUMNS = ("rank", "host", "process", "device", "state", "seconds", "verdict")
_LIKE = 4
"""From this many equal ranks on, one row stands for all of them."""
_NEAR = 4
_LONGEST = 120
"""Characters of a title in the table; the whole one is the headline, or in the rank's own report."""


def page(report: RanksReport, page_of: Callable[[Report], Page]) -> Page:
    """The page of all ranks: what to change, the table of ranks, then the rest of one rank's own page, folded."""
    own = None if report.shown is None else page_of(report.shown)
    said = _notes(report.shown)
    inner = () if own is None else tuple(block for block in own.blocks if block not in said)
    shown = next((rank.rank for rank in report.ranks if rank.report is report.shown), None)
    is_found = report.first is not None or shown is None
    head = _head(inner) if is_found and not report.rank_findings else 0
    differences = [_facts(finding, report.title) for finding in report.rank_findings]
    blocks: list[Block] = [*differences, *inner[:head], *_beside(report), _table(report), *_notes(report)]
    if inner[head:]:
        whose = "the process that launched the ranks" if shown is None else f"rank {shown}"
        blocks.append(Fold(f"The report of {whose}", inner[head:]))
    status = report.status if own is None or report.status == "bad" else own.status
    return Page(report.instrument, status, report.title, tuple(blocks))


def short_page(report: Report, instrument: str) -> Page:
    """The page of a report that was shortened on its way to rank 0."""
    return Page(instrument, "info", report.verdict, tuple(Note(problem, "info") for problem in report.problems))


def _notes(report: Report | None) -> list[Note]:
    return [] if report is None else [Note(problem, "warn") for problem in report.problems]


def _head(blocks: Sequence[Block]) -> int:
    """How many blocks say what to change: all down to the first excerpt of code, if that is near."""
    near = [at for at, one in enumerate(blocks[:_NEAR]) if isinstance(one, Code)]
    return near[0] + 1 if near else min(1, len(blocks))


def _facts(finding: RankFinding, headline: str) -> Facts:
    """What differs, where the headline does not say so, the line, and what to change."""
    at = finding.location
    said = () if finding.sentence.lower() in headline.lower() else (("differs", finding.sentence),)
    where = () if at is None else (("line", f"{at}: `{at.source}`" if at.source else str(at)),)
    return Facts((*said, *where, ("fix", finding.fix)))


def _beside(report: RanksReport) -> list[Facts]:
    """What the headline had no room for, without the findings."""
    found = {finding.sentence.lower() for finding in report.rank_findings}
    rows = tuple(("also", one) for one in report.beside if one.lower() not in found)
    return [Facts(rows)] if rows else []


def _table(report: RanksReport) -> Table:
    groups = _alike(report.ranks)
    rows = [_row(group) for group in groups]
    failed = [rank for rank in report.ranks if rank.state == "raised" or (rank.state == "died" and not rank.is_terminated)]
    wrong = [finding for finding in report.rank_findings if finding.kind != "same_batch" and not finding.is_harmless]
    odd = {report.first, *(rank for one in wrong for rank in one.ranks), *(one.rank for one in failed)}
    marked = frozenset(at for at, group in enumerate(groups) if any(one.rank in odd for one in group))
    whole = Table("Ranks", _COLUMNS, [_row([rank]) for rank in report.ranks], _FORMATS) if len(groups) < len(report.ranks) else None
    return Table("Ranks", _COLUMNS, rows, _FORMATS, marked=marked, whole=whole)


_FORMATS: Mapping[str, Format] = {"seconds": "seconds", "verdict": "prose"}


def _alike(ranks: Sequence[Rank]) -> list[list[Rank]]:
    """Groups of ranks whose rows would be equal, in the order of the first rank of each."""
    by_text: dict[tuple[str, str], list[Rank]] = {}
    for one in ranks:
        by_text.setdefault((one.state, one.verdict if one.found or one.report is None else ""), []).append(one)
    groups = [part for group in by_text.values() for part in ([group] if len(group) >= _LIKE else [[one] for one in group])]
    return sorted(groups, key=lambda group: group[0].rank)


def _row(group: Sequence[Rank]) -> tuple[Cell, ...]:
    first = group[0]
    if len(group) == 1:
        return (str(first.rank), first.host, str(first.pid), first.device, first.state, first.elapsed_s, _brief(first.title))
    hosts, devices = {one.host for one in group}, {one.device for one in group}
    longest_s = max(one.elapsed_s for one in group)
    return (
        f"{len(group)} ranks", first.host if len(hosts) == 1 else f"{len(hosts)} hosts", "",
        first.device if len(devices) == 1 else f"{len(devices)} devices", first.state, longest_s,
        _brief(first.title) if first.found or first.report is None else "nothing found",
    )  # fmt: skip


def _brief(verdict: str) -> str:
    """The first two parts of a title: what happened, and where."""
    text = " · ".join(verdict.split(" · ")[:2]).partition("; ")[0]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
