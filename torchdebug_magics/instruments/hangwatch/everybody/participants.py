"""Everybody who may wait or be waited for, at one moment: threads of this process, its children, and ranks with their collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchdebug_magics.instruments.hangwatch.report import Wait
from torchdebug_magics.machine.process_state import has_proc
from torchdebug_magics.probing.source.user_code import location, owner
from torchdebug_magics.ranks.rank_traces import Child
from torchdebug_magics.report import Location

_THREAD_COMPUTES = 0.03
_PROCESS_COMPUTES = 0.15
"""Shares of a core, above what our own looks take."""
_UNEQUAL = frozenset({"scatter", "gather", "all_gather", "all_to_all", "all_to_allv", "alltoall", "alltoall_base"})
"""In which ranks may give tensors of different sizes."""


def named(who: str) -> str:
    """``"worker 0"`` as ``"DataLoader worker 0"``."""
    return "the main thread" if who == "main" else f"DataLoader {who}" if who.startswith("worker ") else who


def with_article(what: str) -> str:
    """``"lock"`` as ``"a lock"``; calls, names and phrases that have one stay."""
    if "(" in what or what.startswith(("a ", "an ", "the ", "your ", "more ", "room ", "only ")) or "#" in what:
        return what
    return f"{'an' if what[:1] in 'aeiou' else 'a'} {what}"


@dataclass(frozen=True)
class Issued:
    """A collective as one rank has called it."""

    group: str
    """The name of its process group; numbers count in each group by themselves."""
    number: int
    op: str
    sizes: list[list[int]]
    dtypes: list[str]
    is_done: bool
    is_p2p: bool

    @property
    def key(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return (self.op, repr(self.sizes) if self.op not in _UNEQUAL else "", repr(self.dtypes))

    def __str__(self) -> str:
        sizes = " ".join(str(size) for size in self.sizes[:2])
        return f"{self.op} #{self.number}" + (f" {sizes}" if sizes else "")


@dataclass
class Participant:
    """A thread of this process, or another process by its main thread."""

    who: str
    pid: int
    ident: int = 0
    """Of the thread; 0 for a process that could not be asked."""
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    """(file, line, function), innermost first."""
    at: tuple[Any, ...] = ()
    """What changes when it moves: instructions, small local values, numbers of collectives."""
    cpu_s: float = 0.0
    kind: str = "python"
    what: str = ""
    targets: list[str] = field(default_factory=list)
    """The `who` of those that are to end the wait."""
    able: list[str] = field(default_factory=list)
    """Of others that could, as their code can get at what is waited for."""
    timeout_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the wait; see `Waiting.facts`."""
    process: dict[str, Any] = field(default_factory=dict)
    """What its process says of itself; empty where it could not be asked."""
    child: Child | None = None
    exit_code: int | None = None
    error: dict[str, Any] | None = None
    """The exception that has ended it."""
    is_main_thread: bool = True
    is_old: bool = False
    """Whether it is a thread that was there when the watch began."""
    sleeps_in: str = ""
    """A system call, see `waits_in`."""

    @property
    def is_child(self) -> bool:
        """Whether `multiprocessing` has started its process, in which no prompt can be answered."""
        return bool(self.process.get("is_child"))

    @property
    def is_forked(self) -> bool:
        """Whether its process is a copy of another, without that one's other threads."""
        return self.child is not None and self.child.method == "fork"

    @property
    def name(self) -> str:
        """``"worker 0"`` as ``"DataLoader worker 0"``."""
        return named(self.who)

    @property
    def a_what(self) -> str:
        """What it waits for, as it stands in a sentence."""
        return with_article(self.what or self.kind)

    @property
    def in_worker(self) -> str:
        """A second sentence for a fix in code that runs in a worker of a DataLoader; empty elsewhere."""
        return "" if self.process.get("worker") is None else "; to step through the worker, use `num_workers=0`"

    @property
    def is_shown(self) -> bool:
        """Whether it is worth a row where nobody waits for it: not a library's own thread."""
        return not self.is_old and (bool(self.location) or self.kind == "dead" or bool(self.process and self.is_main_thread))

    @property
    def stack(self) -> tuple[Location, ...]:
        """The lines of the user's code, the outermost first."""
        return tuple(location(file, line, name) for file, line, name in reversed(self.frames) if owner(file) == "user")

    @property
    def location(self) -> Location | None:
        """The innermost of them; of a process that has ended by an error, the line that raised."""
        return self.stack[-1] if self.stack else None

    @property
    def rank(self) -> int | None:
        """Its number in a distributed job."""
        return self.process.get("rank")

    @cached_property
    def issued(self) -> list[Issued]:
        """The collectives that it has called, in order."""
        entries = (self.process.get("collectives") or {}).get("entries", ())
        return [call for entry in entries if not (call := Issued(**entry)).is_p2p]

    @property
    def pending(self) -> Issued | None:
        """The first collective that it has called and that is not done."""
        return next((call for call in self.issued if not call.is_done), None)

    @property
    def in_backward(self) -> bool:
        """Whether its main thread is in a backward pass, in which DistributedDataParallel issues collectives."""
        return any(name == "_engine_run_backward" for _, _, name in self.frames)

    def needs(self, other: Participant, group: str) -> bool:
        """Whether another rank has to take part in its collectives of a group."""
        return other.rank in (self.process.get("collectives") or {}).get("groups", {}).get(group, [other.rank])

    def call(self, like: Issued) -> Issued | None:
        """What it has called in the same group as the collective of the same number."""
        return next((call for call in self.issued if (call.group, call.number) == (like.group, like.number)), None)

    def as_wait(self) -> Wait:
        """As the report has it."""
        names = ("who", "pid", "location", "kind", "what", "stack", "exit_code")
        acquired = self.facts.get("acquired")
        return Wait(
            **{name: getattr(self, name) for name in names},
            waits_for=self.targets[0] if self.targets else None,
            acquired=location(*acquired) if acquired else None,
        )


