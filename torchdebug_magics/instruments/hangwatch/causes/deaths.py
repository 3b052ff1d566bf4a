"""What a cause is told by, and the first causes: a rank, a worker or a process has ended badly, during the cell or before its end."""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchdebug_magics.format import duration, listed, one_line, plural
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import ended, left_error
from torchdebug_magics.instruments.hangwatch.everybody.participants import Chain, Issued, Look, Participant
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.report import HangFinding, State, Wait
from torchdebug_magics.instruments.hangwatch.waits.process_facts import error_record
from torchdebug_magics.probing.source.syntax import covers, loops_around, tree_of
from torchdebug_magics.probing.source.user_code import location, owner
from torchdebug_magics.probing.wrappers import unwrap_all, wrap
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.ranks.rank_traces import Child
from torchdebug_magics.ranks.report import signal_name
from torchdebug_magics.report import Location

_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_REDUCTION = "Expected to have finished reduction"
_LONGEST = 90
_SIGNAL_FIXES = {
    "SIGKILL": "use fewer workers or smaller batches: the system most likely killed it because memory ran out",
    "SIGBUS": "raise the container's `--shm-size`, or use fewer workers: shared memory is full",
}
_USE_ALL = "pass `find_unused_parameters=True` to `DistributedDataParallel`, or use every parameter on every rank in each step"
_SAME_TENSORS = "use the same shape and dtype on every rank"
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_GLOO = re.compile(r"gloo.*?(\d+) vs\.? (\d+)", re.DOTALL)
_ASKED = {-signal.SIGTERM, -signal.SIGINT}
"""By which a launcher ends the other ranks."""
_MOST = 100


@dataclass
class Evidence:
    """Handed to each cause in turn; a cause looks at nothing else."""

    look: Look
    """The last one."""
    chain: Chain
    moved: dict[str, bool]
    progress: Progress
    still_s: float

    @property
    def main(self) -> Participant:
        """The thread whose cell is watched."""
        return self.look.main

    @property
    def root(self) -> Participant:
        """Whom the main thread waits for in the end."""
        return self.chain.root

    def found(
        self, cause: str | None, headline: str, fix: str = "", reason: str = "", at: Participant | None = None, state: State = "stuck"
    ) -> HangFinding:
        """A finding about `at`, or about the root; the line of one that runs no code of the user's is that of whoever waits for it."""
        whose, path = at or self.root, self.chain.path
        on_way = path[: path.index(whose)] if whose in path else path
        lines = (other.location for other in (whose, *reversed(on_way), self.main))
        waits = tuple(other.as_wait() for other in self.look.everybody.values() if other in path or other.is_shown)
        where: dict[str, Any] = {"location": next(filter(None, lines), None), "chain": self.chain.names, "since_s": self.still_s}
        return about(whose.as_wait(), state, cause, headline, fix, reason, waits=waits, **where)


Words: TypeAlias = str | Callable[[Evidence, Participant], str]
"""A text with ``{who}``, ``{what}`` and so on, or a function that makes it."""


@dataclass(frozen=True)
class Row:
    """A cause: when it applies to whom, and what is said then."""

    cause: str
    when: Callable[[Evidence, Participant], object]
    headline: Words
    fix: Words
    reason: Words = ""
    whom: Callable[[Evidence], Participant | None] = lambda case: case.root
    """Whom it is about; None where there is no such participant."""
    state: State = "stuck"

    def __call__(self, case: Evidence) -> HangFinding | None:
        """The finding; None where the cause does not apply."""
        participant = self.whom(case)
        if participant is None or not self.when(case, participant):
            return None
        calls, in_worker = participant.facts.get("calls"), participant.in_worker
        names = {
            "who": participant.name, "what": participant.what or participant.kind, "a_what": participant.a_what, "calls": calls,
            "in_call": f" in `{calls}`" if calls else "", "in_worker": in_worker, "still": duration(case.still_s), "main": case.main.name,
            "circle": " and ".join(listed([other.name for other in case.chain.circle]).rsplit(", ", 1)),
            "single": "`num_workers=0`" if in_worker else "a single process",
        }  # fmt: skip
        words = (self.headline, self.fix, self.reason)
        headline, fix, reason = (text.format(**names) if isinstance(text, str) else text(case, participant) for text in words)
        return case.found(self.cause, headline, fix, reason, participant, self.state)


Cause: TypeAlias = Callable[[Evidence], HangFinding | None]


