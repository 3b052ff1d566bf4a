"""What several instruments found in one cell: the finding that explains the others, and one line for each of those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchdebug_magics.format import plural
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.report import Finding, Location, Report, Stage, Status

_CHAINS = (("autograd", "gradwatch", "nanhunt"), ("shapes",), ("memtrace",), ("hangwatch",))
"""In each chain, what an earlier instrument finds may be the cause of what a later one does."""
_STAGES: tuple[Stage, ...] = ("end", "fault", "remark", "symptom", "outcome")
_SOUND: Mapping[str, str] = {
    "nanhunt": "all values are finite", "autograd": "gradients arrive", "gradwatch": "updates look healthy",
    "memtrace": "no memory grows", "hangwatch": "no pause",
}  # fmt: skip
"""What holds where an instrument has found nothing and has seen the cell to its end."""


@dataclass(frozen=True, kw_only=True)
class WatchReport(Report):
    """The reports of all instruments that watched a cell, judged together."""

    instrument: str | None = None
    """The one whose finding explains the others, such as ``"nanhunt"``; None where nothing is wrong."""
    reports: Mapping[str, Report] = field(default_factory=dict)
    """By the name of the instrument."""
    watched: tuple[str, ...] = ()
    """The instruments that found nothing, and saw the cell to its end."""
    steps_count: int = 0
    """Optimizer steps."""
    consequences: tuple[str, ...] = ()
    """One line for each finding of another instrument."""
    doubts: tuple[str, ...] = ()
    """What speaks against a cell in which no fault was found, behind the name of the magic that has seen it."""
    suggestion: str = ""
    """What to run the cell with: a line to paste above it, or an argument of its loader; empty where the report explains the cell."""
    stopped_at: Location | None = None
    """The user's line at which the cell was stopped, or an error was raised that the report does not explain."""
    values: Mapping[str, str] = field(default_factory=dict)
    """The tensors and numbers that this line names, in a few words."""
    error: str = ""
    """The first line of that error, or that the cell was stopped."""

    @property
    def found(self) -> bool:
        """Whether anything is wrong."""
        return self.instrument is not None

    @property
    def finding(self) -> Finding | None:
        """The finding that explains the others."""
        return self.main_finding()

    @property
    def location(self) -> Location | None:
        """Its line."""
        finding = self.main_finding()
        return None if finding is None else finding.fix_at or finding.location

    @property
    def verdict(self) -> str:
        """That finding in one sentence, or what was watched."""
        return self._leading.verdict if self._leading is not None else self._ended() if self.error else self._sound()

    @property
    def title(self) -> str:
        """What happened and where, or what was watched."""
        return self.verdict if self._leading is None else self._leading.title

    @property
    def status(self) -> Status:
        """``good`` only if what the cell did was watched to its end, values and, in a training, gradients and updates, without a doubt."""
        if self._leading is not None:
            return self._leading.status
        trains = getattr(self.reports.get("nanhunt"), "backward_count", 0)
        is_whole = {"nanhunt", *(("autograd", "gradwatch") if trains else ())} <= {*self.watched} and not (self.cut_short or self.error)
        return "warn" if self.doubts else "good" if is_whole else "info"

    def main_stage(self) -> Stage | None:
        """Of the finding that explains the others."""
        return None if self._leading is None else _stage(self._leading)

    def main_finding(self) -> Finding | None:
        """The finding that explains the others."""
        return None if self._leading is None else self._leading.main_finding()

    @property
    def _leading(self) -> Report | None:
        return None if self.instrument is None else self.reports[self.instrument]

    def _sound(self) -> str:
        sound = [_SOUND[name] for name in _SOUND if name in self.watched]
        if self.doubts:
            return f"No fault found, but {self.doubts[0]}"
        if "nanhunt" not in self.watched and not self.steps_count:
            return "Nothing to watch: no forward pass, no backward pass, no optimizer step"
        where = f" in {plural(self.steps_count, 'step')}" if self.steps_count else ""
        return f"Nothing wrong{where}: {', '.join(sound)}" if sound else f"Nothing wrong was seen{where}"

    def _ended(self) -> str:
        where = "" if self.stopped_at is None else f" at {self.stopped_at}"
        where += f": `{self.stopped_at.source}`" if self.stopped_at is not None and self.stopped_at.source else ""
        then = "nothing explains it"
        if self.suggestion.startswith("%%"):
            then = f"write `{self.suggestion}` as the first line of the cell and run it again"
        elif self.suggestion:
            then = f"pass `{self.suggestion}` to the `DataLoader` and run the cell again: `%torchdebug` then sees the values in this line"
        return f"{self.error.rstrip('.')}{where} · {then}"


def compared(report: WatchReport) -> Compared:
    """Whether it has a finding, and after how many steps."""
    found_at = (getattr(report.finding, "step", report.steps_count), 0) if report.found else None
    return Compared(worked=bool(report.steps_count or report.found or report.watched), found_at=found_at)


def judged(reports: Mapping[str, Report], magics: Mapping[str, str]) -> WatchReport:
    """One report out of several: the chain that ended the cell leads, and in it what lies nearest to the cause.

    `magics` has the name under which each instrument is known to the user.
    """
    chain = _chain(reports)
    leading = next(iter(chain), None)
    others = [
        f"{magics[name]}: {report.title}"
        for name, report in reports.items()
        if _stage(report) is not None and name != leading and (name not in chain or _adds(report, reports[leading or name]))
    ]
    return WatchReport(
        instrument=leading,
        reports=reports,
        watched=tuple(name for name, report in reports.items() if report.status == "good" and not report.cut_short),
        # Optimizers that step in turn, as in a GAN, share a step of gradwatch's.
        steps_count=next(filter(None, (getattr(reports.get(name), "steps_count", 0) for name in ("gradwatch", "nanhunt"))), 0),
        consequences=tuple(others),
        doubts=()
        if chain
        else tuple(f"{magics[name]}: {doubt}" for name, report in reports.items() for doubt in getattr(report, "doubts", ())),
    )


def stage_of(reports: Mapping[str, Report]) -> Stage | None:
    """Of the finding that leads."""
    return next((_stage(reports[name]) for name in _chain(reports)), None)


def _chain(reports: Mapping[str, Report]) -> list[str]:
    """The instruments of the chain that leads, the nearest to the cause first."""
    stages = {name: stage for name, report in reports.items() if (stage := _stage(report)) is not None}
    chains = [[name for name in chain if name in stages] for chain in _CHAINS]
    # What ended the cell is what the user wants to know first.
    urgency = {name: 0 if stage in {"end", "outcome"} else _STAGES.index(stage) for name, stage in stages.items()}
    chain = min(filter(None, chains), key=lambda chain: min(urgency[name] for name in chain), default=[])
    ended = any(stages[name] == "outcome" for name in chain)

    def place(name: str) -> tuple[int, bool]:
        """Of two faults, the one whose fix was tried comes first."""
        is_last = ended and stages[name] == "remark"
        return len(_STAGES) if is_last else _STAGES.index(stages[name]), reports[name].fix_state != "verified"

    return sorted(chain, key=place)


def _stage(report: Report) -> Stage | None:
    """Of what was found; a finding whose error was handled, so that the cell went on, is no end of it."""
    stage = report.main_stage()
    return "fault" if stage in {"end", "outcome"} and not report.cut_short else stage


def _adds(report: Report, leading: Report) -> bool:
    """Whether it says anything that the leading one of the same chain does not."""
    own, other = report.main_finding(), leading.main_finding()
    return own is not None and other is not None and (own.fix != other.fix or own.fix_at != other.fix_at)
