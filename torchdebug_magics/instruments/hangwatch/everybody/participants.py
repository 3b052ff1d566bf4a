"""Everybody who may wait or be waited for, at one moment: threads of this process, and processes that it has started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.hangwatch.report import Wait
from torchdebug_magics.probing.source.code_owner import owner
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.probing.children.launching import Child
    from torchdebug_magics.report import Location

__all__ = ["Look", "Participant"]


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
    is_silent: bool = False
    """Whether its agent did not answer: no Python thread gets a turn there."""
    is_old: bool = False
    """Whether it is a thread that was there when the watch began."""
    sleeps_in: str = ""
    """A system call, see `waits_in`."""

    @property
    def is_child(self) -> bool:
        """Whether `multiprocessing` has started its process, in which no prompt can be answered."""
        return bool(self.process.get("is_child"))

    @property
    def stack(self) -> tuple[Location, ...]:
        """The lines of the user's code, the outermost first."""
        return tuple(location(file, line, name) for file, line, name in reversed(self.frames) if owner(file) == "user")

    @property
    def location(self) -> Location | None:
        """The innermost of them; of a process that has ended by an error, the line that raised."""
        return self.stack[-1] if self.stack else None

    def as_wait(self) -> Wait:
        """As the report has it."""
        acquired = self.facts.get("acquired")
        return Wait(
            who=self.who,
            pid=self.pid,
            location=self.location,
            kind=self.kind,
            waits_for=self.targets[0] if self.targets else None,
            what=self.what,
            stack=self.stack,
            exit_code=self.exit_code,
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
        found = [one for one in self.everybody.values() if one.is_main_thread and one.process.get("rank") is not None]
        return sorted(found, key=lambda one: int(one.process["rank"]))
