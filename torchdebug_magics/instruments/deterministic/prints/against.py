"""Compares the fingerprints of two runs: of other cells, processes, machines or versions."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import listed
from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint, OpPrint, Update
from torchdebug_magics.instruments.deterministic.ops.op_recording import is_collective
from torchdebug_magics.instruments.deterministic.prints.alignment import (
    EditedLine,
    PrintedRun,
    edit_behind,
    edit_with,
    edited_lines,
    is_copy,
    is_new,
    quoted,
    roots,
    text_of,
)
from torchdebug_magics.instruments.deterministic.report import Cause, DeterministicReport, Divergence
from torchdebug_magics.probing.source.syntax import nodes, parsed
from torchdebug_magics.ranks.report import RanksReport
from torchdebug_magics.report import Location

MADE_ANEW = "create or load the data and the model in the cell itself: weights trained since the earlier run differ"
_AGAIN = "`torch.manual_seed(...)`"


def earlier_print(named: object, namespace: Mapping[str, object]) -> Fingerprint:
    """The fingerprint in a report, in the variable of that name, or in a file; a `TorchDebugError` where there is none."""
    value = namespace.get(named, named) if isinstance(named, str) else named
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
    then, run, foreign = PrintedRun(earlier), PrintedRun(later), None
    before_lines, now_lines = ([(op.op, text_of(op.place)) for op in one.ops] for one in (then, run))
    blocks = SequenceMatcher(None, before_lines, now_lines, autojunk=False).get_matching_blocks()
    # Another device or version computes some calls by other ops: what is between is passed by.
    for before, now in ((then.ops[block.a + place], block.b + place) for block in blocks for place in range(block.size)):
        if foreign is None and before.given != run.ops[now].given:
            foreign = run.ops[now]
        if not (before.is_unread or _close(before, run.ops[now], rtol)):
            if foreign is not None:
                said = f"its input differs from the earlier run, first at `{foreign.op}`, and was created outside PyTorch"
                return divergence(run, now, "outside_data", said, MADE_ANEW)
            return divergence(run, now, *reason(then, run, run.ops[now], f"differs by more than {rtol:g}"))
    return None


def agreeing_count(earlier: Fingerprint, later: Fingerprint) -> int:
    """How many ops of the later run gave nothing that the earlier one did not have."""
    run = PrintedRun(earlier)
    return sum(not is_new(op, run) for op in later)


def _close(before: OpPrint, now: OpPrint, rtol: float) -> bool:
    if math.isnan(before.total) or math.isnan(now.total):
        return math.isnan(before.total) == math.isnan(now.total)
    largest = max(before.magnitude, now.magnitude)
    if math.isinf(largest):
        return before.total == now.total and before.magnitude == now.magnitude
    return max(abs(before.total - now.total), abs(before.magnitude - now.magnitude)) <= rtol * largest


def difference(before: Fingerprint, now: Fingerprint) -> Divergence | None:
    """None where every result that both runs come to is the same, to the last bit."""
    earlier, later = PrintedRun(before), PrintedRun(now)
    edited = edited_lines(earlier, later)
    found = roots(earlier, later, edited)
    if not found:
        return _of_strangers(earlier, later)
    first = found[0]
    edit = edit_behind(earlier, later, edited, later.ops[first].place)
    if edit is not None or _received(later, first) is None:  # else what other ranks have sent may be behind it
        drawn = shifted(earlier, later, edited, first)
        if drawn is not None:
            edit = edit or (edit_with(("seed",), earlier, later, edited) if drawn.other is None else None)
            return drawn if edit is None or drawn.other is not None else _of_edit(later, first, edit)
        if (again := repeated(earlier, later, first)) is not None:
            return again
        updated, words = updated_otherwise(earlier, later, first)
        if updated is not None:
            edit = edit or edit_with(words, earlier, later, edited)
            if edit is None or not words:
                return updated
    edit = edit or _line_gone(earlier, later, edited) or edit_with(("seed",), earlier, later, edited)
    return _of_inputs(earlier, later, first, edited) if edit is None else _of_edit(later, first, edit)


def _of_strangers(earlier: PrintedRun, later: PrintedRun) -> Divergence | None:
    """Other code altogether is not the same numbers; None where the runs have a result in common."""
    of_later_alone = [number for number, op in enumerate(later.ops) if is_new(op, earlier)]
    if not of_later_alone or not earlier.values.keys().isdisjoint(later.values):
        return None
    return divergence(later, of_later_alone[0], "control_flow", "the two runs share no result and no line of code")


def _line_gone(earlier: PrintedRun, later: PrintedRun, edited: Mapping[str, str]) -> EditedLine | None:
    """The line of the earlier run's that made what the later one lacks, if it is there no more."""
    gone = roots(later, earlier, {old: new for new, old in edited.items()})
    place = earlier.ops[gone[0]].place if gone else None
    return None if place is None or text_of(place) in later.lines else EditedLine(None, place)


