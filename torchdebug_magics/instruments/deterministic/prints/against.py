"""Compares the fingerprints of two runs: of other cells, processes, machines or versions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint
from torchdebug_magics.instruments.deterministic.report import Cause, DeterministicReport, Divergence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.deterministic.fingerprint import OpPrint

__all__ = ["compared", "earlier_print"]

_Pair: TypeAlias = "tuple[OpPrint | None, OpPrint | None]"


def earlier_print(named: object, namespace: Mapping[str, object]) -> Fingerprint:
    """The fingerprint in a report, in the variable of that name, or in a file; a `TorchDebugError` where there is none."""
    value = namespace.get(named, named) if isinstance(named, str) else named
    if isinstance(value, DeterministicReport):
        if value.fingerprint is None:
            msg = f"--against {named}: that report has no fingerprint: run its cell again with `-o {named}` or `--save FILE`"
            raise TorchDebugError(msg)
        return value.fingerprint
    if isinstance(value, (str, Path)) and Path(value).is_file():
        try:
            held = json.loads(Path(value).read_text(encoding="utf-8"))
            return Fingerprint.from_dict(held["fingerprint"])
        except (ValueError, KeyError, TypeError) as error:
            msg = f"--against {named}: the file holds no fingerprint: write one with `--save {named}`"
            raise TorchDebugError(msg) from error
    msg = f"--against {named}: neither a variable with a report of `%%deterministic -o` nor a file of `--save` is called so"
    raise TorchDebugError(msg)


def compared(earlier: Fingerprint, later: Fingerprint, *, rtol: float | None) -> Divergence | None:
    """The first op that differs; with `rtol`, the first whose sums differ by more than that, relative to the sum of magnitudes."""
    seen: dict[tuple[str, object], int] = {}
    foreign: OpPrint | None = None
    for before, now in _exactly(earlier, later) if rtol is None else _aligned(earlier, later):
        if now is not None:
            key = now.op, now.place
            seen[key] = seen.get(key, 0) + 1
        occurrence = seen.get((now.op, now.place), 1) if now is not None else 1
        if before is None or now is None or _way(before) != _way(now):
            return _of_way(before, now, occurrence)
        if rtol is None and before.given != now.given:
            said = f"`{now.op}` was given other data than then, which no op of torch's has made"
            return _divergence(now, occurrence, "outside_data", said, fix=_MADE_ANEW)
        if foreign is None and before.given != now.given:
            foreign = now
        if not (before.gave == now.gave or before.is_unread) if rtol is None else not _close(before, now, rtol):
            if foreign is not None:
                said = f"what it comes from was other data than then, first met at `{foreign.op}`, which no op of torch's has made"
                return _divergence(now, occurrence, "outside_data", said, fix=_MADE_ANEW)
            cause, said = _why(earlier, later, now, rtol)
            return _divergence(now, occurrence, cause, said)
    return None


_MADE_ANEW = "let the cell make or load its data and its model itself: weights that were trained since are other ones"


def _exactly(earlier: Fingerprint, later: Fingerprint) -> Iterator[_Pair]:
    return zip_longest(earlier, later)


def _aligned(earlier: Fingerprint, later: Fingerprint) -> Iterator[_Pair]:
    """Another device or version computes some calls by other ops: what is between is passed by."""
    before, now = list(earlier), list(later)
    for block in SequenceMatcher(None, [_way(one) for one in before], [_way(one) for one in now], autojunk=False).get_matching_blocks():
        yield from zip(before[block.a : block.a + block.size], now[block.b : block.b + block.size], strict=True)


def _way(one: OpPrint) -> tuple[str, object]:
    """The same line of the same code may be in a cell of another number, in another process."""
    place = one.place
    return one.op, None if place is None else (place.line, place.source, place.function)


def _close(before: OpPrint, now: OpPrint, rtol: float) -> bool:
    if math.isnan(before.total) or math.isnan(now.total):
        return math.isnan(before.total) == math.isnan(now.total)
    largest = max(before.magnitude, now.magnitude)
    if math.isinf(largest):
        return before.total == now.total and before.magnitude == now.magnitude
    return max(abs(before.total - now.total), abs(before.magnitude - now.magnitude)) <= rtol * largest


def _of_way(before: OpPrint | None, now: OpPrint | None, occurrence: int) -> Divergence:
    one = now or before
    assert one is not None
    went = [f"`{each.op}` ({each.place})" if each is not None else "its end" for each in (before, now)]
    said = f"then the run went to {went[0]}, now to {went[1]}"
    return Divergence(
        op=one.op,
        module=one.module or None,
        location=one.place,
        occurrence=occurrence,
        cause="control_flow",
        explanation=said,
        fix="",
        other=before.place if before is not None and now is not None else None,
        phase="backward" if one.is_backward else "forward",
    )


def _why(earlier: Fingerprint, later: Fingerprint, now: OpPrint, rtol: float | None) -> tuple[Cause, str]:
    if now.is_random:
        return "unseeded_generator", f"`{now.op}` drew other numbers than then: another seed, or a generator that is not seeded"
    beyond = f"differs by more than {rtol:g} in" if rtol is not None else "gave other bits in"
    names = {
        "torch": (earlier.torch_version, later.torch_version),
        "the device": (earlier.device, later.device),
        "the number of threads": (earlier.threads_count, later.threads_count),
    }
    changed = [f"{name} was {before} then and is {after} now" for name, (before, after) in names.items() if before != after]
    if changed:
        return "unknown", f"`{now.op}` {beyond} its result on equal inputs: {', '.join(changed)}"
    return "nondeterministic_op", f"`{now.op}` {beyond} its result on equal inputs"


def _divergence(now: OpPrint, occurrence: int, cause: Cause, said: str, fix: str = "") -> Divergence:
    return Divergence(
        op=now.op,
        module=now.module or None,
        location=now.place,
        occurrence=occurrence,
        cause=cause,
        explanation=said,
        fix=fix,
        phase="backward" if now.is_backward else "forward",
    )
