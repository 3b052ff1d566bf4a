"""Runs cases in real kernels, several at a time, and compares what came out with the truth."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import stacks
from tests.kernel.kernels import Kernel, Ran

if TYPE_CHECKING:
    from tests.hang_cases.case import HangCase

__all__ = ["KERNELS", "Outcome", "compare", "run_all"]

KERNELS = 8
"""How many run beside each other at most: most of the time is waiting."""
CASES_A_KERNEL = 6
"""As many wait for each other before a further kernel is started, which costs as much as a case."""
LIMIT_S = 60.0
"""A cell that has not ended then is given up."""
PLAIN_STOP_S = 6.0
"""When Stop is pressed on a plain cell that would not end."""
PATIENCE_S = 2.0
"""What a cell started may end so much later."""

CLEAR = """
for _name in [name for name in globals() if not name.startswith("_") and name not in {"In", "Out", "get_ipython", "exit", "quit", "open"}]:
    del globals()[_name]
import gc, sys
sys.last_type = sys.last_value = sys.last_traceback = sys.last_exc = None
gc.collect()
"""
# The kernel leads a session of its own, in which whatever it starts stays, also when its parent has gone.
PEOPLE = """
def _people():
    import json, os, threading, psutil
    of_libraries = ("resource_tracker", "forkserver", "torch_shm_manager")
    processes = {}
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and os.getsid(process.pid) == os.getsid(0)
            if ours and not any(name in " ".join(process.cmdline()) for name in of_libraries):
                processes[str(process.pid)] = f"{process.name()} ({process.status()})"
        except (psutil.Error, ProcessLookupError, PermissionError):
            pass
    print(json.dumps({"processes": processes, "threads": sorted(thread.name for thread in threading.enumerate())}))