def _of_inputs(earlier: PrintedRun, later: PrintedRun, first: int, edited: Mapping[str, str]) -> Divergence:
    """No edited line is behind it: what came in from outside of torch, or an op that did not give the same on the same."""
    op = later.ops[first]
    foreign = _foreign(earlier, later, first)
    if foreign is not None:
        said = f"`{later.ops[foreign].op}` received different input than in the earlier run, created outside PyTorch"
        return divergence(later, foreign, "outside_data", said, MADE_ANEW)
    text, which = text_of(op.place), later.occurrence(first)
    alike = [number for number, other in enumerate(earlier.ops) if (other.op, text_of(other.place)) == (op.op, text)]
    partner = alike[which - 1] if which <= len(alike) else None
    received = _received(later, first)
    if received is not None:
        said = f"`{op.op}` differs after `{received.op}` received numbers from other ranks, which are not compared: see their reports"
        return divergence(later, first, "outside_data", said)
    runs = ((earlier, partner), (later, first))
    inputs = [[(run.ops[one].given, run.ops[one].gave) for one in run.reads[at]] for run, at in runs if at is not None]
    if partner is not None and inputs[0] == inputs[1]:
        return divergence(later, first, *reason(earlier, later, op, "gave different bits"))
    edit = edit_with(("",), earlier, later, edited)
    said = f"`{op.op}` computes with different tensors than in the earlier run"
    if edit is not None:
        edited_line = edit.explanation.replace("this line", str(edit.now), 1)
        return divergence(later, first, "control_flow", f"{said}: the cell was edited since, first: {edited_line}", other=edit.before)
    other = None if partner is None else earlier.ops[partner].place
    return divergence(later, first, "control_flow", f"{said}: the same tensors arrive in a different order", other=other)


def _received(later: PrintedRun, number: int) -> OpPrint | None:
    """The last collective before an op: what other ranks sent may be behind any difference from there on."""
    return next((op for op in reversed(later.ops[:number]) if is_collective(op.op)), None)


def _of_edit(later: PrintedRun, number: int, edit: EditedLine) -> Divergence:
    return divergence(later, number, "control_flow", edit.explanation, other=edit.before, location=edit.now)


def _foreign(earlier: PrintedRun, later: PrintedRun, number: int) -> int | None:
    """The op that met data, or was given a number, that the earlier run did not have."""
    known: dict[tuple[str, str], set[int]] = defaultdict(set)
    for op in earlier.ops:
        known[op.op, text_of(op.place)].add(op.given)
    met = [(one, later.ops[one]) for one in sorted((*later.reads[number], number))]
    return next((one for one, op in met if op.given not in known.get((op.op, text_of(op.place)), {op.given})), None)


def reason(earlier: PrintedRun, later: PrintedRun, op: OpPrint, beyond: str) -> tuple[Cause, str]:
    """Why an op differs whose inputs do not."""
    if op.is_random:
        return "unseeded_generator", f"`{op.op}` drew different numbers than in the earlier run: a different seed, or an unseeded generator"
    names = "torch", "the device", "the number of threads"
    settings = zip(names, earlier.settings, later.settings, strict=True)
    changed = [f"{name} was {then} then and is {now} now" for name, then, now in settings if then != now]
    if changed:
        return "unknown", f"`{op.op}` {beyond} on equal inputs: {', '.join(changed)}"
    return "nondeterministic_op", f"`{op.op}` {beyond} on equal inputs"