def first(causes: Iterable[Cause], case: Evidence) -> HangFinding | None:
    """By the first cause that applies."""
    return next((found for cause in causes if (found := cause(case)) is not None), None)


def failed(case: Evidence) -> HangFinding | None:
    """The first participant that ended by an error, a signal or an exit code while the main thread waits, directly or not."""
    waiting = [rank for rank in case.look.ranks() if (rank.pending is not None or rank.kind == "collective") and rank.error is None]
    # The wait could be for one on the way, for a rank of the job, and for one that could have fed a queue that is waited for.
    for_any = case.root.kind in {"queue", "io", "event"} or any(one.facts.get("pool") for one in case.chain.path)
    gone = [one for one in case.look.everybody.values() if one.kind == "dead" and (one.exit_code or one.error)]
    dead = [one for one in gone if for_any or one in case.chain.path or one.who.startswith("rank ")]
    dead += [rank for rank in case.look.ranks() if rank.error is not None and waiting]  # it waits in a `finally:`
    if not dead or any(case.moved.get(one.who) for one in case.chain.path):
        return None
    first = min(dead, key=lambda one: (one.error is None, _ended_s(one)))
    if waiting:
        return _rank(case, first, f"{waiting[0].who} waits for it in {waiting[0].pending or waiting[0].what}")
    whose = next((one for one in reversed(case.chain.path) if one is not first), case.main)
    what = f"{first.name} {how_it_ended(first)}, and {whose.name} waits for {whose.what or 'it'}"
    return case.found("worker_died", what, _death_fix(first, "process"), at=first)


def how_it_ended(one: Participant) -> str:
    """``"raised ValueError: bad label"``, ``"was killed (SIGKILL)"``, ``"ended with exit code 3"``."""
    if one.error is not None:
        return f"raised {short_error(one.error)}"
    code = one.exit_code
    if code is not None and code < 0:
        return f"was killed by {signal_name(-code)}"
    return "has ended" if not code else f"ended with exit code {code}"


def _rank(case: Evidence, first: Participant, waits: str) -> HangFinding:
    message = (first.error or {}).get("message", "")
    if _REDUCTION in message:
        match, names = _UNUSED.search(message), (first.error or {}).get("parameters", [])
        places = [int(word) for word in match[1].split()] if match else []
        unused = listed([f"`{names[place]}`" for place in places if place < len(names)]) or "some parameters"
        return case.found("unused_parameters", f"{first.who} computed no gradient for {unused}, and {waits}", _USE_ALL, at=first)
    if first.exit_code == -signal.SIGABRT:
        what = f"{first.who} was aborted by gloo because its tensor has a different size, and {waits}"
        return case.found("collective_mismatch", what, _SAME_TENSORS, at=first)
    return case.found("rank_died", f"{first.who} {how_it_ended(first)}, and {waits}", _death_fix(first, "rank"), at=first)


def _death_fix(one: Participant, what: str) -> str:
    """What to change where a process, or a rank, has ended by an exception, an exit code or a signal."""
    if one.error is not None:
        is_absent = what == "process" and "Can't get attribute" in one.error["message"]
        move = "move what the process needs into an importable module, or use the `fork` method: code in a cell cannot be imported"
        return move if is_absent else f"fix the error in {'this' if what == 'rank' else 'the'} {what}"
    code = one.exit_code
    if code is None or code >= 0:
        return "raise an exception instead of calling `os._exit`, so that the waiting process sees it"
    return _SIGNAL_FIXES.get(signal_name(-code), "run its code in this process (`num_workers=0`) to see the crash")


def last_line(error: dict[str, Any] | None) -> Location | None:
    """The user's line that raised, of a recorded error."""
    frames = [tuple(frame) for frame in error["frames"] if owner(frame[0]) == "user" and not frame[0].startswith("<")] if error else []
    return location(*frames[-1]) if frames else None


def short_error(error: dict[str, str]) -> str:
    """``"ValueError: bad label"``."""
    text = one_line(error["message"]).strip()
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{error['type']}: {text}" if text else error["type"]


