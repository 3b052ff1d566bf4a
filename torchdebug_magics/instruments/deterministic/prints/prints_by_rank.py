"""The fingerprints of several ranks of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.report import DeterministicReport
from torchdebug_magics.probing.children.rank_session import rank_here

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint
    from torchdebug_magics.ranks.report import RanksReport

__all__ = ["NOT_OF_RANKS", "PrintsByRank", "for_ranks", "prints_of_ranks"]

NOT_OF_RANKS = "the earlier run had several ranks, and this process is not one of them"


@dataclass(frozen=True)
class PrintsByRank:
    """To be compared each with the same rank of a later run."""

    prints: Mapping[int, Fingerprint]
    name: str = ""
    """What the user calls them."""

    def __str__(self) -> str:
        return self.name

    def of_this_process(self) -> Fingerprint | None:
        """None where the earlier run had no such rank."""
        number = rank_here()
        return None if number is None else self.prints.get(number)


def for_ranks(earlier: Fingerprint | PrintsByRank, name: str) -> PrintsByRank:
    """What the ranks of a later run are compared with; that of one process is rank 0's."""
    return PrintsByRank(earlier.prints if isinstance(earlier, PrintsByRank) else {0: earlier}, name)


def prints_of_ranks(report: RanksReport) -> PrintsByRank | None:
    """None where no rank wrote one."""
    reports = {one.rank: one.report for one in report.ranks if isinstance(one.report, DeterministicReport)}
    prints = {rank: one.fingerprint for rank, one in reports.items() if one.fingerprint is not None}
    return PrintsByRank(prints) if prints else None
