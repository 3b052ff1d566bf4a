"""Ranks built by hand, as an instrument in each of them would leave them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.nanhunt.report import NanFinding, NanReport
from torchdebug_magics.ranks.compared import Compared, Moment, RankRecord
from torchdebug_magics.ranks.report import Rank
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.ranks.report import RankFindingKind

FOUND = NanFinding(kind="nan", phase="loss", op="log", module=None, call=None, step=0, backward=0)
WELL = "No NaN or inf: 5 backward passes checked"
LINE = Location(cell=None, file="/home/ada/train.py", line=12, function="train", source="loss.backward()")


def record(number: int, verdict: str = WELL, *, state: Any = "finished", exit_code: int | None = 0, **compared: Any) -> RankRecord:
    """A rank of a nanhunt; `compared` are the fields of what is compared."""
    report = NanReport(sentence=verdict, headline=verdict, findings=(FOUND,)) if "found_at" in compared else NanReport(sentence=verdict)
    rank = Rank(
        rank=number, host="node", pid=100 + number, device="cpu", state=state, exit_code=exit_code, report=report, elapsed_s=1.0 + number
    )  # fmt: skip
    return RankRecord(rank=rank, compared=Compared(**compared))


def with_moments(number: int, kind: RankFindingKind, digests: dict[int | None, int], **details: dict[str, int]) -> RankRecord:
    """A rank with a digest a step; `details` by ``step_3``."""
    moments = tuple(Moment(kind, step, digest, LINE) for step, digest in digests.items())
    of_steps: dict[Any, Any] = {(kind, int(name.removeprefix("step_"))): value for name, value in details.items()}
    return record(number, moments=moments, details=of_steps)


def without_report(number: int, **changes: Any) -> RankRecord:
    one = record(number)
    return replace(one, rank=replace(one.rank, report=None, **changes), compared=Compared(worked=False))
