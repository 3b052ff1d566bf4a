"""Compares the fingerprints of two runs: of other cells, processes, machines or versions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint
from torchdebug_magics.instruments.deterministic.prints.alignment import Run, is_new, text_of
from torchdebug_magics.instruments.deterministic.prints.changes import MADE_ANEW, difference, divergence, reason
from torchdebug_magics.instruments.deterministic.prints.prints_by_rank import PrintsByRank, prints_of_ranks
from torchdebug_magics.instruments.deterministic.report import DeterministicReport
from torchdebug_magics.ranks.report import RanksReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.deterministic.fingerprint import OpPrint
    from torchdebug_magics.instruments.deterministic.report import Divergence

__all__ = ["agreeing_count", "compared", "earlier_print"]


def earlier_print(named: object, namespace: Mapping[str, object]) -> Fingerprint | PrintsByRank:
    """The fingerprint in a report, in the variable of that name, or in a file; a `TorchDebugError` where there is none."""
    value = namespace.get(named, named) if isinstance(named, str) else named
    if isinstance(value, PrintsByRank):
        return value
    if isinstance(value, RanksReport) and (by_rank := prints_of_ranks(value)) is not None:
        return by_rank
    if isinstance(value, (DeterministicReport, RanksReport)):
        if isinstance(value, RanksReport) or value.fingerprint is None:
            msg = f"--against {named}: that report has no fingerprint: rerun its cell with `-o {named}` or `--save FILE`"
            raise TorchDebugError(msg)
        return value.fingerprint
    if isinstance(value, (str, Path)) and Path(value).is_file():
        try:
            held = json.loads(Path(value).read_text(encoding="utf-8"))
            return Fingerprint.from_dict(held["fingerprint"])
        except (ValueError, KeyError, TypeError) as error:
            msg = f"--against {named}: the file holds no fingerprint: write one with `--save {named}`"
            raise TorchDebugError(msg) from error
    msg = f"--against {named}: not the name of a report kept with `%%deterministic -o`, nor a file written by `--save`"
    raise TorchDebugError(msg)


def compared(earlier: Fingerprint, later: Fingerprint, *, rtol: float | None) -> Divergence | None:
    """The op from which the later run has other results; with `rtol`, the first whose sums are further apart."""
    if rtol is None:
        return None if earlier.records == later.records and earlier.ops == later.ops else difference(earlier, later)
    run, foreign = Run(later), None
    for before, now in _aligned(tuple(earlier), run.ops):
        if foreign is None and before.given != run.ops[now].given:
            foreign = run.ops[now]
        if not (before.is_unread or _close(before, run.ops[now], rtol)):
            if foreign is not None:
                said = f"its input differs from the earlier run, first at `{foreign.op}`, and was created outside PyTorch"
                return divergence(run, now, "outside_data", said, MADE_ANEW)
            return divergence(run, now, *reason(earlier, later, run.ops[now], f"differs by more than {rtol:g}"))
    return None


def agreeing_count(earlier: Fingerprint, later: Fingerprint) -> int:
    """How many ops of the later run gave nothing that the earlier one did not have."""
    run = Run(earlier)
    return sum(not is_new(op, run) for op in later)


def _aligned(before: Sequence[OpPrint], now: Sequence[OpPrint]) -> Iterator[tuple[OpPrint, int]]:
    """Another device or version computes some calls by other ops: what is between is passed by."""
    then, later = ([(one.op, text_of(one.place)) for one in run] for run in (before, now))
    for block in SequenceMatcher(None, then, later, autojunk=False).get_matching_blocks():
        yield from zip(before[block.a : block.a + block.size], range(block.b, block.b + block.size), strict=True)


def _close(before: OpPrint, now: OpPrint, rtol: float) -> bool:
    if math.isnan(before.total) or math.isnan(now.total):
        return math.isnan(before.total) == math.isnan(now.total)
    largest = max(before.magnitude, now.magnitude)
    if math.isinf(largest):
        return before.total == now.total and before.magnitude == now.magnitude
    return max(abs(before.total - now.total), abs(before.magnitude - now.magnitude)) <= rtol * largest