"""
PEOPLE_NOW = "_people()"


@dataclass
class Outcome:
    """What a run left behind."""

    case: HangCase
    stack: str
    ran: Ran = field(default_factory=Ran)
    report: dict[str, Any] | None = None
    left: dict[str, str] = field(default_factory=dict)
    """By what is wrong with it: children and threads of the kernel."""
    failure: str = ""
    """Why there is no report."""

    @property
    def differs(self) -> dict[str, str]:
        """What is not as the case says, by its name."""
        if self.failure:
            return {"failed": self.failure}
        return {**compare(self.case, self.report, self.ran), **self.left}

    @property
    def false_alarm(self) -> bool:
        return "stuck" not in self.case.state and (self.report or {}).get("state") == "stuck"


def compare(case: HangCase, report: dict[str, Any] | None, ran: Ran) -> dict[str, str]:
    """What the report, and the end of the cell, say otherwise than the case, by its name."""
    differs: dict[str, str] = {}

    def check(name: str, got: Any, right: bool, wanted: Any) -> None:
        if not right:
            differs[name] = f"{got!r}, not {wanted!r}"

    raises = case.raises.split("|") if case.raises else [""]
    check("raises", f"{ran.ename}: {ran.evalue}" if ran.ename else "", ran.ename in raises, case.raises or "nothing")
    if report is None:
        return {**differs, "report": "none"}
    location, root, waits = report["location"] or {}, report["root"] or {}, report["waits"]
    check("state", report["state"], report["state"] in case.state, case.state)
    check("cause", report["cause"], report["cause"] in case.cause, case.cause)
    if case.line is not None and report["state"] != "finished":
        found = (location.get("cell"), location.get("line"))
        check(
            "line", f"In[{found[0]}] line {found[1]}", found[0] == ran.count and found[1] in case.line, f"In[{ran.count}] line {case.line}"
        )
    if case.where and report["state"] != "finished":
        check("where", location.get("source", ""), case.where in location.get("source", ""), case.where)
    if case.root is not None:
        check("root", root.get("who"), root.get("who") in case.root.split("|"), case.root)
    if case.kind is not None:
        check("kind", root.get("kind"), root.get("kind") in case.kind, case.kind)
    edges = [(wait["who"], wait["waits_for"]) for wait in waits]
    check("edges", edges, all(edge in edges for edge in case.edges), case.edges)
    said = "\n".join([report["verdict"], report["fix"] or "", *(wait["what"] or "" for wait in waits)]).lower()
    unsaid = [text for text in case.says if not any(part.lower() in said for part in text.split("|"))]
    check("says", report["verdict"], not unsaid, tuple(unsaid))
    return differs


def run_all(cases: Collection[HangCase], stack: str, *, kernels: int = 0, magic: bool = True) -> Iterator[Outcome]:
    """The outcomes, in the order in which they come; without `magic`, the plain cells, each stopped by hand where it does not end."""
    kernels = kernels or min(KERNELS, 1 + len(cases) // CASES_A_KERNEL)
    here = threading.local()
    started: list[_Seat] = []

    def run(case: HangCase) -> Outcome:
        if not hasattr(here, "seat"):
            here.seat = _Seat(stack, magic=magic)
            started.append(here.seat)
        return here.seat.run(case)

    try:
        with ThreadPoolExecutor(kernels, thread_name_prefix=f"hang-{stack}") as pool:
            try:
                for done in as_completed([pool.submit(run, case) for case in cases]):
                    yield done.result()
            finally:
                pool.shutdown(cancel_futures=True)  # those that have not begun, where the test's time is up
    finally:
        for seat in started:
            seat.leave()


class _Seat:
    """A kernel after the other, each used until something is left in it."""

    def __init__(self, stack: str, *, magic: bool) -> None:
        self._stack, self._magic = stack, magic
        self._kernel: Kernel | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hang_", ignore_cleanup_errors=True)
        self._threads: list[str] = []

    def run(self, case: HangCase) -> Outcome:
        outcome = Outcome(case, self._stack)
        try:
            kernel = self._ready()
            self._run(kernel, case, outcome)
            _quiet(kernel, CLEAR)
            now = _people(kernel)
            clean = not now["processes"] and now["threads"] == self._threads and "set_num_threads" not in case.setup + case.cell
        except Exception as error:  # also a queue that stays empty: a kernel that does not answer
            outcome.failure = f"{type(error).__name__}: {error}"
            clean = False
        if not clean:
            self.close()
        return outcome

    def close(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.stop()

    def leave(self) -> None:
        self.close()
        self._folder.cleanup()

    def _ready(self) -> Kernel:
        if self._kernel is None:
            kernel = self._kernel = Kernel(stacks.python(self._stack), Path(self._folder.name))
            _let_it_ask(kernel)
            _quiet(kernel, PEOPLE)
            if self._magic:
                _quiet(kernel, "%load_ext torchdebug_magics")
                _quiet(kernel, "%%hangwatch -q\nNone")  # what it imports first is no part of a case's time
            self._threads = _people(kernel)["threads"]
        return self._kernel

    def _run(self, kernel: Kernel, case: HangCase, outcome: Outcome) -> None:
        if case.setup:
            _quiet(kernel, case.setup)
        before = _people(kernel)
        line = f"%%hangwatch -o h --after {case.after_s:g}" + (" --stop" if case.ends == "stop" else "")
        interrupt_s = case.interrupt_s if case.ends == "interrupt" else None
        if not self._magic:
            line = "# the plain cell"
            interrupt_s = interrupt_s or (PLAIN_STOP_S if case.ends == "stop" else None)
        outcome.ran = kernel.run(f"{line}\n{case.cell}", interrupt_s=interrupt_s, timeout_s=LIMIT_S)
        outcome.left = _left(case, before, kernel)
        if self._magic:
            outcome.report = json.loads(_quiet(kernel, "print(h.to_json(indent=None))"))


def _let_it_ask(kernel: Kernel) -> None:
    """As a front end does: a prompt waits for an answer, which nobody gives here."""
    execute = kernel.client.execute
    kernel.client.execute = lambda code, **options: execute(code, **{**options, "allow_stdin": True})


def _quiet(kernel: Kernel, code: str) -> str:
    ran = kernel.run(code, timeout_s=LIMIT_S)
    assert ran.status == "ok", ran.traceback
    return ran.stdout


def _people(kernel: Kernel) -> dict[str, Any]:
    people: dict[str, Any] = json.loads(_quiet(kernel, PEOPLE_NOW))
    return people


def _left(case: HangCase, before: dict[str, Any], kernel: Kernel) -> dict[str, str]:
    """A cell that fails by itself keeps what its traceback holds, such as the workers of a loader; any other leaves no process.

    The Stop button ends processes of earlier cells too, as the signal reaches them all; ``--stop`` must not.
    """
    excused = case.ends == "itself" and case.raises is not None
    new: dict[str, str] = {}
    now = before
    for _ in range(int(PATIENCE_S / 0.25)):
        now = _people(kernel)
        new = {pid: name for pid, name in now["processes"].items() if pid not in before["processes"]}
        if excused or not new:
            break
        threading.Event().wait(0.25)
    left = {}
    if new and not excused:
        left["children"] = f"left behind: {', '.join(f'{pid} {name}' for pid, name in new.items())}"
    if case.ends == "stop" and (gone := [pid for pid in before["processes"] if pid not in now["processes"]]):
        left["others"] = f"{len(gone)} processes of an earlier cell were ended"
    if ours := [name for name in now["threads"] if name.startswith("torchdebug-")]:
        left["threads"] = f"left behind: {', '.join(ours)}"
    return left
