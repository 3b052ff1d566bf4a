"""Who watches: a thread beside a cell, by cheap looks, and at everybody when it stands still; or, from outside, who watches a command."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torchdebug_magics.format import duration
from torchdebug_magics.instruments.hangwatch.causes.deaths import ThreadErrors, about, explained
from torchdebug_magics.instruments.hangwatch.causes.judge import debugger_now, judged
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import OthersProgress, link, look_around
from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, with_article
from torchdebug_magics.instruments.hangwatch.getting_out import GettingOut, end_processes
from torchdebug_magics.instruments.hangwatch.main_thread.endless import Rounds, endless_loop, is_alone
from torchdebug_magics.instruments.hangwatch.main_thread.progress import OutputMeter, Progress, installed_tracer
from torchdebug_magics.instruments.hangwatch.report import HangFinding, HangReport, LiveHang, State, Wait
from torchdebug_magics.instruments.hangwatch.waits.thread_waits import wait_of
from torchdebug_magics.machine.process_state import main_thread_ran_s, process_state, waited_for_core_s
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import adopt_timed, frames_above, locate, running_shell, user_calls
from torchdebug_magics.ranks.agent import Agent
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.ranks.rank_session import folder_here
from torchdebug_magics.report import Location, located

_AROUND_EVERY_S = 0.2
_REST_S = 1.0
"""Of the main thread at one instruction, after which the others are asked whether one has stopped in a debugger."""
_LEAST_LOOKS, _LEAST_S = 3, 0.5
"""By which nothing has moved."""
_ALMOST, _LOOK_S = 0.7, 0.25
_LATE_S = 1.0  # of a look, when no Python thread gets a turn
_BUSY = 0.5
_WORST = {"finished": 0, "slow": 1, "stuck": 2}
_OUTSIDE_S = 0.5
"""Between two looks at the processes of a command."""
_ON_ERROR = "torchdebug_magics.instruments.hangwatch.waits.process_facts:error_facts"
_FOLDER, _REFUSAL = "TORCHDEBUG_AGENTS", "TORCHDEBUG_ON_ERROR"
_NAME = "sitecustomize"
# A process of the user's must start, whatever our agent does; one that does not answer is shown as a process without an agent.
_TEXT = f"""import contextlib
with contextlib.suppress(Exception):
    from {__name__} import begin
    begin(__file__)
