"""Why the later of two runs has other results: what draws, an optimizer's step, a line that was edited, data, or the op itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.ops.op_plan import is_collective
from torchdebug_magics.instruments.deterministic.prints.alignment import Run, edited_lines, is_new, roots, text_of
from torchdebug_magics.instruments.deterministic.prints.draws import repeated, shifted
from torchdebug_magics.instruments.deterministic.prints.edits import Edit, edit_behind, edit_with
from torchdebug_magics.instruments.deterministic.prints.optimizer_updates import updated_otherwise
from torchdebug_magics.instruments.deterministic.report import Divergence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint, OpPrint
    from torchdebug_magics.instruments.deterministic.report import Cause
    from torchdebug_magics.report import Location

__all__ = ["MADE_ANEW", "difference", "divergence", "reason"]

MADE_ANEW = "create or load the data and the model in the cell itself: weights trained since the earlier run differ"


def difference(before: Fingerprint, now: Fingerprint) -> Divergence | None:
    """None where every result that both runs come to is the same, to the last bit."""
    earlier, later = Run(before), Run(now)
    edited = edited_lines(earlier, later)
    found = roots(earlier, later, edited)
    if not found:
        return _of_strangers(earlier, later)
    first = found[0]
    edit = edit_behind(earlier, later, edited, later.ops[first].place)
    may_be_others = edit is None and _received(later, first) is not None
    shift = None if may_be_others else shifted(earlier, later, edited, first)
    if shift is not None:
        edit = edit or edit_with(("seed",) if shift.other is None else (), earlier, later, edited)
        if edit is None or shift.other is not None:
            return divergence(later, shift.number, "unseeded_generator", shift.explanation, shift.fix, other=shift.other)
        return _of_edit(later, first, edit)
    again = None if may_be_others else repeated(earlier, later, first)
    if again is not None:
        return divergence(later, again.number, "state_leak", again.explanation, again.fix, other=again.other)
    updated = None if may_be_others else updated_otherwise(earlier, later, first)
    if updated is not None:
        edit = edit or edit_with(updated.words, earlier, later, edited)
        if edit is None or not updated.words:
            return divergence(later, first, "state_leak", updated.explanation, updated.fix)
    edit = edit or _line_gone(earlier, later, edited) or edit_with(("seed",), earlier, later, edited)
    return _of_inputs(earlier, later, first, edited, (before, now)) if edit is None else _of_edit(later, first, edit)


def _of_strangers(earlier: Run, later: Run) -> Divergence | None:
    """Other code altogether is not the same numbers; None where the runs have a result in common."""
    of_later_alone = [number for number, op in enumerate(later.ops) if is_new(op, earlier)]
    if not of_later_alone or not earlier.values.keys().isdisjoint(later.values):
        return None
    return divergence(later, of_later_alone[0], "control_flow", "the two runs share no result and no line of code")


def _line_gone(earlier: Run, later: Run, edited: Mapping[str, str]) -> Edit | None:
    """The line of the earlier run's that made what the later one lacks, if it is there no more."""
    gone = roots(later, earlier, {old: new for new, old in edited.items()})
    place = earlier.ops[gone[0]].place if gone else None
    return None if place is None or text_of(place) in later.lines else Edit(None, place)


def _of_inputs(earlier: Run, later: Run, first: int, edited: Mapping[str, str], prints: tuple[Fingerprint, Fingerprint]) -> Divergence:
    """No edited line is behind it: what came in from outside of torch, or an op that did not give the same on the same."""
    op = later.ops[first]
    foreign = _foreign(earlier, later, first)
    if foreign is not None:
        said = f"`{later.ops[foreign].op}` received different input than in the earlier run, created outside PyTorch"
        return divergence(later, foreign, "outside_data", said, MADE_ANEW)
    partner = _partner(earlier, later, first)
    received = _received(later, first)
    if received is not None:
        said = f"`{op.op}` differs after `{received.op}` received numbers from other ranks, which are not compared: see their reports"
        return divergence(later, first, "outside_data", said)
    if partner is not None and _same_inputs(earlier, partner, later, first):
        return divergence(later, first, *reason(*prints, op, "gave different bits"))
    edit = edit_with(("",), earlier, later, edited)
    said = f"`{op.op}` computes with different tensors than in the earlier run"
    if edit is not None:
        return divergence(later, first, "control_flow", f"{said}: the cell was edited since, first: {edit.standing}", other=edit.before)
    other = None if partner is None else earlier.ops[partner].place
    return divergence(later, first, "control_flow", f"{said}: the same tensors arrive in a different order", other=other)


def _received(later: Run, number: int) -> OpPrint | None:
    """The last collective before an op: what other ranks sent may be behind any difference from there on."""
    return next((one for one in reversed(later.ops[:number]) if is_collective(one.op)), None)


def _of_edit(later: Run, number: int, edit: Edit) -> Divergence:
    found = divergence(later, number, "control_flow", edit.explanation, other=edit.before)
    return found if edit.now is None else replace(found, location=edit.now)


def _foreign(earlier: Run, later: Run, number: int) -> int | None:
    """The op that met data, or was given a number, that the earlier run did not have."""
    known: dict[tuple[str, str], set[int]] = defaultdict(set)
    for op in earlier.ops:
        known[op.op, text_of(op.place)].add(op.given)
    for one in sorted((*later.reads[number], number)):
        then = known.get((later.ops[one].op, text_of(later.ops[one].place)))
        if then is not None and later.ops[one].given not in then:
            return one
    return None


def _partner(earlier: Run, later: Run, number: int) -> int | None:
    op, text, which = later.ops[number].op, text_of(later.ops[number].place), later.occurrence(number)
    same = [one for one, other in enumerate(earlier.ops) if other.op == op and text_of(other.place) == text]
    return same[which - 1] if which <= len(same) else None


def _same_inputs(earlier: Run, partner: int, later: Run, number: int) -> bool:
    then, now = ([(run.ops[one].given, run.ops[one].gave) for one in run.reads[at]] for run, at in ((earlier, partner), (later, number)))
    return then == now


def reason(before: Fingerprint, now: Fingerprint, op: OpPrint, beyond: str) -> tuple[Cause, str]:
    """Why an op differs whose inputs do not."""
    if op.is_random:
        return "unseeded_generator", f"`{op.op}` drew different numbers than in the earlier run: a different seed, or an unseeded generator"
    names = {
        "torch": (before.torch_version, now.torch_version),
        "the device": (before.device, now.device),
        "the number of threads": (before.threads_count, now.threads_count),
    }
    changed = [f"{name} was {one} then and is {other} now" for name, (one, other) in names.items() if one != other]
    if changed:
        return "unknown", f"`{op.op}` {beyond} on equal inputs: {', '.join(changed)}"
    return "nondeterministic_op", f"`{op.op}` {beyond} on equal inputs"


def divergence(run: Run, number: int, cause: Cause, said: str, fix: str = "", *, other: Location | None = None) -> Divergence:
    """Of an op of the later run."""
    op = run.ops[number]
    return Divergence(
        op=op.op,
        module=op.module or None,
        location=op.place,
        occurrence=run.occurrence(number),
        cause=cause,
        explanation=said,
        fix=fix,
        other=other,
        phase="backward" if op.is_backward else "forward",
    )