@dataclass
class Look:
    """Everybody at one moment."""

    at_s: float
    everybody: dict[str, Participant]
    thread_errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The exceptions that have ended threads of this process, by their names; see `ThreadErrors`."""

    @property
    def main(self) -> Participant:
        """The thread whose cell is watched."""
        return self.everybody["main"]

    def ranks(self) -> list[Participant]:
        """The processes of a distributed job, in the order of their ranks; this one, too, if it is a rank."""
        return sorted(
            (participant for participant in self.everybody.values() if participant.is_main_thread and participant.rank is not None),
            key=lambda participant: participant.rank or 0,
        )


@dataclass(frozen=True)
class Chain:
    """The way from the main thread to the root."""

    path: tuple[Participant, ...]
    circle: tuple[Participant, ...] = ()
    """Those at its end that wait for each other, or the last for itself."""

    @property
    def root(self) -> Participant:
        """Whom everybody waits for; of a circle, the first that is reached."""
        return (self.circle or self.path[-1:])[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Each `who`; of a circle, the first comes again at the end."""
        return tuple(one.who for one in (*self.path, *self.circle[:1]))


def follow(look: Look, moved: Mapping[str, bool], still_s: float) -> Chain:
    """The way to whoever still moves, if the main thread waits for such a one; else to who has ended, to a circle, or to the last.

    Only for the first counts who could end a wait without being known to.
    """
    ways = (_ways(look, (look.main,), set(), is_wide=is_wide) for is_wide in (True, False))
    wide, narrow = (max(chains, key=lambda chain: _weight(chain, moved, still_s)) for chains in ways)
    return wide if goes_on(wide, moved, still_s) else narrow


def goes_on(chain: Chain, moved: Mapping[str, bool], still_s: float) -> bool:
    """Whether somebody on the way moves, or does not wait for ever."""
    return any(moved.get(one.who) or _ends_by_itself(one, still_s) for one in chain.path)


