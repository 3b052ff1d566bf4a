"""What a nanhunt has counted and found so far."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.nanhunt.replay.bad_step import Outcome
from torchdebug_magics.instruments.nanhunt.report import LayerRow, LiveNan, NanFinding, NanReport
from torchdebug_magics.instruments.nanhunt.verdict import headline, sentence

if TYPE_CHECKING:
    import torch


_MOST_HISTORY = 10_000
_LIVE_HISTORY = 60


class Tally:
    """Counts, history and findings; frozen into a report at the end, copied into a snapshot for the live view."""

    def __init__(self, most_findings: int) -> None:
        self.steps = self.backwards = self.forwards = self.meant = self.overflows = 0
        self.history: deque[float] = deque(maxlen=_MOST_HISTORY)
        self.losses: deque[float] = deque(maxlen=_MOST_HISTORY)
        self.bad: dict[str, torch.Tensor] = {}
        self.phase = "watching"
        self.raised = ""
        self._most = most_findings
        self._findings: list[NanFinding] = []
        self._taken = 0
        """Findings with those that are the same as an earlier one: each of them costs a replay."""
        self._poisoned = False
        self._layers: tuple[LayerRow, ...] = ()
        self._layers_step: int | None = None
        self._reproduced: bool | None = None
        self._way = ""
        self._started_s = time.perf_counter()

    @property
    def is_full(self) -> bool:
        """Whether there is nothing more to find: enough was found, or an earlier finding has poisoned the weights."""
        return self._poisoned or self._taken >= self._most

    @property
    def has_findings(self) -> bool:
        """Whether anything was found."""
        return bool(self._findings)

    @property
    def last_peak(self) -> float:
        """The largest magnitude at the last backward(); infinite before the first one, of which nothing is known."""
        return next(reversed(self.history), math.inf)

    def checked(self, loss: float, peak: float) -> None:
        """One backward() was looked at."""
        self.losses.append(loss)
        self.history.append(peak)

    def show_layers(self, rows: tuple[LayerRow, ...]) -> None:
        """The layer table of the present step."""
        if rows:
            self._layers, self._layers_step = rows, self.steps

    def add(self, outcome: Outcome) -> Outcome | None:
        """Take a finding in, unless it follows from an earlier one; the outcome if it was taken."""
        finding = outcome.finding
        if finding is None:
            return None
        if self._findings and finding.phase in {"parameter", "optimizer"}:
            self._poisoned = True
            return None
        if not self._findings:
            self._reproduced, self._way, self.bad = outcome.reproduced, outcome.way, outcome.bad
            self.show_layers(outcome.layers)
        self._taken += 1
        for at, known in enumerate(self._findings):
            if _same(known, finding):
                self._findings[at] = replace(known, again=(*known.again, finding.step))
                return outcome
        self._findings.append(finding)
        return outcome

    def _as_left(self, finding: NanFinding) -> NanFinding:
        """A finding with the state of the weights at the end: where the cell went on, it may have updated them."""
        if finding.weights != "weights untouched" or self.steps <= finding.step:
            return finding
        return replace(finding, weights="weights poisoned" if self._poisoned else "weights updated since")

    def report(self, problems: list[str]) -> NanReport:
        """Everything, frozen."""
        if self._poisoned:
            problems = [*problems, "the weights are non-finite since the last finding: later steps were not investigated"]
        findings = tuple(map(self._as_left, self._findings))
        report = NanReport(
            problems=tuple(problems),
            findings=findings,
            steps_count=self.steps,
            backward_count=self.backwards,
            forward_count=self.forwards,
            meant_count=self.meant,
            overflow_steps_count=self.overflows,
            history=tuple(self.history),
            losses=tuple(self.losses),
            layers=self._layers,
            layers_step=self._layers_step,
            reproduced=self._reproduced,
            raised="" if self._findings else self.raised,
            replay=self._way,
        )
        return replace(report, sentence=sentence(report), headline=headline(report))

    def live(self) -> LiveNan:
        """For the live view; any thread may ask."""
        elapsed_s = time.perf_counter() - self._started_s
        losses, history = self.losses, self.history
        return LiveNan(
            steps_count=self.steps,
            backward_count=self.backwards,
            overflow_steps_count=self.overflows,
            loss=losses[-1] if losses else None,
            history=tuple(history[place] for place in range(-min(len(history), _LIVE_HISTORY), 0)),
            steps_per_s=self.backwards / elapsed_s if self.backwards and elapsed_s > 0 else None,
            phase=self.phase,
        )


def _same(one: NanFinding, other: NanFinding) -> bool:
    """Whether two findings of different steps differ in nothing that a user would change."""
    return all(getattr(one, name) == getattr(other, name) for name in ("phase", "kind", "op", "module", "location", "tensor", "diagnosis"))
