"""Names and waits that one process alone cannot know: which worker or rank has ended, and who could write to a queue between processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.hangwatch.everybody.rank_states import link_ranks
from torchdebug_magics.machine.process_state import child_pids, open_pipes

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant

__all__ = ["link"]


def link(look: Look, ranks: dict[int, int]) -> None:
    """Complete a look; `ranks` remembers the rank of each process from look to look."""
    for one in look.ranks():
        ranks[one.pid] = int(one.process["rank"])
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
            one.targets = [other.who for other in look.everybody.values() if _works_for_pool(other)]
            one.kind = "join" if one.targets else one.kind
        elif not one.process and one.sleeps_in.startswith("read pipe"):
            one.facts["our_pipe"] = one.sleeps_in.partition(" ")[2] in open_pipes(os.getpid(), for_writing=True)
        if not one.process and one.sleeps_in.startswith(("read pipe", "write pipe")):
            one.facts["may_end"] = _is_held_by_others(one)
    link_ranks(look)


def _link_to_writers(look: Look, reader: Participant) -> None:
    """Programs at the other end of a pipe; else every process that has work, as all have the pipe or the semaphore, and their threads."""
    programs = [other.who for other in look.everybody.values() if _holds_pipe(other, reader)]
    others = [other for other in look.everybody.values() if other.pid != reader.pid and bool(other.process) and _may_write(other, reader)]
    known = [*reader.targets, *(programs or [other.who for other in others if other.is_main_thread])]
    reader.targets = list(dict.fromkeys(known))
    reader.able += [other.who for other in look.everybody.values() if other.facts.get("shares") and _may_write(other, reader)]


def _may_write(other: Participant, reader: Participant) -> bool:
    """Whether a thread of another process could: not one without work of its own, and not one that waits for the very same."""
    waits_for_same = other.what == reader.what and other.facts.get("pipe") == reader.facts.get("pipe")
    return not waits_for_same and other.kind != "dead" and not other.facts.get("idle")


def _is_held_by_others(program: Participant) -> bool:
    """Whether a program that is none of ours to ask has the other end of the pipe at which this one waits."""
    call, _, pipe = program.sleeps_in.partition(" ")
    others = [pid for pid in _descendants(os.getpid()) if pid != program.pid]
    return any(pipe in open_pipes(pid, for_writing=call == "read") for pid in others)


def _descendants(pid: int) -> list[int]:
    return [each for child in child_pids(pid) for each in (child, *_descendants(child))]


def _holds_pipe(other: Participant, reader: Participant) -> bool:
    """Whether it is a program of its own at the other end of the pipe."""
    return not other.process and other.kind != "dead" and reader.facts.get("pipe", "-") in open_pipes(other.pid)


def _works_for_pool(other: Participant) -> bool:
    """Whether it is a process of a `ProcessPoolExecutor` that has work."""
    return not other.facts.get("idle") and other.is_main_thread and any(name == "_process_worker" for _, _, name in other.frames)


def _name_dead_ranks(look: Look, ranks: dict[int, int]) -> None:
    sizes = [one.process.get("world_size") for one in look.ranks()]
    if not sizes and not any((one.error or {}).get("rank") is not None for one in look.everybody.values()):
        return
    dead = [one for one in look.everybody.values() if one.kind == "dead" and one.who.startswith("process ")]
    for one in dead:
        recorded = (one.error or {}).get("rank")
        rank = recorded if recorded is not None else ranks.get(one.pid)
        if rank is not None:
            ranks[one.pid] = rank
            _rename(look, one.who, f"rank {rank}")
    unnamed = [one for one in dead if one.who.startswith("process ")]
    absent = sorted(
        set(range(sizes[0] if sizes and sizes[0] else 0)) - {ranks[one.pid] for one in [*look.ranks(), *dead] if one.pid in ranks}
    )
    if len(unnamed) == len(absent):
        for one, rank in zip(sorted(unnamed, key=lambda one: one.pid), absent, strict=True):
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
