"""What a watch leaves behind: whether the cell came to a stop, who waits for whom, why, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torchdebug_magics.format import duration
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.report import Finding, Location, Report, Stage, Status, located, short_title

State: TypeAlias = Literal["finished", "slow", "stuck", "interrupted"]
STATUS: Mapping[State, Status] = {"finished": "good", "slow": "warn", "stuck": "bad", "interrupted": "info"}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One participant, and what it waits for: a thread, a DataLoader worker, a process or a rank."""

    who: str
    """``"main"``, ``"thread NAME"``, ``"worker 0"``, ``"process NAME"``, ``"rank 1"``, ``"task NAME"``."""
    pid: int
    location: Location | None
    """The innermost line of the user's code; None where it runs none, or its process cannot be asked."""
    kind: str
    """``"lock"``, ``"queue"``, ``"event"``, ``"join"``, ``"batch"``, ``"collective"``, ``"input"``, ``"sleep"``, ``"io"``, ``"native"``,
    ``"gil"``, ``"python"`` or ``"dead"``."""
    waits_for: str | None
    """Another participant; itself for a lock that it holds."""
    what: str
    """A phrase: ``"batch 2"``, ``"all_reduce #3 [4]"``."""
    stack: tuple[Location, ...] = ()
    """The lines of the user's code, the outermost first."""
    exit_code: int | None = None
    """Of a process that has ended, negative for a signal."""
    acquired: Location | None = None
    """Where the lock was acquired that is waited for."""


@dataclass(frozen=True, kw_only=True)
class HangFinding(Finding):
    """Why there was no progress."""

    state: State
    """The worst that was seen. ``"finished"``: never without progress for `after_s`; ``"interrupted"``: stopped before that."""
    cause: str | None
    headline: str
    """Subject, verb, object, without the line."""
    reason: str = ""
    root: Wait | None = None
    waits: tuple[Wait, ...] = ()
    chain: tuple[str, ...] = ()
    """From the main thread to the root, a `who` each; of a cycle, the first comes again at the end."""
    since_s: float = 0.0
    """How long nothing had gone on when it was found, at the last look."""

    @property
    def stage(self) -> Stage:
        """A cell that was only slow has ended by itself."""
        return "symptom" if self.state == "slow" else "end"

    @property
    def title(self) -> str:
        """What happened, and where, for a page that is shown while the cell runs."""
        first = self.headline.partition(", and ")[0]
        return short_title(f"{self._begin}{self.headline}", self.location, shorter=f"{self._begin}{first}")

    @property
    def _begin(self) -> str:
        """How the cell stands, before the headline."""
        return f"{self.state.capitalize()}: "


def unending(headline: str, where: Location | None, fix: str, reason: str = "", state: State = "stuck", **more: Any) -> HangFinding:
    """A loop that does not end, `where` it begins or turns round."""
    return HangFinding(state=state, cause="infinite_loop", headline=headline, location=where, fix=fix, reason=reason, **more)


@dataclass(frozen=True, kw_only=True)
class LiveHang:
    """The state of a watched cell while the session is open."""

    elapsed_s: float
    still_s: float
    """Since the last progress, so far."""
    finding: HangFinding | None
    rate: float | None
    """See `HangReport`."""
    at: Location | None

    @property
    def standing(self) -> str:
        """In one line, for the kernel after this one."""
        if self.finding is None:
            return ""
        word = self.finding.state.capitalize()
        return located(f"{word} for {duration(self.finding.since_s)}: {self.finding.headline}", self.finding.location)


@dataclass(frozen=True, kw_only=True)
class HangReport(HangFinding, Report):
    """Whether a cell, or the cells between ``on`` and ``off``, made progress; if not, who waits for whom, why, and what to change.

    It has every field of `HangFinding`, too.
    """

    still_s: float = 0.0
    """The longest time without progress."""
    elapsed_s: float = 0.0
    after_s: float = 0.0
    rate: float | None = None
    """Steps of an optimizer per second; None without one."""
    data_share: float | None = None
    """Of the looks at the main thread, those in which it waited for a DataLoader; None without one."""
    ended_by: str
    """``"itself"``, ``"error"``, ``"Stop"`` or ``"--stop"``."""
    stopped_count: int = 0
    """Processes of the cell that were ended with it."""

    @property
    def verdict(self) -> str:
        """What happened, and where."""
        data = f", {self.waiting_for_data}" if self.rate is not None and self.waiting_for_data else ""
        return located(f"{self._begin}{self.headline}", self.location) if self._begin else f"{self._finished()}{data}"

    @property
    def title(self) -> str:
        """What happened, and where, shortened to the first clauses of the headline."""
        return super().title if self._begin else self._finished()

    @property
    def status(self) -> Status:
        """``good`` only if the cell ended by itself."""
        if self.state == "finished":
            return "warn" if self.cause is not None else "info" if self.ended_by == "error" else "good"
        return STATUS[self.state]

    def main_finding(self) -> Finding | None:
        """The report itself, where the cell stood still, or a thread or process of it failed."""
        return self if self.state in {"slow", "stuck"} or self.cause is not None else None

    @property
    def waiting_for_data(self) -> str:
        """How much of the time the main thread waited for a DataLoader, where that was most of it."""
        return f"{self.data_share:.0%} of the time in the DataLoader" if self.data_share is not None and self.data_share >= 0.5 else ""  # noqa: PLR2004 - more than anything else

    @property
    def _begin(self) -> str:
        """How the cell ended, before the headline; empty where there is none."""
        if self.state in {"stuck", "slow"}:
            return super()._begin
        if self.cause is not None:
            return f"Ended after {duration(self.elapsed_s)}: "
        return f"Interrupted after {duration(self.elapsed_s)}: " if self.state == "interrupted" else ""

    def _finished(self) -> str:
        speed = "" if self.rate is None else f" · {self.rate:.3g} steps per second"
        ended = "Ended with an error after" if self.ended_by == "error" else "Finished in"
        return f"{ended} {duration(self.elapsed_s)}: no pause of {duration(self.after_s)} or longer{speed}"


def compared(report: HangReport) -> Compared:
    """Whether it stood still; the launcher's own report, which has seen all of them, is shown before a rank's."""
    return Compared(found_at=(0, 0) if report.state in {"stuck", "slow"} or report.cause is not None else None)
