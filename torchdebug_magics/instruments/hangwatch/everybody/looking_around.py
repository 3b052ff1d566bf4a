"""One look at this process and at those that it has started: each is asked, and of one that cannot answer the system says what it can."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant, link_ranks
from torchdebug_magics.instruments.hangwatch.waits.process_facts import CALL, facts_of_this_process
from torchdebug_magics.machine.process_state import (
    ProcessState,
    catches,
    child_pids,
    descendants,
    open_pipes,
    process_state,
    thread_cpu_s,
    waited_for_core_s,
    waits_in,
)
from torchdebug_magics.probing.source.user_code import owner
from torchdebug_magics.ranks.agent import dump_signal, socket_path
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.ranks.rank_traces import Child

_MOST_PROCESSES = 256
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ASK_S = 0.5
_SILENT_S = 2.0
"""Without an answer, after which one call holds the GIL there: then its frames stand still and can be read."""


def look_around(children: Children) -> Look:
    """Look at this process, and ask every process that it has started."""
    look = Look(time.monotonic(), {})
    own = facts_of_this_process()
    names: dict[tuple[int, int], str] = {}
    everybody = [_thread(own, thread, "main" if thread["is_main"] else _thread_name(thread)) for thread in own["threads"]]
    known = dict(children.started)
    for one in (*everybody, *(one for pid in _processes(own, known, children) for one in _process(pid, known.get(pid), children))):
        if one.who in look.everybody:
            one.who = f"{one.who} (pid {one.pid})" if one.is_main_thread else f"{one.who} ({one.ident})"
        look.everybody[one.who] = one
        names[one.pid, one.ident] = one.who
        if one.is_main_thread:
            names[one.pid, 0] = one.who
    for one in look.everybody.values():
        for name in ("targets", "able"):
            numbers = [(one.pid, key) if kind == "thread" else (key, 0) for kind, key in one.facts.pop(name, ())]
            setattr(one, name, list(dict.fromkeys(names[number] for number in numbers if number in names)))
    return look


def _processes(own: dict[str, Any], known: Mapping[int, Child], children: Children) -> list[int]:
    """Those that were started while we watched, those that they have started, and those that a thread here waits for; the ended last."""
    targets = (target for thread in own["threads"] for target in (thread["waiting"] or {}).get("targets", ()))
    waited = [number for kind, number in targets if kind == "process"]
    everybody = dict.fromkeys([*known, *processes_with_agents(children.folder), *waited, *child_pids(os.getpid())])
    everybody.pop(os.getpid(), None)
    ended = [pid for pid in everybody if pid in known and not known[pid].is_alive()]
    return [*(pid for pid in everybody if pid not in ended), *reversed(ended)][:_MOST_PROCESSES]


def _process(pid: int, child: Child | None, children: Children) -> Iterator[Participant]:
    state = process_state(pid)
    if state is None or state.is_zombie or (child is not None and not child.is_alive()):
        if child is not None:
            yield ended(child, children.folder)
        return
    try:
        facts = ask(children.folder, pid, CALL, _ASK_S)
    except AgentError as failure:
        silent_s = time.monotonic() - children.silent.setdefault(pid, time.monotonic()) if failure.is_silent else 0.0
        yield _unasked(pid, child, state, children, silent_s)
        return
    children.silent.pop(pid, None)
    children.dumped.pop(pid, None)
    error = left_error(children.folder, pid)
    who = f"rank {facts['rank']}" if facts["rank"] is not None else f"process {facts['name']}"
    who = f"worker {facts['worker']}" if facts["worker"] is not None else who
    for thread in facts["threads"]:
        one = _thread(facts, thread, who if thread["is_main"] else f"{who} {_thread_name(thread)}")
        one.child, one.error = child, error or thread["handling"]
        yield one


def _thread_name(thread: dict[str, Any]) -> str:
    name = str(thread["name"])
    return name if name.startswith("task ") else f"thread {name}"


def _thread(facts: dict[str, Any], thread: dict[str, Any], who: str) -> Participant:
    pid, number = facts["pid"], thread["number"]
    waiting = {"kind": "python", "what": "", "timeout_s": None, **(thread["waiting"] or {})}
    is_waiting = waiting["kind"] != "python"
    cpu_s = thread_cpu_s(pid, number) or 0.0
    if thread["is_main"] and not is_waiting and (state := process_state(pid)) is not None:
        ours = [one.native_id for one in threading.enumerate() if one.name.startswith("torchdebug-")] if pid == os.getpid() else []
        cpu_s = state.cpu_s - sum(thread_cpu_s(pid, number) or 0.0 for number in ours)  # what it has called may compute in other threads
        cpu_s += waited_for_core_s(pid, number)  # on a busy machine it gets no turn, and is not stuck
    frames = [tuple(frame) for frame in thread["frames"]]
    latest = repr([*(facts["collectives"] or {}).get("status", {}).values()])
    return Participant(
        who, pid, thread["ident"], frames, (tuple(thread["at"]), tuple(frames), repr(thread["values"]), latest), cpu_s, waiting.pop("kind"),
        waiting.pop("what"), timeout_s=waiting.pop("timeout_s"), process=facts, is_main_thread=thread["is_main"],
        facts={**waiting, "calls": thread["calls"], "is_waiting": is_waiting, "shares": thread["shares"]}, sleeps_in=waits_in(pid, number),
    )  # fmt: skip


def ended(child: Child, folder: str, who: str = "") -> Participant:
    """A process that is no more: how it ended, and the line, where its agent has left that in the folder."""
    error, code = left_error(folder, child.pid), child.exit_code()
    how = "ended" if not code else "exited" if code > 0 else f"was killed by signal {-code}"
    frames = dumped_stack(folder, child.pid, is_alive=False)
    if error:
        how, frames = f"raised {error['type']}", [tuple(frame) for frame in reversed(error["frames"])]
    who = who or f"process {child.name}"
    return Participant(who, child.pid, frames=frames, kind="dead", what=how, child=child, exit_code=code, error=error)


def _unasked(pid: int, child: Child | None, state: ProcessState, children: Children, silent_s: float) -> Participant:
    """Of a process without an agent, or in which none gets a turn, what the system says."""
    is_silent = silent_s > _SILENT_S  # else it may only be starting
    if is_silent and state.status == "running" and pid not in children.dumped:  # once: a signal cuts short what waits in native code
        children.dumped[pid] = dumped_stack(children.folder, pid, is_alive=True)
    stack = children.dumped.get(pid, [])
    cpu_s = state.cpu_s + sum(one.cpu_s for one in map(process_state, descendants(pid)) if one is not None)  # a shell only waits
    sleeps_in = waits_in(pid)
    kind = "gil" if is_silent else "io" if sleeps_in.startswith(("read", "write", "receive", "connect")) else "native"
    kind = "sleep" if sleeps_in == "sleep" else kind
    name, at = f"process {child.name if child is not None else state.name}", (tuple(stack), sleeps_in)
    return Participant(name, pid, frames=stack, at=at, cpu_s=cpu_s, kind=kind, what=sleeps_in, child=child, sleeps_in=sleeps_in)


def link(look: Look, ranks: dict[int, int]) -> None:
    """Complete a look; `ranks` remembers the rank of each process from look to look."""
    for one in look.ranks():
        ranks[one.pid] = one.rank or 0
    for one in [*look.everybody.values()]:
        if one.kind == "batch" and one.targets:
            _rename(look, one.targets[0], f"worker {one.facts['worker']}")
    _name_dead_ranks(look, ranks)
    for one in look.everybody.values():
        if ("pipe" in one.facts or one.facts.get("shared")) and not one.facts.get("pipe_full"):
            _link_to_writers(look, one)
        elif "semaphore" in one.facts and not one.targets:
            one.able += [other.who for other in look.everybody.values() if other.pid != one.pid and _may_write(other, one)]
        elif one.facts.get("future") and not one.targets:
            working = (other for other in look.everybody.values() if other.is_main_thread and not other.facts.get("idle"))
            one.targets = [other.who for other in working if any(name == "_process_worker" for _, _, name in other.frames)]
            one.kind = "join" if one.targets else one.kind
        elif not one.process and one.sleeps_in.startswith(("read pipe", "write pipe")):
            # Whether a program that is none of ours to ask has the other end, or this process has it.
            call, _, pipe = one.sleeps_in.partition(" ")
            others = (pid for pid in descendants(os.getpid()) if pid != one.pid)
            one.facts["may_end"] = any(pipe in open_pipes(pid, for_writing=call == "read") for pid in others)
            one.facts["our_pipe"] = call == "read" and pipe in open_pipes(os.getpid(), for_writing=True)
    link_ranks(look)


def _link_to_writers(look: Look, reader: Participant) -> None:
    """Programs at the other end of a pipe; else every process that has work, as all have the pipe or the semaphore, and their threads."""
    pipe, everybody = reader.facts.get("pipe", "-"), look.everybody.values()
    writers = [other.who for other in everybody if not other.process and other.kind != "dead" and pipe in open_pipes(other.pid)]
    able = [other for other in everybody if _may_write(other, reader)]
    writers = writers or [other.who for other in able if other.pid != reader.pid and other.process and other.is_main_thread]
    reader.targets = list(dict.fromkeys([*reader.targets, *writers]))
    reader.able += [other.who for other in able if other.facts.get("shares")]


def _may_write(other: Participant, reader: Participant) -> bool:
    """Whether a thread of another process could: not one without work of its own, and not one that waits for the very same."""
    waits_for_same = other.what == reader.what and other.facts.get("pipe") == reader.facts.get("pipe")
    return not waits_for_same and other.kind != "dead" and not other.facts.get("idle")


def _name_dead_ranks(look: Look, ranks: dict[int, int]) -> None:
    sizes = [rank.process.get("world_size") for rank in look.ranks()]
    dead = [participant for participant in look.everybody.values() if participant.kind == "dead" and participant.who.startswith("process ")]
    ranks.update({one.pid: one.error["rank"] for one in dead if one.error and one.error.get("rank") is not None})
    if not sizes and not any((participant.error or {}).get("rank") is not None for participant in look.everybody.values()):
        return
    absent = sorted(set(range((sizes or [0])[0] or 0)) - {ranks[rank.pid] for rank in [*look.ranks(), *dead] if rank.pid in ranks})
    unnamed = sorted((one for one in dead if one.pid not in ranks), key=lambda one: one.pid)
    likely = {one.pid: rank for one, rank in zip(unnamed, absent, strict=True)} if len(unnamed) == len(absent) else {}
    for one in dead:
        if (rank := ranks.get(one.pid, likely.get(one.pid))) is not None:
            _rename(look, one.who, f"rank {rank}")


def _rename(look: Look, who: str, name: str) -> None:
    one = look.everybody.get(who)
    if one is None or one.who == name or one.pid == os.getpid():
        return
    if name in look.everybody:
        name = f"{name} (pid {one.pid})"
    look.everybody = {name if key == who else key: other for key, other in look.everybody.items()}
    one.who = name
    for other in look.everybody.values():
        other.targets = [name if target == who else target for target in other.targets]


class OthersProgress:
    """Remembers the lines at which each process was, its latest values, and when one of them was new."""

    def __init__(self, *, any_code: bool = False) -> None:
        self._any_code = any_code
        """Whether a new line counts in whatever code; else in the user's alone: a child that imports its libraries is only starting."""
        self._seen: dict[str, tuple[set[tuple[str, int, str]], object, float]] = {}

    def note(self, look: Look) -> bool:
        """Add a look; whether any process other than this one is at a new line, or has other values."""
        is_news = False
        for one in look.everybody.values():
            if one.process and one.pid != look.main.pid:
                seen, before, last_s = self._seen.get(one.who, (set(), None, look.at_s))
                lines = {frame for frame in one.frames if self._any_code or owner(frame[0]) == "user"}
                is_new = not lines <= seen or one.at[2:] != before
                is_worker = one.process.get("worker") is not None  # one that goes on for ever is no progress of the loop
                self._seen[one.who] = (seen | lines, one.at[2:], look.at_s if is_new and not is_worker else last_s)
                is_news |= is_new
        return is_news

    def last_s(self, look: Look) -> float:
        """When the last of the processes whose end the main thread waits for was at a new line, or had other values."""
        if look.main.kind not in {"join", "queue", "io"}:
            return 0.0
        waited = [look.everybody[who] for who in look.main.targets if who in look.everybody and who in self._seen]
        return min((self._seen[one.who][2] for one in waited if not one.facts.get("idle") and one.kind != "dead"), default=0.0)