"""


class Standing(NamedTuple):
    """How the cell stands after a look."""

    finding: HangFinding | None = None
    """The worst so far, at its latest."""
    suspected: tuple[object, ...] | None = None
    """What the last look said: a wait that has just ended looks like one until its thread has the GIL, or has left the line."""
    stuck_s: float = 0.0
    """When it was last found to be stuck; 0 for a cell that was not."""
    is_looping: bool = False
    """Whether it is in a loop that does not end."""

    @property
    def state(self) -> State:
        """Of the worst so far."""
        return "finished" if self.finding is None else self.finding.state

    def after(self, found: HangFinding) -> Standing:
        """With one more finding; a name of a cause is kept where the same state is found without one."""
        before = self.finding
        stuck_s = time.monotonic() if found.state == "stuck" else self.stuck_s
        if before is not None and _WORST[found.state] < _WORST[before.state]:
            found = before
        elif before is not None and before.state == found.state and found.cause is None and before.cause is not None:
            found = replace(before, since_s=found.since_s)
        return self._replace(finding=found, stuck_s=stuck_s)


class Watcher:
    """All that the sampler's thread does; the main thread only reads it."""

    def __init__(self, after_s: float, children: Children, output: OutputMeter, guard: Guard, *, stops: bool) -> None:
        self.after_s = after_s
        self.getting_out = GettingOut(children, stops=stops)
        self.progress = Progress()
        self.standing = Standing()
        self.at: Location | None = None
        """Where the main thread has rested last."""
        self.hint = ""
        """What a cell that was stopped early was waiting for."""
        self._latest: Location | None = None
        """The last line at which the main thread was seen."""
        self._longest: tuple[Location | None, str, str] = (None, "python", "")
        """Where it has rested for long, and how it waits there, for what."""
        self.thread_errors = ThreadErrors()
        self._children = children
        self._output = output
        self._guard = guard
        self._looks: deque[Look] = deque(maxlen=6)
        self._around_s = self._looked_s = self._cpu_s = 0.0
        self._starved: dict[int, float] = {}
        """By process: how long its main thread has been ready to run, and had no core."""
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._old_threads: set[int | None] = set()
        self._others = OthersProgress()
        self._ranks: dict[int, int] = {}

    @property
    def elapsed_s(self) -> float:
        """Between the beginning and the end, or now."""
        return (self._ended_s if self._ended_s is not None else time.monotonic()) - self._began_s

    def begin(self) -> None:
        """From now on; in the main thread."""
        self._began_s = self._looked_s = self.progress.last_s = self.progress.rested_s = self.progress.new_line_s = time.monotonic()
        self._old_threads = {thread.ident for thread in threading.enumerate() if thread is not threading.main_thread()}
        self._cpu_s = main_thread_ran_s()

    def end(self, error: BaseException | None, at: Location | None, *, is_stopped: bool) -> None:
        """No more; in the main thread, when the sampler has stopped. A process may have ended badly before the cell, `at` a line of it."""
        self._ended_s = time.monotonic()
        self.progress.rounds = Rounds()
        self.getting_out.presses.look()
        late_s = self._late_s(self._ended_s)
        if late_s > self.after_s:
            self._was_held(late_s)
        if not self.progress.is_idle and self.progress.looks_at:
            self.progress.passed(self._ended_s - self.progress.last_s - self.progress.starved_s)
        if self.standing.finding is None and self.progress.longest_s >= self.after_s:
            waited = self.hint or "the main thread computed without a step or output"
            self._found(about(_main(*self._longest), "slow", None, f"{waited} for {duration(self.progress.longest_s)}"))
        found = None if is_stopped else self._guard.run("explaining the end", explained, error, self._children, self._output.tail)
        if found is not None and self.standing.state != "stuck":
            self.standing = self.standing._replace(finding=replace(found, location=found.location or at, state=self.standing.state))

    def look(self) -> None:
        """Every quarter of a second."""
        now_s = time.monotonic()
        self.progress.written = self._output.written
        frame = self._guard.run("a look at the main thread", self.progress.look)  # first: what follows reads files, and lets it go on
        self._guard.run("a look at the line", self._look_at_line, frame)
        late_s = self._late_s(now_s)
        self.getting_out.presses.look()
        self._children.note_ends()
        if late_s > _LATE_S:
            self._was_held(late_s)
        self._cpu_s = main_thread_ran_s()
        self._guard.run("a look at the graph", self._look_at_graph, now_s)
        self._guard.run("a look at everybody", self._look_closer, frame, now_s)
        del frame  # it holds the user's variables
        if self.progress.is_idle:
            self.standing = self.standing._replace(suspected=None, stuck_s=0.0)
            self.thread_errors.records.clear()
            self._guard.run("the end of a cell", self.getting_out.between_cells)
        elif self._ended_s is None:
            self._guard.run("ending the cell", self.getting_out.look, self.progress, self.standing.stuck_s, now_s)
        self._looked_s = time.monotonic()

    def _late_s(self, now_s: float) -> float:
        """The time since the last look; that in which someone had no core says nothing of the cell."""
        pids = [os.getpid(), *(pid for pid, child in tuple(self._children.started.items()) if child.seen_exit_code is None)]
        before, self._starved = self._starved, {pid: waited_for_core_s(pid, None) for pid in pids}
        starved_s = max((starved_s - before[pid] for pid, starved_s in self._starved.items() if pid in before), default=0.0)
        starved_s = min(max(starved_s, 0.0), now_s - self._looked_s)
        self.progress.starved_s += starved_s
        return now_s - self._looked_s - starved_s

    def live(self) -> LiveHang:
        """For the live view, from any thread."""
        still_s, standing = self.progress.still_s, self.standing
        shown = standing.finding if still_s >= self.after_s or standing.is_looping else None
        return LiveHang(elapsed_s=self.elapsed_s, still_s=still_s, finding=shown, rate=self.progress.rate, at=self.at)

    def _look_at_line(self, frame: FrameType | None) -> None:
        """For the live view, and for a cell that ends before anybody was asked: `frame` is the innermost of the user's code."""
        if frame is None:
            return
        adopt_timed([frame])
        still_s, self._latest = self.progress.still_s, locate(frame)
        if still_s > _REST_S:
            self.at = self._latest
        if still_s > _ALMOST * max(self.after_s, self.progress.longest_s - _LOOK_S):
            waiting = wait_of([*frames_above(sys._current_frames().get(threading.main_thread().ident or 0))])
            kind, what = (waiting.kind, waiting.what) if waiting is not None else ("python", "")
            self._longest = self._latest, kind, what
            waited = f"the main thread waited for {with_article(what)}" if kind != "python" else ""
            self.hint = f"the main thread slept in {what}" if kind == "sleep" else waited

    def _look_at_graph(self, now_s: float) -> None:
        """A backward pass that goes through the graphs of earlier steps is told of before it takes too long."""
        passes, before = self.progress.passes, self.standing.finding
        is_told = before is not None and (before.state == "stuck" or before.cause == "growing_graph")
        if passes.carrier is not None and passes.began_s and not is_told and (look := self._look_around()) is not None:
            self._found(judged([look], self.progress, now_s - passes.began_s))

    def _look_closer(self, frame: FrameType | None, now_s: float) -> None:
        progress = self.progress
        still_s = progress.still_s
        if progress.is_idle and not self._children.started:
            self._looks.clear()
            return
        looped = self._looped(frame, now_s)
        self.standing = self.standing._replace(is_looping=looped is not None)
        if looped is not None:
            self._looks.clear()
            self._found(looped)
            return
        # Several times a second without progress; with children, once a second while the main thread rests.
        every_s, rests = _AROUND_EVERY_S, still_s >= self.after_s
        if not rests:
            every_s, rests = _REST_S, now_s - progress.rested_s >= _REST_S and bool(self._children.started)
        look = self._look_around() if rests and now_s - self._around_s >= every_s else None
        if look is None:
            return
        self._around_s = now_s
        self._others.note(look)
        progress.went_on(self._others.last_s(look))
        if self._looks and self._looks[-1].at_s < progress.last_s:
            self._looks.clear()
            self.standing = self.standing._replace(suspected=None)
        self._looks.append(look)
        if (found := debugger_now(look, progress)) is not None:
            self._found(found)
        elif still_s >= self.after_s and len(self._looks) >= _LEAST_LOOKS and look.at_s - self._looks[0].at_s >= _LEAST_S:
            progress.tracer = installed_tracer(frame)
            self._suspect(judged(list(self._looks), progress, still_s))
        elif look.main.facts.get("is_waiting"):
            self.hint = f"the main thread waited for {look.main.a_what}"

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

    def _looped(self, frame: FrameType | None, now_s: float) -> HangFinding | None:
        """A loop that does not end; None where there is none, or it has been interrupted meanwhile."""
        lines_s = now_s - self.progress.new_line_s
        if frame is None or lines_s < self.after_s:
            return None
        alone = is_alone()
        found = endless_loop(frame, alone=alone)
        found = found or self.progress.rounds.longer_than(self.after_s, now_s, alone=alone and not self._children.started)
        if found is None:
            return None
        root = _main(found.location, "python", "while", tuple(user_calls(frame)))
        return replace(found, root=root, waits=(root,), chain=("main",), since_s=lines_s)

    def _suspect(self, found: HangFinding) -> None:
        """Keep what two looks say alike, or what names a cause for the first time."""
        said = (found.cause,) if found.state == "stuck" else (found.cause, found.location)
        before, suspected = self.standing.finding, self.standing.suspected
        self.standing = self.standing._replace(suspected=said)
        is_news = before is None or (before.cause is None and found.cause is not None)
        if said == suspected or (found.state == "slow" and is_news):
            self._found(found)
        elif before is not None and before.state == found.state:
            self._found(replace(before, since_s=found.since_s))

    def _found(self, finding: HangFinding) -> None:
        if finding.state == "stuck" and self.standing.state != "stuck" and running_shell() is None and not folder_here():
            # In a script nobody shows the report while it hangs; of ranks, their launcher writes what is true of all.
            fix = f"fix: {finding.fix}\n" if finding.fix else ""
            sys.stderr.write(f"hangwatch: Stuck: {located(finding.headline, finding.location)}\n{fix}")
        self.standing = self.standing.after(finding)

    def _was_held(self, late_s: float) -> None:
        """No look was possible for so long: a call held the GIL, if this process computed or nothing else explains it."""
        self.progress.passed(late_s)
        if late_s < self.after_s or (main_thread_ran_s() - self._cpu_s) / late_s < _BUSY:
            return
        root = _main(self._latest, "gil", "one call that holds the GIL")
        headline = f"one call held the GIL for {late_s:.0f} s: no other Python thread could run"
        why = "live views, other threads and Stop wait until the call returns"
        fix = "call it less often, on smaller data, or in a separate process"
        self._found(about(root, "slow", "gil_held", headline, fix, why, since_s=late_s))


