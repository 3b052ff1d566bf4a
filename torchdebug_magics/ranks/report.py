"""What the ranks of a job found, in one report: a row a rank, where they differ, and the report of the rank in which it began."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torchdebug_magics.report import Finding, Location, Report, Status

RankState: TypeAlias = Literal["finished", "raised", "interrupted", "died"]
RankFindingKind: TypeAlias = Literal[
    "same_batch", "initial_weights", "replicas_part", "buffers_drift", "uneven_memory", "shapes_differ", "collective_overflow"
]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of a job."""

    rank: int
    host: str
    pid: int
    device: str
    """Such as ``"cuda:1"``; ``"cpu"`` where no accelerator was in use."""
    elapsed_s: float
    state: RankState = "interrupted"
    exit_code: int | None = None
    """Negative for a signal; None where the process had not ended, or nobody knows."""
    report: Report | None = None
    """Its own; None where it left none."""
    found: bool = False
    """Whether its own report has a finding."""
    error: str = ""
    """In which it ended, such as ``"ValueError: no such class"``; of one that could not begin, why."""
    location: Location | None = None
    """The innermost line of the user's code at that error, or where it was last seen."""

    @property
    def is_terminated(self) -> bool:
        """Whether its launcher ended it, as it does when another rank has failed."""
        return self.state == "died" and self.exit_code == -signal.SIGTERM

    @property
    def verdict(self) -> str:
        """Its own report's verdict, or how it ended."""
        return self.report.verdict if self.report is not None else self.ending

    @property
    def title(self) -> str:
        """Its own report's title, or how it ended."""
        return self.report.title if self.report is not None else self.ending

    @property
    def ending(self) -> str:
        """How it ended, in a few words."""
        at = f" at {self.location}" if self.location is not None else ""
        match self.state:
            case "raised":
                return f"exited with code {self.exit_code}{at}" if self.error.startswith("SystemExit") else f"raised {self.error}{at}"
            case "interrupted":
                return f"was interrupted{at}" if self.exit_code is not None or self.report is not None else f"had not ended{at}"
            case "died" if self.exit_code is None:
                return f"left no report{at and f', last seen{at}'}"
            case "died":
                code = self.exit_code or 0
                how = "terminated by its launcher (SIGTERM)" if self.is_terminated else f"killed by {signal_name(-code)}"
                ended = f"was {how}{at}" if code < 0 else f"exited with code {code}{at}"
                return f"{ended}: {self.error}" if self.error else ended
            case _:
                return "finished"


def signal_name(number: int) -> str:
    """``"SIGKILL"``; ``"signal 42"`` for a real-time signal, or another system's."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """Where ranks differ that should agree, or agree where they should differ."""

    kind: RankFindingKind
    ranks: tuple[int, ...]
    """The ranks out of line; for ``same_batch``, those that share samples."""
    step: int | None = None
    """Optimizer steps completed before it; None where that is not known, or it is of the whole run."""
    tensor: str = ""
    """The first parameter, buffer, module or input that differs; empty where none is known."""
    location: Location | None = None
    fix: str
    sentence: str
    """What differs, in one sentence."""
    is_harmless: bool = False
    """Whether it is a note: the program itself puts it right, as DistributedDataParallel does with initial weights, or it may be meant."""


@dataclass(frozen=True, kw_only=True)
class RanksReport(Report):
    """The ranks' reports in one. It has every field of the instrument's own report, taken from rank `first`, or else from rank 0."""

    instrument: str
    ranks: tuple[Rank, ...]
    """In order."""
    first: int | None
    """The rank whose finding came first; None where no rank has one."""
    rank_findings: tuple[RankFinding, ...] = ()
    shown: Report | None = None
    """The instrument's own report whose fields these are."""
    sentence: str = ""
    """The verdict, written when the ranks were merged."""
    headline: str = ""
    """The first of it, without what has a row of its own, such as the fix."""
    beside: tuple[str, ...] = ()
    """The sentences that did not fit into the headline."""

    @property
    def verdict(self) -> str:
        """Which rank failed first, and how; or that nothing is wrong on any rank."""
        return self.sentence

    @property
    def title(self) -> str:
        """The headline of the page."""
        return self.headline or self.sentence

    def rank(self, number: int) -> Rank:
        """The rank of that number; a KeyError where it is not here."""
        for one in self.ranks:
            if one.rank == number:
                return one
        raise KeyError(number)

    @property
    def status(self) -> Status:
        """``bad`` where ranks differ, or one of them failed; else that of the instrument's own report."""
        if any(not finding.is_harmless for finding in self.rank_findings) or any(rank.state in {"raised", "died"} for rank in self.ranks):
            return "bad"
        return "info" if self.shown is None else self.shown.status

    def main_finding(self) -> Finding | None:
        """Of the ranks, else of the instrument's own report."""
        return super().main_finding() or (None if self.shown is None else self.shown.main_finding())

    def to_dict(self) -> dict[str, Any]:
        """With the fields of the instrument's own report."""
        own = super().to_dict()
        del own["shown"]
        return {**({} if self.shown is None else self.shown.to_dict()), **own}

    def __getattr__(self, name: str) -> Any:
        shown = self.__dict__.get("shown")  # not there yet while it is unpickled
        if shown is None or name.startswith("__"):
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(shown, name)
