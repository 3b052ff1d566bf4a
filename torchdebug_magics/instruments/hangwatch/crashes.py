"""A cell that ends because one of its processes has: which one, how, and why."""

from __future__ import annotations

import re
import signal
import traceback
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.hangwatch.causes.deaths import error_fix, exit_fix, how_it_ended, last_line
from torchdebug_magics.instruments.hangwatch.everybody.participants import Participant
from torchdebug_magics.instruments.hangwatch.report import Finding
from torchdebug_magics.probing.children.asking import left_error
from torchdebug_magics.probing.source.code_owner import owner
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.probing.children.launching import Child, Children
    from torchdebug_magics.report import Location

__all__ = ["explained", "last_user_line"]

_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_GLOO = re.compile(r"gloo.*?(\d+) vs\.? (\d+)", re.DOTALL)
_ASKED = {-signal.SIGTERM, -signal.SIGINT}
"""By which a launcher ends the other ranks."""


def explained(error: BaseException | None, children: Children, printed: str) -> Finding | None:
    """None where no process of the cell ended badly, or the error says all that is known."""
    ended = [child for child in children.started.values() if child.exit_code()]
    aborted = [child for child in ended if child.exit_code() == -signal.SIGABRT]
    if aborted and "gloo" in printed and (sizes := _GLOO.search(printed)) is not None:
        return _mismatch(aborted[0], children, int(sizes[1]), int(sizes[2]))
    match = _WORKER.search(str(error)) if error is not None else None
    if match is not None:
        dead = [child for word in match[1].split(",") if (child := children.started.get(int(word))) is not None]
        return _worker(dead[0], children) if dead else None
    return _rank(ended, children)


def _rank(ended: list[Child], children: Children) -> Finding | None:
    """The rank that ended first by itself: the others then lose the connection to it."""
    records = {child.pid: left_error(children.folder, child.pid) for child in ended}
    if not any((record or {}).get("rank") is not None for record in records.values()):
        return None
    killed = [child for child in ended if (child.exit_code() or 0) < 0 and child.exit_code() not in _ASKED]
    raised = sorted((child for child in ended if records[child.pid]), key=lambda child: (records[child.pid] or {}).get("at_s", 0.0))
    child = (killed or raised)[0]
    record = records[child.pid]
    known = {(record or {}).get("rank") for record in records.values()}
    absent = sorted(set(range(len(children.started))) - known)
    number = (record or {}).get("rank")
    rank = number if number is not None else absent[0] if len(absent) == 1 else sorted(children.started).index(child.pid)
    one = Participant(f"rank {rank}", child.pid, kind="dead", what="ended", child=child, exit_code=child.exit_code(), error=record)
    fix = exit_fix(child.exit_code()) if record is None else "fix the error in this rank: the others only lose their connection to it"
    return _finding(one, "rank_died", f"rank {rank} {how_it_ended(one)}", fix, "", last_line(record))


def _worker(child: Child, children: Children) -> Finding:
    code, error = child.exit_code(), left_error(children.folder, child.pid)
    number = sorted(children.started).index(child.pid)
    one = Participant(f"worker {number}", child.pid, kind="dead", what="ended", child=child, exit_code=code, error=error)
    is_unpickled = child.method != "fork" and code == 1 and error is None
    fix = exit_fix(code) if error is None else error_fix(one)
    reason = ""
    if is_unpickled:
        fix = 'move the Dataset into an importable module, or use `DataLoader(..., multiprocessing_context="fork")`'
        reason = f"a worker started with `{child.method}` imports the Dataset, and cannot import what is defined in a cell"
    return _finding(one, "worker_died", f"DataLoader worker {number} {how_it_ended(one)}", fix, reason, last_line(error))


def _mismatch(child: Child, children: Children, first: int, second: int) -> Finding:
    left = (left_error(children.folder, pid) or {} for pid in children.started)
    record: dict[str, Any] = next((survivor for survivor in left if survivor.get("entries")), {})
    entry: dict[str, Any] = record["entries"][-1] if record else {}
    called = f"{entry['op']} #{entry['number']} with {entry['sizes'][0] if entry['sizes'] else 'no tensor'}" if entry else "the collective"
    one = Participant(f"process {child.name}", child.pid, kind="dead", what="aborted", child=child, exit_code=child.exit_code())
    who = f"rank {record['rank']} calls {called}" if record.get("rank") is not None else "the ranks call it with different sizes"
    return _finding(
        one, "collective_mismatch", f"gloo aborted {one.who}, whose tensor has a different size: {who} ({first} and {second} bytes)",
        "use the same shape and dtype on every rank", "gloo aborts the process without an exception where sizes differ",
        last_line(record or None),
    )  # fmt: skip


def _finding(one: Participant, cause: str, headline: str, fix: str, reason: str, line: Location | None) -> Finding:
    root = one.as_wait()
    return Finding(state="finished", cause=cause, headline=headline, fix=fix, reason=reason, location=line, root=root, waits=(root,))


def last_user_line(error: BaseException | None) -> Location | None:
    """The innermost line of the user's that an error came through."""
    walked = [] if error is None else [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next(
        (location(code.co_filename, line, code.co_name) for code, line in reversed(walked) if owner(code.co_filename) == "user"), None
    )