def divergence(run: PrintedRun, number: int, cause: Cause, said: str, fix: str = "", **lines: Location | None) -> Divergence:
    """Of an op of the later run; `lines` are its `other`, and its `location` if that is not the line of the op."""
    op = run.ops[number]
    where, which, phase = lines.get("location") or op.place, run.occurrence(number), "backward" if op.is_backward else "forward"
    at: dict[str, Any] = {"op": op.op, "module": op.module or None, "location": where, "occurrence": which, "phase": phase}
    return Divergence(cause=cause, explanation=said, fix=fix, other=lines.get("other"), **at)


def updated_otherwise(earlier: PrintedRun, later: PrintedRun, number: int) -> tuple[Divergence | None, tuple[str, ...]]:
    """What the optimizer's step that the op is in began with, and the earlier run's did not; None where there is no such step.

    The words say which line was edited, if one of them is in one; none where the run was resumed.
    """
    now = next((update for update in later.updates if update.first <= number < update.end), None)
    then = None if now is None else _same_step(earlier, later, now)
    if now is None or then is None:
        return None, ()
    place = later.ops[number].place
    receiver = re.search(r"([\w.]+)\.step\(", "" if place is None else place.source)
    name, words = receiver.group(1) if receiver else now.optimizer, tuple[str, ...]()
    missing = [f"`{one}`" for one in then.state if one not in now.state]
    values = dict(now.settings)
    changed = [(setting, value, values[setting]) for setting, value in then.settings if values.get(setting, value) != value]
    if missing:
        said = f"`{name}` is new and lacks {listed(missing)}, which the earlier run had"
        fix = f"save `{name}.state_dict()` with the checkpoint, and load it with `{name}.load_state_dict(...)`"
    elif not changed:
        return None, ()
    else:
        parts = [f"`{setting}` of `{name}` was {value} in the earlier run and is {present} now" for setting, value, present in changed]
        said, fix = listed(parts), f"set `{changed[0][0]}={changed[0][1]}`"
        if earlier.updates.index(then) == later.updates.index(now):
            words = "sched", name.rsplit(".", 1)[-1]
        elif changed[0][0].startswith("lr"):
            fix = "save the scheduler's `state_dict()` with the checkpoint, and load it with `load_state_dict`"
    return divergence(later, number, "state_leak", said, fix), words


def _same_step(earlier: PrintedRun, later: PrintedRun, now: Update) -> Update | None:
    """The earlier run's step after the same gradients: the last results of a backward pass that both runs had."""
    known = (earlier.values[op.gave] for op in reversed(later.ops[: now.first]) if op.is_backward and op.gave in earlier.values)
    number = next(known, None)
    return None if number is None else next((update for update in earlier.updates if update.first > number), None)


class _Draw(NamedTuple):
    number: int
    gave: int
    key: tuple[str, str]
    """The op, and the text of its line."""


def shifted(earlier: PrintedRun, later: PrintedRun, edited: Mapping[str, str], last: int) -> Divergence | None:
    """Why numbers are drawn otherwise: at the draw that is new, else the first that is other.

    None where nothing was drawn otherwise on the way to the op with that number.
    """
    before, now = _draws(earlier, {}), _draws(later, edited)
    surplus = Counter(draw.key for draw in now)
    surplus.subtract(draw.key for draw in before)
    live = later.live_at
    moved: Counter[tuple[str, str]] = Counter()
    added: list[_Draw] = []
    gone: list[_Draw] = []
    i = j = 0
    while i < len(before) and j < len(now):
        one, other = before[i], now[j]
        if moved[one.key]:
            moved[one.key] -= 1
            i += 1
        elif one.key != other.key and surplus[one.key] < 0:
            surplus[one.key] += 1
            gone.append(one)
            i += 1
        elif one.key != other.key:
            if surplus[other.key] > 0:
                surplus[other.key] -= 1
            else:
                moved[other.key] += 1
            added.append(other)
            j += 1
        elif one.gave == other.gave or not live[other.number] or not is_new(later.ops[other.number], earlier):
            if one.gave == other.gave:
                added, gone = [], []
            i, j = i + 1, j + 1
        elif min(draw.number for draw in (*added, other)) > last:
            return None
        else:
            return _told(earlier, later, added, gone, other.number, is_moved=bool(added) and moved[added[0].key] > 0)
    return None


