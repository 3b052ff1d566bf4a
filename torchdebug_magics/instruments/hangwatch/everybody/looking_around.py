"""One look at this process and at those that it has started: each is asked, and of one that cannot answer the system says what it can."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant
from torchdebug_magics.machine.process_state import (
    ProcessState,
    child_pids,
    command_of,
    process_state,
    thread_cpu_s,
    waited_for_core_s,
    waits_in,
)
from torchdebug_magics.probing.children.asking import AgentError, ask, dumped_stack, left_error, processes_with_agents
from torchdebug_magics.probing.waits.process_facts import CALL, facts_of_this_process

if TYPE_CHECKING:
    from torchdebug_magics.probing.children.launching import Child, Children

__all__ = ["look_around"]

_MOST_PROCESSES = 256
_ASK_S = 0.5
_SILENT_S = 2.0
"""Without an answer, after which one call holds the GIL there: then its frames stand still and can be read."""


def look_around(children: Children | None) -> Look:
    """Look at this process, and ask every process that it has started."""
    look = Look(time.monotonic(), {})
    own = facts_of_this_process()
    names: dict[tuple[int, int], str] = {}
    for thread in own["threads"]:
        _add(look, names, _thread(own, thread, "main" if thread["is_main"] else _thread_name(thread)))
    known = dict(children.started) if children is not None else {}
    for pid in _processes(own, children):
        for one in _process(pid, known.get(pid), children):
            _add(look, names, one)
    for one in look.everybody.values():
        one.targets = _named(one.facts.pop("targets", ()), names)
        one.able = _named(one.facts.pop("able", ()), names)
    return look


def _named(numbers: Iterable[tuple[int, int]], names: dict[tuple[int, int], str]) -> list[str]:
    return list(dict.fromkeys(names[number] for number in numbers if number in names))


def _add(look: Look, names: dict[tuple[int, int], str], one: Participant) -> None:
    if one.who in look.everybody:
        one.who = f"{one.who} (pid {one.pid})" if one.is_main_thread else f"{one.who} ({one.ident})"
    look.everybody[one.who] = one
    names[one.pid, one.ident] = one.who
    if one.is_main_thread:
        names[one.pid, 0] = one.who


def _processes(own: dict[str, Any], children: Children | None) -> list[int]:
    """Those that were started while we watched, those that they have started, and those that a thread here waits for."""
    found: dict[int, None] = {}
    if children is not None:
        found.update(dict.fromkeys(children.started))
        found.update(dict.fromkeys(processes_with_agents(children.folder)))
    for thread in own["threads"]:
        found.update(dict.fromkeys(pid for kind, pid in (thread["waiting"] or {}).get("targets", ()) if kind == "process"))
    found.update(dict.fromkeys(child_pids(os.getpid())))
    ended = {pid for pid, child in (children.started if children is not None else {}).items() if not child.is_alive()}
    told = [pid for pid in found if pid != os.getpid()]
    return [*(pid for pid in told if pid not in ended), *reversed([pid for pid in told if pid in ended])][:_MOST_PROCESSES]


def _process(pid: int, child: Child | None, children: Children | None) -> Iterator[Participant]:
    silent = children.silent if children is not None else {}
    state = process_state(pid)
    exit_code = child.exit_code() if child is not None else None if state is None else state.exit_code
    error = None if children is None else left_error(children.folder, pid)
    if state is None or state.is_zombie or (child is not None and not child.is_alive()):
        if child is not None:
            yield _ended(pid, child, exit_code, error, children)
        return
    try:
        facts = ask(children.folder if children is not None else "", pid, CALL, _ASK_S)
    except AgentError as failure:
        silent_s = time.monotonic() - silent.setdefault(pid, time.monotonic()) if failure.is_silent else 0.0
        yield _unasked(pid, child, state, children, silent_s)
        return
    silent.pop(pid, None)
    if children is not None:
        children.dumped.pop(pid, None)
    who = _name(facts)
    for thread in facts["threads"]:
        one = _thread(facts, thread, who if thread["is_main"] else f"{who} {_thread_name(thread)}")
        one.child, one.error = child, error or thread["handling"]
        yield one


def _thread_name(thread: dict[str, Any]) -> str:
    name = str(thread["name"])
    return name if name.startswith("task ") else f"thread {name}"


def _name(facts: dict[str, Any]) -> str:
    if facts["worker"] is not None:
        return f"worker {facts['worker']}"
    return f"rank {facts['rank']}" if facts["rank"] is not None else f"process {facts['name']}"


def _thread(facts: dict[str, Any], thread: dict[str, Any], who: str) -> Participant:
    pid = facts["pid"]
    waiting = dict(thread["waiting"] or {})
    state = process_state(pid)
    cpu_s = thread_cpu_s(pid, thread["number"])
    is_waiting = bool(waiting) and waiting["kind"] != "python"
    if thread["is_main"] and not is_waiting and state is not None:
        cpu_s = state.cpu_s - _own_cpu_s(pid)  # what it has called may compute in other threads
        cpu_s += waited_for_core_s(pid, thread["number"])  # on a busy machine it gets no turn, and is not stuck
    numbers = [*((facts["collectives"] or {}).get("status", {}).values())]
    one = Participant(
        who=who,
        pid=pid,
        ident=thread["ident"],
        frames=[tuple(frame) for frame in thread["frames"]],
        at=(tuple(thread["at"]), tuple(tuple(frame) for frame in thread["frames"]), repr(thread["values"]), repr(numbers)),
        cpu_s=cpu_s or 0.0,
        kind=waiting.pop("kind", "python"),
        what=waiting.pop("what", ""),
        timeout_s=waiting.pop("timeout_s", None),
        facts={**waiting, "calls": thread["calls"], "is_waiting": is_waiting, "shares": thread["shares"]},
        process=facts,
        is_main_thread=thread["is_main"],
        sleeps_in=waits_in(pid, thread["number"]),
    )
    for name in ("targets", "able"):
        one.facts[name] = [(pid, number) if kind == "thread" else (number, 0) for kind, number in waiting.get(name, ())]
    return one


def _own_cpu_s(pid: int) -> float:
    """Of the threads that look, which are no movement."""
    ours = [one for one in threading.enumerate() if one.name.startswith("torchdebug-") and one.native_id is not None]
    return sum(thread_cpu_s(pid, one.native_id) or 0.0 for one in ours) if pid == os.getpid() else 0.0


def _ended(pid: int, child: Child | None, exit_code: int | None, error: dict[str, Any] | None, children: Children | None) -> Participant:
    stack = [] if children is None else dumped_stack(children.folder, pid, is_alive=False)
    frames = [tuple(frame) for frame in reversed(error["frames"])] if error else stack
    how = (
        f"raised {error['type']}"
        if error
        else "ended"
        if not exit_code
        else f"was killed by signal {-exit_code}"
        if exit_code < 0
        else "exited"
    )
    name = f"process {child.name}" if child is not None else f"process {pid}"
    return Participant(name, pid, frames=frames, kind="dead", what=how, child=child, exit_code=exit_code, error=error)


def _unasked(pid: int, child: Child | None, state: ProcessState, children: Children | None, silent_s: float) -> Participant:
    """Of a process without an agent, or in which none gets a turn, what the system says."""
    is_silent = silent_s > _SILENT_S  # else it may only be starting
    stack: list[tuple[str, int, str]] = []
    if is_silent and children is not None and (state.letter == "R" or pid in children.dumped):
        if pid not in children.dumped:  # once: a signal cuts short what waits in native code
            children.dumped[pid] = dumped_stack(children.folder, pid, is_alive=True)
        stack = children.dumped[pid]
    sleeps_in = waits_in(pid)
    kind = "gil" if is_silent else "io" if sleeps_in.startswith(("read", "write", "receive", "connect")) else "native"
    kind = "sleep" if sleeps_in == "sleep" else kind
    name = f"process {child.name if child is not None else command_of(pid)}"
    return Participant(
        name, pid, frames=stack, at=(tuple(stack), sleeps_in), cpu_s=_tree_cpu_s(state), kind=kind, what=sleeps_in, child=child,
        is_silent=is_silent, sleeps_in=sleeps_in,
    )  # fmt: skip


def _tree_cpu_s(state: ProcessState) -> float:
    """With that of what it has started, as a shell only waits."""
    inner: Iterable[ProcessState | None] = (process_state(pid) for pid in child_pids(state.pid))
    return state.cpu_s + sum(_tree_cpu_s(one) for one in inner if one is not None)
