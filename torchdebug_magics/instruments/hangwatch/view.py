"""What a watch shows: what hangs, the fix, who waits for whom; while the cell runs, where it stands."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torchdebug_magics.format import capitalised, duration
from torchdebug_magics.html.page import Code, Facts, Fold, Note, Page, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.hangwatch.report import HangReport, LiveHang, State, Wait

__all__ = ["live_page", "page"]

_STATUS: Mapping[State, Status] = {"finished": "good", "slow": "warn", "stuck": "bad", "interrupted": "info"}
_MOST_STACKS = 12


def page(report: HangReport) -> Page:
    """The verdict, then the chain from the main thread to the root."""
    rows = [("fix", report.fix), ("waits", _chain(report.chain, report.waits, report.still_s)), ("why", report.reason)]
    rows += [("rate", _rate(report)), ("processes", _stopped(report))]
    blocks: tuple[Block, ...] = (
        *_facts(rows),
        *_table(report.waits, report.root),
        *_stacks(report.waits),
        *(Note(problem, "warn") for problem in report.problems),
    )
    status = "warn" if report.state == "finished" and report.cause else _STATUS[report.state]
    status = "info" if status == "good" and report.ended_by == "error" else status
    return Page("hangwatch", status, capitalised(report.verdict), blocks)


def live_page(snapshot: LiveHang) -> Page:
    """As it stands, counted in whole seconds."""
    finding = snapshot.finding
    if finding is None:
        rate = f" · {snapshot.rate:.3g} {snapshot.rate_of}s per second" if snapshot.rate is not None else ""
        where = f" · {snapshot.at}: `{snapshot.at.source}`" if snapshot.at is not None and snapshot.still_s > 1 else ""
        still = f" · no progress for {snapshot.still_s:.0f} s" if snapshot.still_s > 2 else ""  # noqa: PLR2004 - a step of a second is no pause
        return Page(
            "hangwatch",
            "busy",
            f"Running{f' for {duration(round(snapshot.elapsed_s))}' if snapshot.elapsed_s >= 1 else ''}{rate}{still}{where}",
        )
    where = f" · {finding.location}: `{finding.location.source}`" if finding.location is not None and finding.location.source else ""
    rows = [("fix", finding.fix), ("waits", _chain(finding.chain, finding.waits, round(snapshot.still_s))), ("why", finding.reason)]
    verdict = f"{finding.state.capitalize()}: {finding.headline}{where}"
    return Page("hangwatch", _STATUS[finding.state], verdict, (*_facts(rows), *_table(finding.waits, finding.root)))


def _facts(rows: Sequence[tuple[str, str]]) -> list[Block]:
    told = tuple((name, text) for name, text in rows if text)
    return [Facts(told)] if told else []


def _chain(chain: Sequence[str], waits: Sequence[Wait], still_s: float) -> str:
    """``main thread -> worker 0 (batch 2, pid 4711) -> lock, acquired at In[3] line 7 · for 12 s``."""
    known = {one.who: one for one in waits}
    if not chain or chain[0] not in known or (len(chain) == 1 and known[chain[0]].kind in {"python", "gil", "native"}):
        return ""
    way = chain[:-1] if len(chain) > 1 and chain[-1] == chain[-2] else chain
    parts = [_called(way[0])]
    for before, who in pairwise(way):
        one = known.get(who)
        notes = [known[before].what if before in known else ""]
        notes += [f"pid {one.pid}"] if one is not None and one.pid != known[chain[0]].pid else []
        told = ", ".join(filter(None, notes))
        parts.append(f"{_called(who)} ({told})" if told else _called(who))
    last = known.get(way[-1])
    if last is not None and last.kind not in {"dead", "python"} and len(way) == len(set(way)):
        parts.append(_end(last))
    return f"{' -> '.join(filter(None, parts))} · for {duration(round(still_s))}"


def _called(who: str) -> str:
    return "main thread" if who == "main" else who


def _end(last: Wait) -> str:
    return f"{last.what}, acquired at {last.acquired}" if last.acquired is not None else last.what


def _table(waits: Sequence[Wait], root: Wait | None) -> list[Block]:
    if len(waits) < 2:  # noqa: PLR2004 - of one, the sentence above says it
        return []
    rows = [
        (
            one.who,
            _state(one),
            one.waits_for,
            None if one.location is None else f"{one.location}",
            "" if one.location is None else one.location.source,
        )
        for one in waits
    ]
    marked = frozenset(at for at, one in enumerate(waits) if root is not None and one.who == root.who)
    return [
        Table(
            "Where everybody stands",
            ("who", "what", "waits for", "where", "line"),
            rows,
            {"what": "prose", "line": "code"},
            marked,
            is_sequence=True,
        )
    ]


def _state(one: Wait) -> str:
    if one.kind == "dead":
        return one.what if not one.exit_code else f"{one.what} (exit code {one.exit_code})"
    return one.what or {"python": "computes", "native": "in native code", "gil": "holds the GIL"}.get(one.kind, one.kind)


def _stacks(waits: Sequence[Wait]) -> list[Block]:
    deep = [one for one in waits if len(one.stack) > 1][:_MOST_STACKS]
    return [Fold("Calls", tuple(_stack(one) for one in deep))] if deep else []


def _stack(one: Wait) -> Block:
    width = max(len(str(line)) for line in one.stack)
    return Code(tuple((number, f"{line!s:<{width}}  {line.source}") for number, line in enumerate(one.stack, 1)), title=one.who)


def _rate(report: HangReport) -> str:
    if report.rate is None or report.state == "finished":
        return ""
    left = f", {duration(report.remaining_s)} to the end of the loop" if report.remaining_s else ""
    return f"{report.rate:.3g} {report.rate_of}s per second{left}"


def _stopped(report: HangReport) -> str:
    many = report.stopped_count
    return f"{many} {'process' if many == 1 else 'processes'} of the cell ended with it" if many else ""
