"""Looks at the running cell a few times a second, and at everybody once it makes no progress."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from torchdebug_magics.errors import refuse
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import link, look_around
from torchdebug_magics.instruments.hangwatch.everybody.participants import named
from torchdebug_magics.instruments.hangwatch.main_thread.progress import OutputMeter
from torchdebug_magics.instruments.hangwatch.report import HangFinding, HangReport, LiveHang
from torchdebug_magics.instruments.hangwatch.watcher import Watcher
from torchdebug_magics.machine.process_state import has_proc
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard, traceback_of
from torchdebug_magics.probing.source.user_code import raised_at
from torchdebug_magics.probing.wrappers import MARK
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.report import Location

_EVERY_S = 0.25


class HangProbe:
    """One cell, or all cells between ``on`` and ``off``."""

    def __init__(self, _: CellContext = SCRIPT, *, after: float = 10.0, stop: bool = False) -> None:
        refuse(not after > 0, f"--after must be a positive number of seconds such as 10, not {after:g}")
        self._guard = Guard()
        self._hooks = Hooks(self._guard)
        self._children = Children(on_error="torchdebug_magics.instruments.hangwatch.waits.process_facts:error_facts")
        self._output = OutputMeter()
        self._watcher = Watcher(float(after), self._children, self._output, self._guard, stops=stop)
        self._getting_out = self._watcher.getting_out
        self._sampler = Sampler(self._watcher.look, name="hangwatch", every_s=_EVERY_S)
        self._ended_by = "itself"
        self._stopped_count = 0
        self._ended_at: Location | None = None
        self._report: HangReport | None = None
        self._is_open = False
        self._pid = os.getpid()

    def options_in_rank(self) -> dict[str, object]:
        """Only the launcher stops: it sees all ranks, and one that stopped itself would look like the cause of the others' errors."""
        return {"after": self._watcher.after_s}

    def attach(self, stack: ExitStack) -> None:
        """Count steps and output, give processes that are started an agent, begin to look."""
        if not has_proc():
            self._guard.note("this system has no /proc: CPU time and waits of other processes are only partly known")
        self._children.attach(stack)
        self._output.attach(stack)
        self._watcher.thread_errors.attach(stack)
        self._hooks.optimizer_steps(stack, lambda *_: None, self._watcher.progress.step)
        self._getting_out.attach(stack)
        self._watcher.begin()
        self._is_open = True
        stack.push(self._left)  # called when the sampler has stopped, before the children's folder is removed
        stack.enter_context(self._sampler)

    def sweep(self) -> None:
        """Remove what an interrupt may have left."""
        self._sampler.stop()
        self._hooks.sweep()
        self._getting_out.presses.detach()
        self._output.detach()
        self._watcher.thread_errors.sweep()
        self._children.sweep()

    def live(self) -> object | None:
        """Where the cell stands."""
        return self._watcher.live() if self._is_open else None

    def live_of_ranks(self, own: LiveHang | None, rank: LiveHang) -> LiveHang | None:
        """The launcher's verdict, as it sees whom a rank waits for; the rank's pace and line, as the launcher itself only waits."""
        return None if own is None else replace(own, rate=rank.rate, at=rank.at)

    def standing(self) -> str:
        """In one line, for the kernel after this one; empty while all is well."""
        live = self._watcher.live() if self._is_open else None
        return "" if live is None else live.standing

    def traceback_of(self, error: BaseException) -> list[str]:
        """Of an interrupt that ended a cell that was stuck: the lines of the libraries in which it waited say nothing."""
        finding = self._watcher.standing.finding
        return traceback_of(error, finding.headline if finding is not None and finding.state == "stuck" else "")

    def kept(self) -> dict[str, object]:
        """Nothing: no name of the user's is changed."""
        return {}

    def report(self) -> HangReport:
        """As frozen when the session was left."""
        if self._report is None:
            self._report = self._frozen()
        return self._report

    def _left(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """The cell has ended; one that was stopped leaves no process behind."""
        if os.getpid() != self._pid:
            return  # a fork that leaves the block: the processes are its parent's
        self._is_open = False
        out = self._getting_out
        was_stopped = out.has_stopped or out.presses.at_s is not None  # another error may have come of Stop
        is_stopped = error is not None and (isinstance(error, KeyboardInterrupt) or was_stopped)
        self._ended_at = raised_at(error)
        self._watcher.end(error, self._ended_at, is_stopped=is_stopped)
        self._ended_by = "itself" if error is None else "error"
        if is_stopped:
            self._ended_by = "--stop" if out.has_stopped else "Stop"
            self._stopped_count = out.end_rest()

    def _frozen(self) -> HangReport:
        watch = self._watcher
        progress = watch.progress
        if self._sampler.failure is not None:
            self._guard.note(f"the watch stopped: {self._sampler.failure}")
        was_stopped = self._ended_by in {"Stop", "--stop"}
        finding = watch.standing.finding or HangFinding(
            state="interrupted" if was_stopped else "finished",
            cause=None,
            headline=watch.hint or "stopped while making progress",
            location=self._ended_at if was_stopped else None,
        )
        share = progress.looks_at["batch"] / progress.looks_at.total() if progress.looks_at["batch"] else None
        return HangReport(
            **vars(finding), still_s=round(progress.longest_s, 3), elapsed_s=round(watch.elapsed_s, 3), after_s=watch.after_s,
            rate=progress.rate,
            data_share=share, ended_by=self._ended_by,
            stopped_count=self._stopped_count, problems=tuple(self._guard.problems),
        )  # fmt: skip


watch = HangProbe


def look() -> None:
    """Print where each thread, worker, process and rank stands, and what it waits for; from any thread.

    Processes answer that were started while a `hangwatch` session is open; of others, the system's own words are printed.
    """
    watching: Any = getattr(BaseProcess.start, MARK, None)
    everybody = look_around(watching if isinstance(watching, Children) else Children())
    link(everybody, {})
    for one in everybody.everybody.values():
        if one.location is not None or one.process.get("pid") != one.pid or one.kind == "dead":
            where = f" · {one.location}: {one.location.source}" if one.location is not None else ""
            waits = f" waits for {one.what}" if one.facts.get("is_waiting") else f" {one.what or 'computes'}"
            whom = f" -> {', '.join(named(who) for who in one.targets)}" if one.targets else ""
            print(f"{one.name} (pid {one.pid}){waits}{whom}{where}")  # noqa: T201 - as it was asked to
