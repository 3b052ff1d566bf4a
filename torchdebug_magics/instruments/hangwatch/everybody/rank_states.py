"""The ranks of a distributed job side by side: which collective each has issued, which it waits in, and who has not come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant

_UNEQUAL = frozenset({"scatter", "gather", "all_gather", "all_to_all", "all_to_allv", "alltoall", "alltoall_base"})
"""In which ranks may give tensors of different sizes."""


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
class RankState:
    """One rank."""

    rank: int
    one: Participant
    issued: list[Issued] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)
    """The ranks of each group that this one is in."""

    @property
    def pending(self) -> Issued | None:
        """The first that it has called and that is not done."""
        return next((call for call in self.issued if not call.is_done), None)

    @property
    def in_backward(self) -> bool:
        """Whether its main thread is in a backward pass, in which DistributedDataParallel issues collectives."""
        return any(name == "_engine_run_backward" for _, _, name in self.one.frames)

    def needs(self, other: RankState, group: str) -> bool:
        """Whether another rank has to take part in its collectives of a group."""
        return other.rank in self.groups.get(group, [other.rank])

    def number(self, group: str) -> int:
        """Of the last collective that it has called in a group; 0 for none."""
        return max((call.number for call in self.issued if call.group == group), default=0)

    def has_done(self, like: Issued) -> bool:
        """Whether it has been through the same collective before, in an earlier step."""
        return any(call.is_done and call.key == like.key and call.number != like.number for call in self.issued)

    def call(self, like: Issued) -> Issued | None:
        """What it has called in the same group as the collective of the same number."""
        return next((call for call in self.issued if (call.group, call.number) == (like.group, like.number)), None)


def rank_states(look: Look) -> list[RankState]:
    """The ranks that could be asked, in their order."""
    states = []
    for one in look.ranks():
        recorded = one.process.get("collectives") or {"entries": [], "groups": {}}
        issued = [call for entry in recorded["entries"] if not (call := Issued(**entry)).is_p2p]
        states.append(RankState(int(one.process["rank"]), one, issued, recorded["groups"]))
    return states


def link_ranks(look: Look) -> None:
    """Let each rank that waits in a collective wait for those that are not in the same one."""
    states = rank_states(look)
    names = {state.rank: state.one.who for state in states}
    joining = [one for one in look.everybody.values() if one.facts.get("op") == "init_process_group"]
    for one in joining:
        one.targets = [other.who for other in look.everybody.values() if _could_join(other, joining)] + _gone(look, one)
        one.facts["may_end"] = not one.targets and len(joining) >= (one.process.get("world_size") or 0)  # all are here: they only connect
    for state in states:
        pending, one = state.pending, state.one
        if one in joining or one.targets:
            continue
        if one.facts.get("peer") in names:
            one.targets = [names[one.facts["peer"]]]
        elif pending is not None and (one.kind == "collective" or not one.facts.get("is_waiting")):
            one.kind, one.what = "collective", str(pending)
            others = [other for other in states if other is not state and state.needs(other, pending.group)]
            calls = ((other, other.call(pending)) for other in others)
            one.targets = [other.one.who for other, call in calls if call is None or call.key != pending.key] + _gone(look, one)
        elif one.kind == "collective":
            one.targets = [other.one.who for other in states if other is not state and other.one.kind != "collective"] + _gone(look, one)


def _could_join(other: Participant, joining: Sequence[Participant]) -> bool:
    """Whether it was started like those that join, and has not joined."""
    return (
        other not in joining
        and other.is_main_thread
        and other.child is not None
        and other.kind != "dead"
        and other.process.get("rank") is None
    )


def _gone(look: Look, one: Participant) -> list[str]:
    """Ranks that have ended: processes of the same job that are no more."""
    return [other.who for other in look.everybody.values() if other.kind == "dead" and other.who.startswith("rank ") and other is not one]