def differ(case: Evidence) -> HangFinding | None:
    """Told by the collectives that each rank has issued."""
    if (joining := next((one for one in case.chain.path if one.facts.get("op") == "init_process_group"), None)) is not None:
        return _not_joined(case, joining)
    waiting = [(rank, rank.pending) for rank in case.look.ranks() if rank.pending is not None and rank.kind == "collective"]
    if not waiting:
        return None
    group = next((call.group for one in case.chain.path for rank, call in waiting if rank is one), waiting[0][1].group)
    ahead, pending = max((pair for pair in waiting if pair[1].group == group), key=lambda pair: pair[1].number)
    gone = [who for who, one in case.look.everybody.items() if one.kind == "dead" and one.child is not None]
    late = [case.look.everybody[who] for who in dict.fromkeys([*ahead.targets, *gone])]  # or in another collective, see `link_ranks`
    others = [(rank, call) for rank in late if (call := rank.call(pending)) is not None]
    if not others and case.chain.circle:  # each waits for the other in another group
        others = [(rank, call) for rank, call in waiting if rank in late and call.group != group and rank.needs(ahead, call.group)]
    if others:
        return _mismatch(case, [(ahead, pending), *others])
    is_waited_for = case.root.kind == "collective" or case.chain.circle
    return next((_missing(case, ahead, pending, rank) for rank in late if case.root is rank or is_waited_for), None)


def _missing(case: Evidence, ahead: Participant, pending: Issued, one: Participant) -> HangFinding:
    now = how_it_ended(one) if one.kind == "dead" else f"is at {one.location}" if one.location is not None else "runs none of your code"
    at = one if one.location is not None else ahead
    if ahead.in_backward:
        return _left_training(case, ahead, pending, one, f"{one.who} {now}")
    line = f"; {ahead.who} calls it at {ahead.location}: `{ahead.location.source}`" if ahead.location is not None else ""
    return case.found(
        "collective_missing", f"{one.who} never called {pending}, in which {ahead.who} waits",
        f"call `{pending.op}` on every rank: move it out of the branch that only {ahead.who} takes", f"{one.who} {now}{line}", at=at,
    )  # fmt: skip


def _left_training(case: Evidence, ahead: Participant, pending: Issued, one: Participant, now: str) -> HangFinding:
    """A rank waits in backward for another that has left the step: with parameters that got no gradient, or out of batches."""
    at = one if one.location is not None else ahead
    if unused := listed([f"`{name}`" for name in one.process.get("unused_parameters") or ()]):
        what = f"{one.who} computed no gradient for {unused}; {ahead.who} waits in backward ({pending})"
        return case.found("unused_parameters", what, _USE_ALL, now, at=at)
    has_trained = any(call.is_done and call.key == pending.key and call.number != pending.number for call in one.issued)
    ours, theirs = ahead.location, one.location
    is_near = ours is not None and theirs is not None and (ours.file, ours.function) == (theirs.file, theirs.function)
    loops = loops_around(tree_of(ours.file), ours.line)[-1:] if ours is not None and is_near else []
    is_in_loop = any(theirs is not None and covers(loop, theirs.line) for loop in loops)  # then it has not run out of batches
    if one.kind != "dead" and (not has_trained or is_in_loop):
        return case.found(
            "collective_missing", f"{one.who} never called backward(), in which {ahead.who} waits ({pending})",
            "call forward and backward of the DistributedDataParallel model equally often on every rank", now, at=at,
        )  # fmt: skip
    return case.found(
        "uneven_batches", f"{one.who} has run out of batches, and {ahead.who} waits for it in backward ({pending})",
        "wrap the loop in `with model.join():`, or give every rank equally many batches (`DistributedSampler`, `drop_last=True`)",
        now, at=at,
    )  # fmt: skip


def _mismatch(case: Evidence, calls: list[tuple[Participant, Issued]]) -> HangFinding:
    keys = [(call.group, call.key) for _, call in calls]
    usual = Counter(keys).most_common(1)[0][0]
    at = next((at for at in reversed(range(len(calls))) if keys[at] != usual), len(calls) - 1)
    (odd, theirs), (other, ours) = calls[at], next(call for call, key in zip(calls, keys, strict=True) if key != keys[at])
    lines = "; ".join(f"{one.who}: {call} at {one.location}" for one, call in calls)
    if other.in_backward != odd.in_backward:
        ahead, behind, pending = (other, odd, ours) if other.in_backward else (odd, other, theirs)
        return _left_training(case, ahead, pending, behind, lines)
    is_same_group = theirs.group == ours.group
    groups = ["" if is_same_group else f" in process group {call.group}" for call in (theirs, ours)]
    said = f"{odd.who} calls {theirs}{groups[0]} where {other.who} calls {ours}{groups[1]}"
    fix = _SAME_TENSORS if ours.op == theirs.op and is_same_group else "issue collectives in the same order on every rank"
    return case.found("collective_mismatch", said, fix, lines, at=odd)


