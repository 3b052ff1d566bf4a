"""The thread that watches: cheap looks at the main thread, looks at everybody when it stands still, and the way out."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from torchdebug_magics.format import duration
from torchdebug_magics.instruments.hangwatch.causes.deaths import error_fix, exit_fix, how_it_ended, last_line
from torchdebug_magics.instruments.hangwatch.causes.judge import debugger_now, judged
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import OthersProgress, ended, left_error, link, look_around
from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant
from torchdebug_magics.instruments.hangwatch.getting_out import GettingOut
from torchdebug_magics.instruments.hangwatch.main_thread.endless import Rounds, endless_loop, is_alone
from torchdebug_magics.instruments.hangwatch.main_thread.loop_rate import OutputMeter, StandingPlace, installed_tracer, loop_progress
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Pace, Progress
from torchdebug_magics.instruments.hangwatch.report import HangFinding, LiveHang, State, Wait
from torchdebug_magics.instruments.hangwatch.waits.collectives import error_record
from torchdebug_magics.machine.process_state import main_thread_ran_s
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import locate, running_shell
from torchdebug_magics.probing.wrappers import unwrap_all, wrap
from torchdebug_magics.ranks.agent import record_of_error
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.ranks.rank_session import folder_here
from torchdebug_magics.ranks.rank_traces import Child
from torchdebug_magics.report import Location, located

_AROUND_EVERY_S = 0.2
_REST_S = 1.0
"""Of the main thread at one instruction, after which the others are asked whether one has stopped in a debugger."""
_LEAST_LOOKS, _LEAST_S = 3, 0.5
"""By which nothing has moved."""
_LATE_S = 1.0  # of a look, when no Python thread gets a turn
_BUSY, _LOOP_EVERY = 0.5, 4
_WORST = {"slow": 1, "stuck": 2}
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_GLOO = re.compile(r"gloo.*?(\d+) vs\.? (\d+)", re.DOTALL)
_ASKED = {-signal.SIGTERM, -signal.SIGINT}
"""By which a launcher ends the other ranks."""
_MOST = 100


class Watcher:
    """All that the sampler's thread does; the main thread only reads it."""

    def __init__(self, after_s: float, children: Children, output: OutputMeter, guard: Guard, *, stops: bool) -> None:
        self.after_s = after_s
        self.getting_out = GettingOut(children, stops=stops)
        self.progress = Progress()
        self.finding: HangFinding | None = None
        """The worst so far, at its latest."""
        self.place = StandingPlace()
        self._suspected: tuple[object, ...] | None = None
        """What the last look said: a wait that has just ended looks like one until its thread has the GIL, or has left the line."""
        self._found_s = 0.0
        """When it was last found to be stuck."""
        self._is_over = False
        self._is_looping = False
        """At the last look, in a loop that does not end."""
        self.thread_errors = ThreadErrors()
        self._children = children
        self._output = output
        self._guard = guard
        self._looks: deque[Look] = deque(maxlen=6)
        self._around_s = 0.0
        self._looked_s = 0.0
        self._cpu_s = 0.0
        self._loop = Pace()
        self._to_go: int | None = None
        """Iterations to the end of that loop."""
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._old_threads: set[int | None] = set()
        self._others = OthersProgress()
        self._ranks: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        """Between the beginning and the end, or now."""
        return (self._ended_s if self._ended_s is not None else time.monotonic()) - self._began_s

    def begin(self) -> None:
        """From now on; in the main thread."""
        self._began_s = self._looked_s = self.progress.last_s = self.progress.rested_s = self.progress.new_line_s = time.monotonic()
        self._old_threads = {thread.ident for thread in threading.enumerate() if thread is not threading.main_thread()}
        self._cpu_s = main_thread_ran_s()

    def end(self) -> None:
        """No more; in the main thread, when the sampler has stopped."""
        self._is_over = True
        self.progress.rounds = Rounds()
        self.getting_out.presses.look()
        self._ended_s = time.monotonic()
        late_s = self._ended_s - self._looked_s
        if late_s > self.after_s:
            self._was_held(late_s, None)
        if not self.progress.is_idle and self.progress.looks:
            self.progress.passed(self._ended_s - self.progress.last_s)
        if self.finding is None and self.progress.longest_s >= self.after_s:
            waited = self.place.hint or "the main thread computed without a step or output"
            root = _main(self.place.longest_at, self.place.kind, self.place.what)
            self.finding = _about(root, "slow", None, f"{waited} for {duration(self.progress.longest_s)}")

    def look(self) -> None:
        """Every quarter of a second."""
        now_s = time.monotonic()
        late_s = now_s - self._looked_s
        self.getting_out.presses.look()
        self._children.note_ends()
        self.progress.written = self._output.written
        frame = self._guard.run("a look at the main thread", self.progress.look)
        self._guard.run("a look at the line", self.place.look, frame, self.progress, self.after_s)
        if late_s > _LATE_S:
            self._was_held(late_s, frame)
        self._cpu_s = main_thread_ran_s()
        if self.progress.looks % _LOOP_EVERY == 0:
            self._guard.run("counting the iterations", self._count, frame, now_s)
        self._guard.run("a look at the graph", self._look_at_graph, now_s)
        self._guard.run("a look at everybody", self._look_closer, frame, now_s)
        del frame  # it holds the user's variables
        if self.progress.is_idle:
            self._found_s, self._suspected = 0.0, None
            self.thread_errors.records.clear()
            self._guard.run("the end of a cell", self.getting_out.between_cells)
        elif not self._is_over:
            self._guard.run("ending the cell", self.getting_out.look, self.progress, self._found_s, now_s)
        self._looked_s = time.monotonic()

    def live(self) -> LiveHang:
        """For the live view, from any thread."""
        still_s = self.progress.still_s
        shown = self.finding if still_s >= self.after_s or self._is_looping else None
        rate, rate_of, _ = self.rate()
        return LiveHang(elapsed_s=self.elapsed_s, still_s=still_s, finding=shown, rate=rate, rate_of=rate_of, at=self.place.at)

    def rate(self) -> tuple[float | None, str, float | None]:
        """(per second, of what, seconds to the end of the loop)."""
        steps, loops = self.progress.pace.per_s(), self._loop.per_s()
        left_s = self._to_go / loops if loops and self._to_go is not None else None
        return (loops, "iteration", left_s) if steps is None and loops is not None else (steps, "step", left_s)

    def _count(self, frame: FrameType | None, now_s: float) -> None:
        """Note how far the loop around a frame has come."""
        if (found := loop_progress(frame)) is not None:
            count, bound = found
            self._loop.add(now_s, count)
            self._to_go = None if bound is None else bound - count

    def explain(self, error: BaseException | None) -> None:
        """The cell has ended, and a process of its own may have ended badly before it."""
        found = self._guard.run("explaining the end", explained, error, self._children, self._output.tail)
        if found is not None and (self.finding is None or self.finding.state != "stuck"):
            where = found.location or last_line(None if error is None else record_of_error(error))
            self.finding = replace(found, location=where, state="finished" if self.finding is None else self.finding.state)

    def _look_closer(self, frame: FrameType | None, now_s: float) -> None:
        progress = self.progress
        still_s = progress.still_s
        if progress.is_idle and not self._children.started:
            self._looks.clear()
            return
        lines_s = now_s - progress.new_line_s
        looped = self._looped(frame, lines_s, now_s) if lines_s >= self.after_s else None
        self._is_looping = looped is not None
        if looped is not None:
            self._looks.clear()
            self._found(looped)
            return
        look = self._look_around() if self._is_time(now_s, still_s) else None
        if look is None:
            return
        self._around_s = now_s
        progress.went_on(self._others.last_s(look))
        if self._looks and self._looks[-1].at_s < progress.last_s:
            self._looks.clear()
            self._suspected = None
        self._looks.append(look)
        if (found := debugger_now(look, progress)) is not None:
            self._found(found)
        elif still_s >= self.after_s and len(self._looks) >= _LEAST_LOOKS and look.at_s - self._looks[0].at_s >= _LEAST_S:
            self._judge(frame, still_s)
        elif look.main.facts.get("is_waiting"):
            self.place.hint = f"the main thread waited for {look.main.a_what}"

    def _look_at_graph(self, now_s: float) -> None:
        """A backward pass that goes through the graphs of earlier steps is told of before it takes too long."""
        passes = self.progress.passes
        is_told = self.finding is not None and (self.finding.state == "stuck" or self.finding.cause == "growing_graph")
        if passes.carrier is not None and passes.began_s and not is_told and (look := self._look_around()) is not None:
            self._found(judged([look], self.progress, now_s - passes.began_s, Counter()))

    def _is_time(self, now_s: float, still_s: float) -> bool:
        """For a look at everybody: twice a second without progress; with children, once a second while the main thread rests."""
        if still_s >= self.after_s:
            return now_s - self._around_s >= _AROUND_EVERY_S
        rests = now_s - self.progress.rested_s >= _REST_S and bool(self._children.started)
        return rests and now_s - self._around_s >= _REST_S

    def _look_around(self) -> Look | None:
        """Not in the middle of a fork, which would copy what is locked meanwhile."""
        if not self._children.fork_lock.acquire(timeout=0.2):
            return None
        try:
            look = look_around(self._children)
        finally:
            self._children.fork_lock.release()
        link(look, self._ranks)
        look.thread_errors = dict(self.thread_errors.records)
        for one in look.everybody.values():
            one.is_old = one.ident in self._old_threads and one.pid == os.getpid()
        return look

    def _judge(self, frame: FrameType | None, still_s: float) -> None:
        progress = self.progress
        progress.tracer = installed_tracer(frame)
        found = judged(list(self._looks), progress, still_s, Counter(progress.doing))
        said = (found.cause,) if found.state == "stuck" else (found.cause, found.location)
        before, self._suspected = self._suspected, said
        is_news = self.finding is None or (self.finding.cause is None and found.cause is not None)
        if said == before or (found.state == "slow" and is_news):
            self._found(found)
        elif self.finding is not None and self.finding.state == found.state:
            self._found(replace(self.finding, since_s=found.since_s))

    def _looped(self, frame: FrameType | None, lines_s: float, now_s: float) -> HangFinding | None:
        """A loop that does not end; None where there is none, or it has been interrupted meanwhile."""
        endless = endless_loop(frame, alone=(alone := is_alone()))
        alone = alone and not self._children.started
        if endless is None and (going := self.progress.rounds.longer_than(self.after_s, now_s, alone=alone)) is not None:
            where, headline, still = going
            fix = "check before the loop that this can happen, or bound the number of rounds"
            why = f"unchanged meanwhile: {still}" if still else ""
            return _about(_main(where, "python", "while"), "slow", "infinite_loop", headline, fix, why, since_s=lines_s)
        main = look_around(Children()).main.as_wait() if endless is not None else None
        if endless is None or main is None or main.location is None:
            return None
        line, condition = endless
        why, fix = "the loop does not change its condition", "update a variable of the condition inside the loop, or `break`"
        if condition == "True":
            why, fix = "no `break` or `return` can be reached", "leave the loop with `break` or `return`"
        root = replace(main, kind="python", waits_for=None, what=f"while {condition}")
        return _about(root, "stuck", "infinite_loop", f"`while {condition}:` on line {line} never ends: {why}", fix, since_s=lines_s)

    def _found(self, finding: HangFinding | None) -> None:
        if finding is None:
            return
        is_stuck = finding.state == "stuck"
        self._found_s = time.monotonic() if is_stuck else self._found_s
        with self._lock:
            now = self.finding
            if now is not None and _WORST[finding.state] < _WORST[now.state]:
                return
            if is_stuck and (now is None or now.state != "stuck") and running_shell() is None and not folder_here():
                # In a script nobody shows the report while it hangs; of ranks, their launcher writes what is true of all.
                fix = f"fix: {finding.fix}\n" if finding.fix else ""
                sys.stderr.write(f"hangwatch: Stuck: {located(finding.headline, finding.location)}\n{fix}")
            keeps_name = now is not None and now.state == finding.state and finding.cause is None and now.cause is not None
            self.finding = replace(now, since_s=finding.since_s) if now is not None and keeps_name else finding

    def _was_held(self, late_s: float, frame: FrameType | None) -> None:
        """No look was possible for so long: a call held the GIL, if this process computed or nothing else explains it."""
        self.progress.passed(late_s)
        if late_s < self.after_s or (main_thread_ran_s() - self._cpu_s) / late_s < _BUSY:
            return
        root = _main(locate(frame) if frame is not None else self.place.latest, "gil", "one call that holds the GIL")
        headline = f"one call held the GIL for {late_s:.0f} s: no other Python thread could run"
        why = "live views, other threads and Stop wait until the call returns"
        fix = "call it less often, on smaller data, or in a separate process"
        self._found(_about(root, "slow", "gil_held", headline, fix, why, since_s=late_s))


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
    return _about(one.as_wait(), "finished", cause, headline, fix, reason, location=last_line(one.error))


def _about(root: Wait, state: State, cause: str | None, headline: str, fix: str = "", reason: str = "", **more: Any) -> HangFinding:
    """About somebody who is not part of a chain: the main thread while nobody else was asked, or a process that has ended."""
    more = {"location": root.location, "chain": ("main",) if root.who == "main" else (), **more}
    return HangFinding(state=state, cause=cause, headline=headline, fix=fix, reason=reason, root=root, waits=(root,), **more)


def _main(where: Location | None, kind: str, what: str) -> Wait:
    return Wait(who="main", pid=os.getpid(), location=where, kind=kind, waits_for=None, what=what)


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
