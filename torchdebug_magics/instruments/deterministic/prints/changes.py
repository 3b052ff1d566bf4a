"""Why the later of two runs has other results: what draws, an optimizer's step, a line that was edited, data, or the op itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.prints.alignment import Run, edited_lines, roots, text_of
from torchdebug_magics.instruments.deterministic.prints.draws import shifted
from torchdebug_magics.instruments.deterministic.prints.edits import edit_behind, edit_with, quoted
from torchdebug_magics.instruments.deterministic.prints.updates import updated_otherwise
from torchdebug_magics.instruments.deterministic.report import Divergence

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint, OpPrint
    from torchdebug_magics.instruments.deterministic.report import Cause
    from torchdebug_magics.report import Location

__all__ = ["MADE_ANEW", "difference", "divergence", "reason"]

MADE_ANEW = "let the cell make or load its data and its model itself: weights that were trained since are other ones"


def difference(before: Fingerprint, now: Fingerprint) -> Divergence | None:
    """None where every result that both runs come to is the same, to the last bit."""
    earlier, later = Run(before), Run(now)
    edited = edited_lines(earlier, later)
    found = roots(earlier, later, edited)
    if not found:
        return None
    first = found[0]
    op = later.ops[first]
    line = edit_behind(earlier, later, edited, op.place)
    shift = shifted(earlier, later, edited, first)
    if shift is not None and shift.other is None:
        line = line or edit_with("seed", earlier, later, edited)
    if shift is not None and (shift.other is not None or line is None):
        return divergence(later, shift.number, "unseeded_generator", shift.explanation, shift.fix, other=shift.other)
    updated = None if shift is not None else updated_otherwise(earlier, later, first)
    if updated is not None and (updated.is_state or line is None):
        return divergence(later, first, "state_leak", updated.explanation, updated.fix)
    if line is not None:
        return replace(divergence(later, first, "control_flow", line.explanation, other=line.before), location=line.now)
    gone = roots(later, earlier, {old: new for new, old in edited.items()})
    place = earlier.ops[gone[0]].place if gone else None
    if place is not None and text_of(place) not in later.lines:
        return divergence(
            later, first, "control_flow", f"the earlier run computed its input by {quoted(place)}, which is gone", other=place
        )
    return _of_inputs(earlier, later, first, (before, now))


def _of_inputs(earlier: Run, later: Run, number: int, prints: tuple[Fingerprint, Fingerprint]) -> Divergence:
    """No line has changed: what came in from outside of torch, or an op that did not give the same on the same."""
    known = {(op.op, op.given) for op in earlier.ops}
    met = [one for one in (*later.reads[number], number) if (later.ops[one].op, later.ops[one].given) not in known]
    if met:
        op = later.ops[min(met)]
        said = f"`{op.op}` was given other data or numbers than then, which no op of torch's has made"
        return divergence(later, min(met), "outside_data", said, MADE_ANEW)
    partner = _partner(earlier, later, number)
    if partner is not None and not _same_inputs(earlier, partner, later, number):
        said = f"`{later.ops[number].op}` computes with other tensors than then, each of which the earlier run had elsewhere"
        return divergence(later, number, "control_flow", f"{said}: they come in another order", other=earlier.ops[partner].place)
    return divergence(later, number, *reason(*prints, later.ops[number], "gave other bits in"))


def _partner(earlier: Run, later: Run, number: int) -> int | None:
    op, text, which = later.ops[number].op, text_of(later.ops[number].place), later.occurrence(number)
    same = [one for one, other in enumerate(earlier.ops) if other.op == op and text_of(other.place) == text]
    return same[which - 1] if which <= len(same) else None


def _same_inputs(earlier: Run, partner: int, later: Run, number: int) -> bool:
    return [earlier.ops[one].gave for one in earlier.reads[partner]] == [later.ops[one].gave for one in later.reads[number]]


def reason(before: Fingerprint, now: Fingerprint, op: OpPrint, beyond: str) -> tuple[Cause, str]:
    """Why an op differs whose inputs do not."""
    if op.is_random:
        return "unseeded_generator", f"`{op.op}` drew other numbers than then: another seed, or a generator that is not seeded"
    names = {
        "torch": (before.torch_version, now.torch_version),
        "the device": (before.device, now.device),
        "the number of threads": (before.threads_count, now.threads_count),
    }
    changed = [f"{name} was {one} then and is {other} now" for name, (one, other) in names.items() if one != other]
    if changed:
        return "unknown", f"`{op.op}` {beyond} its result on equal inputs: {', '.join(changed)}"
    return "nondeterministic_op", f"`{op.op}` {beyond} its result on equal inputs"


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
