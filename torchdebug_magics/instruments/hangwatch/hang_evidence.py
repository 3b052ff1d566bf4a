"""All that a cause is told by: the last looks, the chain to the root, the ranks, and what was seen of the main thread meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.hangwatch.everybody.participants import Chain, Look, Participant
from torchdebug_magics.instruments.hangwatch.everybody.rank_states import RankState
from torchdebug_magics.instruments.hangwatch.report import HangFinding, State
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress


@dataclass
class Evidence:
    """Handed to each cause in turn; a cause looks at nothing else."""

    looks: list[Look]
    chain: Chain
    moved: dict[str, bool]
    ranks: list[RankState]
    progress: Progress
    still_s: float
    doing: Counter[str] = field(default_factory=Counter)
    """What the main thread did at each look since the last progress: ``"compiling"``, ``"network"``, ..."""

    @property
    def look(self) -> Look:
        """The last one."""
        return self.looks[-1]

    @property
    def main(self) -> Participant:
        """The thread whose cell is watched."""
        return self.look.main

    @property
    def root(self) -> Participant:
        """Whom the main thread waits for in the end."""
        return self.chain.root

    def line(self, one: Participant | None = None) -> Location | None:
        """Of a participant; of one that runs no code of the user's, the line of whoever waits for it."""
        if one is not None and one.location is not None:
            return one.location
        on_way = self.chain.path if one is None or one not in self.chain.path else self.chain.path[: self.chain.path.index(one) + 1]
        return next((other.location for other in reversed(on_way) if other.location is not None), self.main.location)

    def found(
        self, state: State, cause: str | None, headline: str, fix: str = "", reason: str = "", at: Participant | None = None
    ) -> HangFinding:
        """A finding about `at`, or about the root."""
        one = at if at is not None else self.root
        return HangFinding(
            state=state,
            cause=cause,
            headline=headline,
            fix=fix,
            reason=reason,
            location=self.line(one),
            root=one.as_wait(),
            waits=tuple(other.as_wait() for other in self.look.everybody.values() if self._counts(other)),
            chain=self.chain.names,
            since_s=self.still_s,
        )

    def _counts(self, one: Participant) -> bool:
        """Whether it is worth a row: not a library's own thread that nobody waits for."""
        if one.is_old and one not in self.chain.path:
            return False
        return one in self.chain.path or bool(one.location) or one.kind == "dead" or bool(one.process and one.is_main_thread)