def _ends_by_itself(one: Participant, still_s: float) -> bool:
    """Whether it sleeps, or waits for something outside, or for a time that is not over."""
    if one.kind == "sleep" or (one.kind == "input" and one.who == "main" and not one.is_child):
        return True
    if any(one.facts.get(fact) for fact in ("network", "compiling", "may_end")):
        return True
    if not one.process and one.kind != "dead" and not one.sleeps_in.startswith(("read pipe", "write pipe")):
        return True  # a program of its own, of which nothing is known
    if one.kind in {"python", "native"} and (one.sleeps_in not in {"", "futex"} or not has_proc()):
        return True  # a file, a device or a server
    return one.timeout_s is not None and one.timeout_s > 0 and still_s < one.timeout_s


def _ways(look: Look, path: tuple[Participant, ...], met: set[str], *, is_wide: bool) -> Iterator[Chain]:
    """The ways on from the end of a path; each participant is gone on from once."""
    last, before = path[-1], {one.who for one in path}
    met.add(last.who)
    further = [who for who in (*last.targets, *(last.able if is_wide else ())) if who in look.everybody]
    fresh = [who for who in further if who not in met]
    if not fresh:
        back = next((at for at, one in enumerate(path) if one.who in last.targets), len(path) - 1)
        yield Chain(path, path[back:] if before.intersection(further) else ())
    for who in fresh:
        if who not in met:
            yield from _ways(look, (*path, look.everybody[who]), met, is_wide=is_wide)


def _weight(chain: Chain, moved: Mapping[str, bool], still_s: float) -> tuple[int, int]:
    end = chain.path[-1]
    is_dead = end.kind == "dead"
    by_weight = (
        (6, end.facts.get("debugger")),
        (5, goes_on(chain, moved, still_s)),
        (4, is_dead and (end.error is not None or end.exit_code)),
        (3, not is_dead and chain.circle),
        (2, is_dead or not end.facts.get("idle")),
    )
    return next((weight for weight, applies in by_weight if applies), 0), len(chain.path)


def moving(looks: Sequence[Look]) -> dict[str, bool]:
    """Whether each participant has moved between any two of these looks: its lines, its small values, or time that it has computed."""
    first, last = looks[0], looks[-1]
    took_s = max(last.at_s - first.at_s, 1e-3)
    moved = {}
    for who, one in last.everybody.items():
        others = [look.everybody[who] for look in looks if who in look.everybody]
        computed = (one.cpu_s - others[0].cpu_s) / took_s
        least = _THREAD_COMPUTES if one.facts.get("is_waiting") else _PROCESS_COMPUTES
        moved[who] = any(other.at != one.at for other in others) or computed > least
    return moved


def link_ranks(look: Look) -> None:
    """Let each rank that waits in a collective wait for those that are not in the same one, and for those that have ended."""
    ranks, everybody = look.ranks(), look.everybody.values()
    names = {rank.rank: rank.who for rank in ranks}
    gone = [one.who for one in everybody if one.kind == "dead" and one.who.startswith("rank ")]
    joining = [one for one in everybody if one.facts.get("op") == "init_process_group"]
    started = [one for one in everybody if one.is_main_thread and one.child is not None and one.kind != "dead" and one.rank is None]
    for one in joining:
        one.targets = [other.who for other in started if other not in joining] + gone
        one.facts["may_end"] = not one.targets and len(joining) >= (one.process.get("world_size") or 0)  # all are here: they only connect
    for one in ranks:
        pending, others = one.pending, [other for other in ranks if other is not one]
        if one in joining or one.targets:
            continue
        if one.facts.get("peer") in names:
            one.targets = [names[one.facts["peer"]]]
        elif pending is not None and (one.kind == "collective" or not one.facts.get("is_waiting")):
            one.kind, one.what = "collective", str(pending)
            calls = ((other, other.call(pending)) for other in others if one.needs(other, pending.group))
            one.targets = [other.who for other, call in calls if call is None or call.key != pending.key] + gone
        elif one.kind == "collective":
            one.targets = [other.who for other in others if other.kind != "collective"] + gone
