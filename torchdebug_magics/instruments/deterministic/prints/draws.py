"""Which random numbers a run draws that another one did not, or draws earlier: all that is drawn after them is other numbers."""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.deterministic.prints.alignment import is_copy, is_new, text_of
from torchdebug_magics.instruments.deterministic.prints.edits import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.deterministic.prints.alignment import Run
    from torchdebug_magics.report import Location

__all__ = ["Shift", "repeated", "shifted"]

_AGAIN = "`torch.manual_seed(...)`"


class Shift(NamedTuple):
    """Why numbers are drawn otherwise."""

    number: int
    """The op of the later run at which it shows: the draw that is new, else the first that is other."""
    other: Location | None
    explanation: str
    fix: str


class _Draw(NamedTuple):
    number: int
    gave: int
    key: tuple[str, str]
    """The op, and the text of its line."""


def shifted(earlier: Run, later: Run, edited: Mapping[str, str], last: int) -> Shift | None:
    """None where nothing was drawn otherwise on the way to the op with that number."""
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


def repeated(earlier: Run, later: Run, last: int) -> Shift | None:
    """Where a run that goes on with another one's results draws from the beginning again: the generator's state was not loaded."""
    drawn = [number for number in range(last) if later.ops[number].is_random and later.live_at[number]]
    if not drawn or later.ops[drawn[-1]].gave not in earlier.values:
        return None
    number = drawn[-1]
    then = earlier.values[later.ops[number].gave]
    loaded = [later.ops[given].gave for given in later.reads[last] if is_copy(later.ops[given])]
    reached = max((earlier.values.get(value, -1) for value in loaded), default=-1)
    text = text_of(later.ops[number].place)
    since = [one for one in range(then + 1, reached) if earlier.ops[one].is_random and text_of(earlier.ops[one].place) == text]
    if not since:
        return None
    said = f"`{later.ops[number].op}` draws the numbers that the earlier run drew much earlier: the RNG state was not restored"
    fix = "save `torch.get_rng_state()` with the checkpoint, and restore it with `torch.set_rng_state(...)`"
    return Shift(number, earlier.ops[since[-1]].place, said, fix)


def _draws(run: Run, edited: Mapping[str, str]) -> list[_Draw]:
    texts = ((number, op, text_of(op.place)) for number, op in enumerate(run.ops) if op.is_random)
    return [_Draw(number, op.gave, (op.op, edited.get(text, text))) for number, op, text in texts]


def _told(earlier: Run, later: Run, added: list[_Draw], gone: list[_Draw], drawn: int, *, is_moved: bool) -> Shift:
    op, place = later.ops[drawn], later.ops[drawn].place
    if added:
        first = later.ops[added[0].number].place
        if is_moved:
            said = f"{quoted(first)} is created before {quoted(place)}: the random numbers go to different layers"
            fix = f"create {quoted(place)} before {quoted(first)}, or call {_AGAIN} before each of them"
            return Shift(added[0].number, place, said, fix)
        what = "a seed" if later.ops[added[0].number].magnitude == 0 else "random numbers"
        then = "more often than in the earlier run" if text_of(first) in earlier.lines else "which the earlier run did not"
        said = f"{quoted(first)} draws {what}, {then}: `{op.op}` at {place} draws different numbers from there on"
        drawing = f"the call of `{first.function}`" if first is not None and first.source.startswith("return") else quoted(first)
        fix = _apart(place) or f"call {_AGAIN} again after {drawing}, or give it its own generator"
        if _is_dropout(later, added[0].number) and added[0].key[1] == text_of(first):
            fix = "call `eval()` before it, and `train()` after it: dropout is active"
        return Shift(added[0].number, place, said, fix)
    if gone:
        first = earlier.ops[gone[0].number].place
        rarer = (
            "draws random numbers less often than in the earlier run"
            if text_of(first) in later.lines
            else "no longer draws random numbers before it"
        )
        said = f"{quoted(first)} {rarer}: `{op.op}` draws different numbers from there on"
        is_off = _is_dropout(earlier, gone[0].number) and text_of(first) in later.lines
        return Shift(
            drawn, first, said, "call `train()` before it: dropout is inactive" if is_off else _apart(place) or f"call {_AGAIN} before it"
        )
    return Shift(drawn, None, f"`{op.op}` drew different numbers than in the earlier run: a different seed, or an unseeded generator", "")


def _is_dropout(run: Run, number: int) -> bool:
    return run.ops[number].op.split(".")[1] in {"bernoulli_", "native_dropout", "_fused_dropout"}


def _apart(place: Location | None) -> str:
    """How a loader is made to draw from a generator of its own."""
    try:
        loop = ast.parse(f"{'' if place is None else place.source}\n  pass").body[0]
    except SyntaxError:
        return ""
    names = [node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)] if isinstance(loop, (ast.For, ast.AsyncFor)) else []
    if not names:
        return ""
    return f"give `{names[-1]}` its own generator: `DataLoader(..., generator=torch.Generator().manual_seed(42))`"
