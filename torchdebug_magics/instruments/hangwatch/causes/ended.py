"""What ended badly before the cell did, told when the cell has ended; and the exceptions that end threads meanwhile."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from torchdebug_magics.instruments.hangwatch.causes.deaths import error_fix, exit_fix, how_it_ended, last_line
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import ended, left_error
from torchdebug_magics.instruments.hangwatch.everybody.participants import Participant
from torchdebug_magics.instruments.hangwatch.report import HangFinding, State, Wait
from torchdebug_magics.instruments.hangwatch.waits.process_facts import error_record
from torchdebug_magics.probing.wrappers import unwrap_all, wrap
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.ranks.rank_traces import Child

_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_GLOO = re.compile(r"gloo.*?(\d+) vs\.? (\d+)", re.DOTALL)
_ASKED = {-signal.SIGTERM, -signal.SIGINT}
"""By which a launcher ends the other ranks."""
_MOST = 100


def explained(error: BaseException | None, children: Children, printed: str) -> HangFinding | None:
    """None where no process of the cell ended badly, or the error says all that is known."""
    failed = [child for child in children.started.values() if child.exit_code()]
    aborted = [child for child in failed if child.exit_code() == -signal.SIGABRT]
    if aborted and "gloo" in printed and (sizes := _GLOO.search(printed)) is not None:
        return _mismatch(aborted[0], children, int(sizes[1]), int(sizes[2]))
    match = _WORKER.search(str(error)) if error is not None else None
    if match is not None:
        dead = [child for word in match[1].split(",") if (child := children.started.get(int(word))) is not None]
        return _worker(dead[0], children) if dead else None
    return _rank([ended(child, children.folder) for child in failed], children)


def _rank(failed: list[Participant], children: Children) -> HangFinding | None:
    """The rank that ended first by itself: the others then lose the connection to it."""
    known = {one.pid: one.error["rank"] for one in failed if one.error and one.error.get("rank") is not None}
    if not known:
        return None
    killed = [one for one in failed if (one.exit_code or 0) < 0 and one.exit_code not in _ASKED]
    raised = sorted((one for one in failed if one.error), key=lambda one: float((one.error or {}).get("at_s", 0.0)))
    one = (killed or raised)[0]
    absent = sorted(set(range(len(children.started))) - {*known.values()})
    unknown = absent[0] if len(absent) == 1 else sorted(children.started).index(one.pid)
    one.who = f"rank {known.get(one.pid, unknown)}"
    fix = exit_fix(one.exit_code) if one.error is None else "fix the error in this rank: the others only lose their connection to it"
    return _ended(one, "rank_died", f"{one.who} {how_it_ended(one)}", fix)


def _worker(child: Child, children: Children) -> HangFinding:
    one = ended(child, children.folder, f"worker {sorted(children.started).index(child.pid)}")
    fix, reason = exit_fix(one.exit_code) if one.error is None else error_fix(one), ""
    if child.method != "fork" and one.exit_code == 1 and one.error is None:  # it could not be unpickled
        fix = 'move the Dataset into an importable module, or use `DataLoader(..., multiprocessing_context="fork")`'
        reason = f"a worker started with `{child.method}` imports the Dataset, and cannot import what is defined in a cell"
    return _ended(one, "worker_died", f"{one.name} {how_it_ended(one)}", fix, reason)


def _mismatch(child: Child, children: Children, first: int, second: int) -> HangFinding:
    left = (left_error(children.folder, pid) or {} for pid in children.started)
    record: dict[str, Any] = next((survivor for survivor in left if survivor.get("entries")), {})
    entry: dict[str, Any] = record["entries"][-1] if record else {}
    called = f"{entry['op']} #{entry['number']} with {entry['sizes'][0] if entry['sizes'] else 'no tensor'}" if entry else "the collective"
    one = replace(ended(child, children.folder), what="aborted", error=record or None)
    who = f"rank {record['rank']} calls {called}" if record.get("rank") is not None else "the ranks call it with different sizes"
    return _ended(
        one, "collective_mismatch", f"gloo aborted {one.who}, whose tensor has a different size: {who} ({first} and {second} bytes)",
        "use the same shape and dtype on every rank", "gloo aborts the process without an exception where sizes differ",
    )  # fmt: skip


def _ended(one: Participant, cause: str, headline: str, fix: str, reason: str = "") -> HangFinding:
    return about(one.as_wait(), "finished", cause, headline, fix, reason, location=last_line(one.error))


def about(root: Wait, state: State, cause: str | None, headline: str, fix: str = "", reason: str = "", **more: Any) -> HangFinding:
    """About somebody who is not part of a chain: the main thread while nobody else was asked, or a process that has ended."""
    more = {"location": root.location, "chain": ("main",) if root.who == "main" else (), **more}
    return HangFinding(state=state, cause=cause, headline=headline, fix=fix, reason=reason, root=root, waits=(root,), **more)


class ThreadErrors:
    """Open between `attach` and the end of the stack. A hook of the user's is called as before."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        """By the name of the thread: ``type``, ``message``, ``at_s``, ``frames``; no exception is held."""

    def attach(self, stack: ExitStack) -> None:
        """Note each from now on."""
        wrap(stack, self, threading, "excepthook", self._ended)

    def sweep(self) -> None:
        """Remove what an interrupt may have left."""
        unwrap_all(self)

    def _ended(self, original: Callable[[Any], Any], arguments: Any) -> Any:
        __tracebackhide__ = True
        with suppress(Exception):  # a message that cannot be made: what is printed of it comes all the same
            if arguments.thread is not None and isinstance(arguments.exc_value, Exception) and len(self.records) < _MOST:
                self.records[arguments.thread.name] = error_record(arguments.exc_value)
        return original(arguments)