def _not_joined(case: Evidence, one: Participant) -> HangFinding:
    ranks = [other for other in case.look.everybody.values() if other.facts.get("op") == "init_process_group"]
    absent = [case.look.everybody[who] for who in one.targets if who in case.look.everybody]
    sizes = [size for rank in ranks if (size := rank.process.get("world_size")) is not None]
    said = f"{absent[0].name} never called it" if absent else f"only {plural(len(ranks), 'rank')} joined"
    return case.found(
        "collective_missing", f"{one.who} waits in init_process_group, and {said}",
        "start `world_size` processes, each with its own `rank` and the same `init_method`",
        f"world_size is {max(sizes)}" if sizes else one.what, at=absent[0] if absent and absent[0].location is not None else one,
    )  # fmt: skip


def explained(error: BaseException | None, children: Children, printed: str) -> HangFinding | None:
    """What ended badly before the cell did; None where no process of the cell did, or the error says all that is known."""
    failed = [ended(child, children.folder) for child in children.started.values() if child.exit_code()]
    aborted = next((one for one in failed if one.exit_code == -signal.SIGABRT), None)
    if aborted is not None and "gloo" in printed and (sizes := _GLOO.search(printed)) is not None:
        return _aborted(aborted, children, f"({sizes[1]} and {sizes[2]} bytes)")
    if (match := _WORKER.search(str(error)) if error is not None else None) is not None:
        dead = [child for word in match[1].split(",") if (child := children.started.get(int(word))) is not None]
        return _lost_worker(dead[0], children) if dead else None
    known = {one.pid: one.error["rank"] for one in failed if one.error and one.error.get("rank") is not None}
    if not known:
        return None
    # The rank that ended first by itself: the others then lose the connection to it.
    killed = [one for one in failed if (one.exit_code or 0) < 0 and one.exit_code not in _ASKED]
    one = (killed or sorted((one for one in failed if one.error), key=_ended_s))[0]
    absent = sorted(set(range(len(children.started))) - {*known.values()})
    one.who = f"rank {known.get(one.pid, absent[0] if len(absent) == 1 else sorted(children.started).index(one.pid))}"
    fix = _death_fix(one, "rank") + ("" if one.error is None else ": the others only lose their connection to it")
    return _ended(one, "rank_died", f"{one.who} {how_it_ended(one)}", fix)


def _ended_s(one: Participant) -> float:
    return float((one.error or {}).get("at_s", 0.0))


def _lost_worker(child: Child, children: Children) -> HangFinding:
    one = ended(child, children.folder, f"worker {sorted(children.started).index(child.pid)}")
    fix, reason = _death_fix(one, "process"), ""
    if child.method != "fork" and one.exit_code == 1 and one.error is None:  # it could not be unpickled
        fix = 'move the Dataset into an importable module, or use `DataLoader(..., multiprocessing_context="fork")`'
        reason = f"a worker started with `{child.method}` imports the Dataset, and cannot import what is defined in a cell"
    return _ended(one, "worker_died", f"{one.name} {how_it_ended(one)}", fix, reason)


def _aborted(one: Participant, children: Children, sizes: str) -> HangFinding:
    left = (left_error(children.folder, pid) or {} for pid in children.started)
    one.what, one.error = "aborted", next((survivor for survivor in left if survivor.get("entries")), None)
    called, survivor = "the ranks call it with different sizes", one.error or {}
    if survivor.get("rank") is not None:
        call = survivor["entries"][-1]
        called = f"rank {survivor['rank']} calls {call['op']} #{call['number']} with {(*call['sizes'], 'no tensor')[0]}"
    return _ended(
        one, "collective_mismatch", f"gloo aborted {one.who}, whose tensor has a different size: {called} {sizes}",
        _SAME_TENSORS, "gloo aborts the process without an exception where sizes differ",
    )  # fmt: skip


def _ended(one: Participant, cause: str, headline: str, fix: str, reason: str = "") -> HangFinding:
    return about(one.as_wait(), "finished", cause, headline, fix, reason, location=last_line(one.error))


def about(root: Wait, state: State, cause: str | None, headline: str, fix: str = "", reason: str = "", **more: Any) -> HangFinding:
    """A finding about somebody; by itself, of the main thread while nobody else was asked, or of a process that has ended."""
    more = {"location": root.location, "waits": (root,), "chain": ("main",) if root.who == "main" else (), **more}
    return HangFinding(state=state, cause=cause, headline=headline, fix=fix, reason=reason, root=root, **more)


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
