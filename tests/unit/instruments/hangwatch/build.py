"""Processes and threads that are only told of: facts in the form in which a process answers."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.hangwatch.causes.judge import judged
from torchdebug_magics.instruments.hangwatch.everybody import looking_around
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import AgentError, link, look_around
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.waits.process_facts import facts_of_this_process
from torchdebug_magics.machine.process_state import ProcessState
from torchdebug_magics.ranks import rank_traces
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.ranks.rank_traces import Child

if TYPE_CHECKING:
    import pytest

    from torchdebug_magics.instruments.hangwatch.everybody.participants import Look
    from torchdebug_magics.instruments.hangwatch.report import HangFinding

__all__ = ["BACKWARD", "FILE", "US", "World", "backward", "facts", "issued", "thread", "waits"]

US = os.getpid()
FILE = "/home/me/train.py"
BACKWARD = (torch.autograd.graph.__file__, 7, "_engine_run_backward")


_REAL = facts_of_this_process()


def _nothing(told: dict[str, Any]) -> dict[str, Any]:
    """Whatever else a process tells of itself: none, or nothing."""
    return {key: type(value)() if isinstance(value, (list, dict, str)) else None for key, value in told.items()}


def waits(kind: str, what: str = "", on: tuple[tuple[str, int], ...] = (), timeout_s: float | None = None, **more: Any) -> dict[str, Any]:
    """What a thread waits for: `on` is who could end it."""
    return {"kind": kind, "what": what or kind, "targets": [*on], "able": [], "timeout_s": timeout_s, **more}


def thread(ident: int = 1, waiting: dict[str, Any] | None = None, *, name: str = "", line: int | None = 3, **more: Any) -> dict[str, Any]:
    """The first is the main thread."""
    return {
        **_nothing(_REAL["threads"][0]),
        "ident": ident,
        "name": name or ("MainThread" if ident == 1 else f"t{ident}"),
        "number": ident,
        "is_main": ident == 1,
        "shares": False,
        "frames": [] if line is None else [(FILE, line, "<module>")],
        "at": [line],
        "values": {},
        "calls": "",
        "waiting": waiting,
        **more,
    }


def facts(pid: int, *threads: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **_nothing(_REAL), "pid": pid, "name": f"Process-{pid}", "rank": None, "world_size": None, "worker": None, "torch_threads": 1,
        "threads": [*threads] or [thread()], "collectives": None, "unused_parameters": [], **more,
    }  # fmt: skip


def issued(*calls: tuple[str, list[int], bool], dtype: str = "Float") -> dict[str, Any]:
    """The collectives of a rank: (op, size, whether it is done), each."""
    entries = [
        {"group": "0", "number": number, "op": op, "sizes": [size], "dtypes": [dtype], "is_done": is_done, "is_p2p": False}
        for number, (op, size, is_done) in enumerate(calls, 1)
    ]
    return {"status": {"0": {"last_enqueued_collective": len(entries)}}, "entries": entries, "groups": {}}


def backward(*done: bool) -> dict[str, Any]:
    """All-reduces of gradients."""
    return issued(*(("all_reduce", [4], is_done) for is_done in done))


class World:
    """This process, and others that were started by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = facts(US, thread())
        self.others: dict[int, dict[str, Any] | None] = {}
        """None for one that cannot be asked."""
        self.exit_codes: dict[int, int] = {}
        self.errors: dict[int, dict[str, Any]] = {}
        self.cpu_s: dict[tuple[int, int], float] = {}
        self.starved_s = 0.0
        self.sleeps_in: dict[int, str] = {}
        self.children = Children()
        for module in (looking_around, rank_traces):
            monkeypatch.setattr(module, "process_state", self._state)
        monkeypatch.setattr(looking_around, "facts_of_this_process", lambda: self.own)
        monkeypatch.setattr(looking_around, "ask", self._ask)
        monkeypatch.setattr(looking_around, "child_pids", lambda pid: [*self.others] if pid == US else [])
        monkeypatch.setattr(looking_around, "processes_with_agents", lambda _: [])
        monkeypatch.setattr(looking_around, "left_error", lambda _, pid: self.errors.get(pid))
        monkeypatch.setattr(looking_around, "dumped_stack", lambda *_, **__: [(FILE, 77, "crashes")])
        monkeypatch.setattr(looking_around, "thread_cpu_s", lambda pid, number: self.cpu_s.get((pid, number), 0.0))
        monkeypatch.setattr(looking_around, "waited_for_core_s", lambda *_: self.starved_s)
        monkeypatch.setattr(looking_around, "waits_in", lambda pid, *_: self.sleeps_in.get(pid, ""))

    def add(self, told: dict[str, Any] | int, *, method: str = "fork") -> World:
        """Another process; one that is given by its number cannot be asked."""
        pid = told if isinstance(told, int) else told["pid"]
        self.others[pid] = None if isinstance(told, int) else told
        if method:
            self.children.started[pid] = Child(pid, f"Process-{pid}", method, 0.0, None)
        return self

    def ended(self, pid: int, exit_code: int, **error: Any) -> World:
        """One that is no more."""
        self.add(pid)
        self.exit_codes[pid] = exit_code
        self.children.started[pid].seen_exit_code = exit_code
        if error:
            self.errors[pid] = {"type": "ValueError", "message": "bad label", "at_s": 1.0, "frames": [(FILE, 9, "f")], **error}
        return self

    def look(self, at_s: float = 0.0) -> Look:
        look = look_around(self.children)
        look.at_s = at_s
        link(look, {})
        return look

    def judged(self, *, still_s: float = 20.0, progress: Progress | None = None, **doing: int) -> HangFinding:
        """By three looks, between which nothing moves."""
        self.children.silent.update({pid: time.monotonic() - 60 for pid, call in self.sleeps_in.items() if call == "silent"})
        looks = [self.look(at_s) for at_s in (0.0, 1.0, 2.0)]
        progress = progress or Progress()
        progress.doing = Counter(doing)
        return judged(looks, progress, still_s)

    def _state(self, pid: int) -> ProcessState:
        status = "zombie" if pid in self.exit_codes else "running" if self.sleeps_in.get(pid) == "silent" else "sleeping"
        cpu_s = sum(one for (of, _), one in self.cpu_s.items() if of == pid)
        return ProcessState(pid, US, "program", status, cpu_s, 0.0)

    def _ask(self, _folder: str, pid: int, *_: object) -> dict[str, Any]:
        told = self.others.get(pid)
        if told is None:
            raise AgentError("no agent", is_silent=pid in self.sleeps_in and self.sleeps_in[pid] == "silent")
        return told