def repeated(earlier: PrintedRun, later: PrintedRun, last: int) -> Divergence | None:
    """Where a run that goes on with another one's results draws from the beginning again: the generator's state was not loaded."""
    drawn = [number for number in range(last) if later.ops[number].is_random and later.live_at[number]]
    if not drawn or later.ops[drawn[-1]].gave not in earlier.values:
        return None
    number = drawn[-1]
    loaded = (later.ops[given].gave for given in later.reads[last] if is_copy(later.ops[given]))
    between = range(earlier.values[later.ops[number].gave] + 1, max((earlier.values.get(value, -1) for value in loaded), default=-1))
    text = text_of(later.ops[number].place)
    since = [then for then in between if earlier.ops[then].is_random and text_of(earlier.ops[then].place) == text]
    if not since:
        return None
    said = f"`{later.ops[number].op}` draws the numbers that the earlier run drew much earlier: the RNG state was not restored"
    fix = "save `torch.get_rng_state()` with the checkpoint, and restore it with `torch.set_rng_state(...)`"
    return divergence(later, number, "state_leak", said, fix, other=earlier.ops[since[-1]].place)


def _draws(run: PrintedRun, edited: Mapping[str, str]) -> list[_Draw]:
    texts = ((number, op, text_of(op.place)) for number, op in enumerate(run.ops) if op.is_random)
    return [_Draw(number, op.gave, (op.op, edited.get(text, text))) for number, op, text in texts]


def _told(earlier: PrintedRun, later: PrintedRun, added: list[_Draw], gone: list[_Draw], drawn: int, *, is_moved: bool) -> Divergence:
    op, place = later.ops[drawn], later.ops[drawn].place
    first, other, number = None, place, drawn
    said = f"`{op.op}` drew different numbers than in the earlier run: a different seed, or an unseeded generator"
    fix, onwards = "", f"`{op.op}` at {place} draws different numbers from there on"
    if added:
        number = added[0].number
        first = later.ops[number].place
        if is_moved:
            said = f"{quoted(first)} is created before {quoted(place)}: the random numbers go to different layers"
            fix = f"create {quoted(place)} before {quoted(first)}, or call {_AGAIN} before each of them"
        else:
            what = "a seed" if later.ops[number].magnitude == 0 else "random numbers"
            then = "more often than in the earlier run" if text_of(first) in earlier.lines else "which the earlier run did not"
            said = f"{quoted(first)} draws {what}, {then}: {onwards}"
            drawing = f"the call of `{first.function}`" if first is not None and first.source.startswith("return") else quoted(first)
            fix = _apart(place) or f"call {_AGAIN} again after {drawing}, or give it its own generator"
            if _is_dropout(later, number) and added[0].key[1] == text_of(first):
                fix = "call `eval()` before it, and `train()` after it: dropout is active"
    elif gone:
        first = other = earlier.ops[gone[0].number].place
        is_there = text_of(first) in later.lines
        rarer = "draws random numbers less often than in the earlier run" if is_there else "no longer draws random numbers before it"
        said = f"{quoted(first)} {rarer}: {onwards.replace(f' at {place}', '')}"
        fix = _apart(place) or f"call {_AGAIN} before it"
        if is_there and _is_dropout(earlier, gone[0].number):
            fix = "call `train()` before it: dropout is inactive"
    return divergence(later, number, "unseeded_generator", said, fix, other=None if first is None else other)


def _is_dropout(run: PrintedRun, number: int) -> bool:
    return run.ops[number].op.split(".")[1] in {"bernoulli_", "native_dropout", "_fused_dropout"}


def _apart(place: Location | None) -> str:
    """How a loader is made to draw from a generator of its own."""
    tree = parsed(f"{'' if place is None else place.source}\n  pass")
    names = [node.id for loop in nodes((ast.For, ast.AsyncFor), tree) for node in nodes(ast.Name, loop.iter)]
    if not names:
        return ""
    return f"give `{names[-1]}` its own generator: `DataLoader(..., generator=torch.Generator().manual_seed(42))`"
