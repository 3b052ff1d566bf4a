"""Shows what hangs, the fix, the line and who waits for whom; while the cell runs, its state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torchdebug_magics.format import capitalised, duration, listed, plural
from torchdebug_magics.html.page import Block, Code, Facts, Fold, Note, Page, Table, quoted_span
from torchdebug_magics.instruments.hangwatch.report import STATUS, HangFinding, HangReport, LiveHang, Wait

_MOST_STACKS = 12


def page(report: HangReport) -> Page:
    """What hangs and the fix; the line; who waits for whom; then, folded, the calls of each and the rate."""
    many = report.stopped_count
    stopped = f"{plural(many, 'process', 'es')} started by the cell {'was' if many == 1 else 'were'} ended" if many else ""
    rate = f"{report.rate:.3g} steps per second" if report.rate is not None and report.state != "finished" else ""
    is_quick = report.state == "finished" and report.cause is None and report.waiting_for_data
    blocks: tuple[Block, ...] = (
        *(_rows(("data loading", report.waiting_for_data)) if is_quick else _facts(report, report.still_s)),
        *_excerpt(report),
        *(Note(problem, "warn") for problem in report.problems),
        *_table(report.waits, report.root),
        *_stacks(report.waits),
        *(Fold("Details: rate and processes", (details,)) for details in _rows(("rate", rate), ("processes", stopped))),
    )
    return Page("hangwatch", report.status, capitalised(report.title), blocks)


def live_page(snapshot: LiveHang) -> Page:
    """The state of the running cell, counted in whole seconds."""
    finding = snapshot.finding
    if finding is None:
        elapsed = f" for {duration(round(snapshot.elapsed_s))}" if snapshot.elapsed_s >= 1 else ""
        rate = f" · {snapshot.rate:.3g} steps per second" if snapshot.rate is not None else ""
        still = f" · no progress for {snapshot.still_s:.0f} s" if snapshot.still_s > 2 else ""  # noqa: PLR2004 - a step of a second is no pause
        where = f" · {snapshot.at.place}: `{snapshot.at.source}`" if snapshot.at is not None and snapshot.still_s > 1 else ""
        return Page("hangwatch", "busy", f"Running{elapsed}{rate}{still}{where}")
    blocks = (*_facts(finding, round(snapshot.still_s)), *_excerpt(finding), *_table(finding.waits, finding.root))
    return Page("hangwatch", STATUS[finding.state], capitalised(finding.title), blocks)


def _facts(report: HangFinding, still_s: float) -> list[Block]:
    is_circle = report.chain[-1:] and report.chain[-1] in report.chain[:-2]  # then the chain says what the reason would
    reasons = ("" if report.headline in report.title else report.headline, "" if is_circle else report.reason)
    waits = _chain(report.chain, report.waits, still_s)
    return _rows(("fix", report.fix), ("why", "; ".join(filter(None, reasons))), ("waits", waits))


def _rows(*rows: tuple[str, str]) -> list[Block]:
    shown = tuple(row for row in rows if row[1])
    return [Facts(shown)] if shown else []


def _excerpt(report: HangFinding) -> list[Block]:
    """The line of the root, and the one at which the lock was acquired that is waited for."""
    at, root = report.location, report.root
    if at is None or not at.source:
        return []
    lines, title, near = {at.line: at.source}, "", root.acquired if root is not None else None
    if near is not None and near.source and (near.cell, near.file) == (at.cell, at.file) and near.line != at.line:
        lines, title = {**lines, near.line: near.source}, f"line {near.line}: where the lock was acquired"
    what = root.what if root is not None else ""
    return [Code(tuple(sorted(lines.items())), at.line, title, quoted_span(at.source, f"`{what}` {report.headline}"))]


def _chain(chain: Sequence[str], waits: Sequence[Wait], still_s: float) -> str:
    """``main thread -> worker 0 (batch 2, pid 4711) -> lock, acquired at In[3] line 7 · for 12 s``."""
    known = {wait.who: wait for wait in waits}
    if not chain or chain[0] not in known or (len(chain) == 1 and known[chain[0]].kind in {"python", "gil", "native"}):
        return ""
    if len(chain) == 1 and known[chain[0]].acquired is None:
        return f"for {duration(round(still_s))}"  # the headline says for what
    way = chain[:-1] if len(chain) > 1 and chain[-1] == chain[-2] else chain
    parts = [_called(way[0])]
    for before, who in pairwise(way):
        pid = known[who].pid if who in known else known[chain[0]].pid
        notes = [known[before].what if before in known else "", f"pid {pid}" if pid != known[chain[0]].pid else ""]
        parts.append(f"{_called(who)} ({', '.join(filter(None, notes))})" if any(notes) else _called(who))
    last = known.get(way[-1])
    if last is not None and last.kind not in {"dead", "python"} and len(way) == len(set(way)):
        parts.append(f"{last.what}, acquired at {last.acquired}" if last.acquired is not None else last.what)
    return f"{' -> '.join(filter(None, parts))} · for {duration(round(still_s))}"


def _called(who: str) -> str:
    return "main thread" if who == "main" else who


def _table(waits: Sequence[Wait], root: Wait | None) -> list[Block]:
    if len(waits) < 2:  # noqa: PLR2004 - of one, the sentence above says it
        return []
    places = [("", "") if wait.location is None else (str(wait.location), wait.location.source) for wait in waits]
    rows = [(one.who, _state(one), one.waits_for, where or None, line) for one, (where, line) in zip(waits, places, strict=True)]
    marked = frozenset(at for at, one in enumerate(waits) if root is not None and one.who == root.who)
    columns = ("who", "state", "waits for", "where", "line")
    return [Table("Who waits for whom", columns, rows, {"state": "prose", "line": "code"}, marked, is_sequence=True)]


def _state(one: Wait) -> str:
    if one.kind == "dead":
        return one.what if not one.exit_code else f"{one.what} (exit code {one.exit_code})"
    return one.what or {"python": "computes", "native": "in native code", "gil": "holds the GIL"}.get(one.kind, one.kind)


def _stacks(waits: Sequence[Wait]) -> list[Block]:
    deep = [wait for wait in waits if len(wait.stack) > 1][:_MOST_STACKS]
    blocks = []
    for one in deep:
        width = max(len(str(line)) for line in one.stack)
        blocks.append(Code(tuple((at, f"{line!s:<{width}}  {line.source}") for at, line in enumerate(one.stack, 1)), title=one.who))
    return [Fold(f"Calls of {listed([_called(one.who) for one in deep])}", tuple(blocks))] if deep else []
