"""All that a cause is told by: the last looks, the chain to the root, the ranks, and what was seen of the main thread meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from torchdebug_magics.format import duration
from torchdebug_magics.instruments.hangwatch.everybody.participants import Chain, Look, Participant
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.report import HangFinding, State
from torchdebug_magics.report import Location


@dataclass
class Evidence:
    """Handed to each cause in turn; a cause looks at nothing else."""

    looks: list[Look]
    chain: Chain
    moved: dict[str, bool]
    ranks: list[Participant]
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
        self, cause: str | None, headline: str, fix: str = "", reason: str = "", at: Participant | None = None, state: State = "stuck"
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
            waits=tuple(other.as_wait() for other in self.look.everybody.values() if other in self.chain.path or other.is_shown),
            chain=self.chain.names,
            since_s=self.still_s,
        )


Words: TypeAlias = str | Callable[[Evidence, Participant], str]
"""A text with ``{who}``, ``{what}`` and so on, or a function that makes it."""


@dataclass(frozen=True)
class Row:
    """A cause: when it applies to whom, and what is said then."""

    cause: str
    when: Callable[[Evidence, Participant], object]
    headline: Words
    fix: Words
    reason: Words = ""
    whom: Callable[[Evidence], Participant | None] = lambda case: case.root
    """Whom it is about; None where there is no such participant."""
    state: State = "stuck"

    def __call__(self, case: Evidence) -> HangFinding | None:
        """The finding; None where the cause does not apply."""
        one = self.whom(case)
        if one is None or not self.when(case, one):
            return None
        headline, fix, reason = (self._said(words, case, one) for words in (self.headline, self.fix, self.reason))
        return case.found(self.cause, headline, fix, reason, one, self.state)

    @staticmethod
    def _said(words: Words, case: Evidence, one: Participant) -> str:
        if not isinstance(words, str):
            return words(case, one)
        calls = one.facts.get("calls")
        return words.format(
            who=one.name, what=one.what or one.kind, a_what=one.a_what, in_call=f" in `{calls}`" if calls else "", calls=calls,
            in_worker=one.in_worker, still=duration(case.still_s), main=case.main.name,
            single="`num_workers=0`" if one.in_worker else "a single process",
        )  # fmt: skip


Cause: TypeAlias = Callable[[Evidence], HangFinding | None]


def first(causes: Iterable[Cause], case: Evidence) -> HangFinding | None:
    """By the first cause that applies."""
    return next((found for cause in causes if (found := cause(case)) is not None), None)