def _main(location: Location | None, kind: str, what: str, stack: tuple[Location, ...] = ()) -> Wait:
    return Wait(who="main", pid=os.getpid(), location=location, kind=kind, waits_for=None, what=what, stack=stack)


class OutsideWatch:
    """Runs one command, and watches the processes that it starts."""

    def __init__(self, command: Sequence[str], after_s: float, *, stops: bool) -> None:
        self.exit_code = 0
        self._command = list(command)
        self._after_s = after_s
        self._stops = stops

    def reports(self) -> Iterator[HangReport]:
        """Run the command to its end; a report whenever its processes have made no progress, for a reason that was not told before."""
        with tempfile.TemporaryDirectory(prefix="tdm", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(self._command, env=environment_with_agents(folder, _ON_ERROR))  # noqa: S603 - the user's own command
            try:
                yield from self._watch(process, folder)
            except KeyboardInterrupt:
                end_processes([process.pid])
            finally:
                code = process.wait()
                self.exit_code = code if code >= 0 else 128 - code  # as a shell has it

    def _watch(self, process: subprocess.Popen[bytes], folder: str) -> Iterator[HangReport]:
        children = Children()
        children.folder = folder
        looks: deque[Look] = deque(maxlen=6)
        began_s = last_s = time.monotonic()
        told: set[str] = set()
        ranks: dict[int, int] = {}
        others = OthersProgress(any_code=True)
        while process.poll() is None:
            time.sleep(_OUTSIDE_S)
            look = look_around(children)
            link(look, ranks)
            if process.poll() is not None or not _begin_at_ranks(look):
                continue
            now_s = time.monotonic()
            if others.note(look):
                last_s = now_s
                looks.clear()
            looks.append(look)
            if now_s - last_s < self._after_s or len(looks) < _LEAST_LOOKS:
                continue
            finding = judged(list(looks), Progress(), now_s - last_s)
            if finding.headline not in told and not (finding.state == "slow" and told):
                told.add(finding.headline)
                yield self._report(finding, now_s - began_s)
            if self._stops and finding.state == "stuck":
                end_processes([process.pid])

    def _report(self, finding: HangFinding, elapsed_s: float) -> HangReport:
        finding = replace(finding, waits=finding.waits[1:], chain=finding.chain[1:])  # without this process, which only waits
        return HangReport(
            **vars(finding), still_s=finding.since_s, elapsed_s=elapsed_s, after_s=self._after_s,
            ended_by="--stop" if self._stops and finding.state == "stuck" else "itself",
        )  # fmt: skip


def _begin_at_ranks(look: Look) -> bool:
    """Let the chain go to the processes that do the work: one that has started another only waits. False where there are none."""
    main = look.main
    parents = {state.parent for one in look.everybody.values() if (state := process_state(one.pid)) is not None}
    workers = [one.who for one in look.everybody.values() if one is not main and one.is_main_thread and one.pid not in parents]
    main.kind, main.what, main.frames, main.targets = "join", "the command", [], workers
    main.facts = {"is_waiting": True}
    main.process = {**main.process, "rank": None, "collectives": None}
    return bool(workers)


def environment_with_agents(folder: str, on_error: str) -> Mapping[str, str]:
    """The variables for a command whose Python processes are to have agents; writes the `sitecustomize` into the folder."""
    Path(folder, f"{_NAME}.py").write_text(_TEXT, encoding="utf-8")
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"), package)))
    return {**os.environ, "PYTHONPATH": path, _FOLDER: folder, _REFUSAL: on_error}


def begin(file: str) -> None:
    """Start the agent of this process, then run the `sitecustomize` that it would have had; `file` is ours."""
    folder = os.environ.get(_FOLDER, "")
    if Path(folder).is_dir():
        agent = Agent(folder, os.environ.get(_REFUSAL, ""))
        vars(sys)["_torchdebug_agent"] = agent  # held for the life of the process
        with contextlib.suppress(OSError):
            agent.begin()
    path = [place for place in sys.path if Path(place or ".").resolve() != Path(file).parent.resolve()]
    spec = importlib.machinery.PathFinder.find_spec(_NAME, path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