class AgentError(Exception):
    """The agent could not answer; `is_silent` where it is there and no Python thread gets a turn."""

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


def ask(folder: str, pid: int, call: str, timeout_s: float = 1.0, **values: object) -> Any:
    """Call ``module:function`` in the process and return its result; raise `AgentError` without an answer in time."""
    end_s = time.monotonic() + timeout_s
    parts = []
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(socket_path(folder, pid))
            connection.sendall(json.dumps({"call": call, "with": values}).encode())
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                parts.append(part)
                connection.settimeout(max(0.01, end_s - time.monotonic()))
        answer = json.loads(b"".join(parts))
    except (OSError, ValueError, AttributeError) as error:
        is_silent = isinstance(error, TimeoutError)
        why = f"did not answer within {timeout_s:g} s" if is_silent else f"could not be asked: {type(error).__name__}: {error}"
        msg = f"process {pid} {why}"
        raise AgentError(msg, is_silent=is_silent) from None
    if "failure" in answer:
        msg = f"process {pid} could not answer: {answer['failure']}"
        raise AgentError(msg)
    return answer["answer"]


def processes_with_agents(folder: str) -> list[int]:
    """The processes that have an agent, or have had one."""
    return sorted(int(file.stem) for file in Path(folder).glob("*.socket"))


def left_error(folder: str, pid: int) -> dict[str, Any] | None:
    """The exception that ended a process: ``type``, ``message``, ``frames``; None where none is recorded."""
    with contextlib.suppress(OSError, ValueError):
        record: dict[str, Any] = json.loads(Path(folder, f"{pid}.error").read_text(encoding="utf-8"))
        return record
    return None


def dumped_stack(folder: str, pid: int, *, is_alive: bool) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first, of a process in which no Python thread gets a turn, or that was killed by a signal."""
    file, number = Path(folder, f"{pid}.stack"), dump_signal()
    if is_alive and number is not None and catches(pid, number):
        with contextlib.suppress(OSError):
            os.truncate(file, 0)
            os.kill(pid, number)
            time.sleep(0.05)
    text = ""
    with contextlib.suppress(OSError):
        text = file.read_text(encoding="utf-8", errors="replace")
    # Of what faulthandler wrote, the thread that runs Python, or else the last thread, which is the main one.
    stacks = [part for part in text.split("\n\n") if "  File " in part]
    current = [part for part in stacks if part.lstrip().startswith(("Current thread", "Fatal"))] or stacks[-1:]
    return [(file, int(line), function) for part in current[:1] for file, line, function in _FRAME.findall(part)]
