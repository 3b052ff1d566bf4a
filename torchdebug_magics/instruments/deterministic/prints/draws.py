"""Which random numbers a run draws that another one did not, or draws earlier: all that is drawn after them is other numbers."""

from __future__ import annotations

import ast
from difflib import SequenceMatcher
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.deterministic.prints.alignment import is_new, text_of
from torchdebug_magics.instruments.deterministic.prints.edits import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.deterministic.prints.alignment import Run
    from torchdebug_magics.report import Location

__all__ = ["Shift", "shifted"]

_MOST_DRAWS = 500
"""That are compared, from the first one on that is not the same."""
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
    op: str
    text: str


def shifted(earlier: Run, later: Run, edited: Mapping[str, str], last: int) -> Shift | None:
    """None where no draw up to the op with that number gave other numbers."""
    before = _draws(earlier, {})
    now = _draws(later, edited)
    same = sum(1 for _ in takewhile(lambda pair: pair[0][1:] == pair[1][1:], zip(before, now, strict=False)))
    before, now = before[same : same + _MOST_DRAWS], now[same : same + _MOST_DRAWS]
    live = later.live()
    added: list[_Draw] = []
    gone: list[_Draw] = []
    then, present = ([draw[2:] for draw in draws] for draws in (before, now))
    for kind, i, j, k, m in SequenceMatcher(None, then, present, autojunk=False).get_opcodes():
        if kind != "equal":
            added += now[k:m]
            gone += before[i:j]
            continue
        for at in range(j - i):
            one, other = before[i + at], now[k + at]
            if one.gave == other.gave:
                added, gone = [], []
            elif live[other.number] and is_new(later.ops[other.number], earlier):
                is_moved = (
                    bool(added)
                    and any(added[0].text == draw.text for draw in before[i:])
                    and all(added[0].text != draw.text for draw in now[k:])
                )
                is_behind = min(draw.number for draw in (*added, other)) <= last
                return _told(earlier, later, added, gone, other.number, is_moved=is_moved) if is_behind else None
    return None


def _draws(run: Run, edited: Mapping[str, str]) -> list[_Draw]:
    texts = ((number, op, text_of(op.place)) for number, op in enumerate(run.ops) if op.is_random)
    return [_Draw(number, op.gave, op.op, edited.get(text, text)) for number, op, text in texts]


def _told(earlier: Run, later: Run, added: list[_Draw], gone: list[_Draw], drawn: int, *, is_moved: bool) -> Shift:
    op, place = later.ops[drawn], later.ops[drawn].place
    if added:
        first = later.ops[added[0].number].place
        if is_moved:
            names = quoted(first), quoted(place)
            said = f"{names[0]} is made before {names[1]}: the random numbers go to other layers"
            return Shift(added[0].number, place, said, f"make {names[1]} before {names[0]}, or call {_AGAIN} before each of them")
        what = "a seed" if later.ops[added[0].number].magnitude == 0 else "random numbers"
        said = f"{quoted(first)} draws {what}, which the earlier run did not: `{op.op}` at {place} draws other numbers from there on"
        return Shift(
            added[0].number, place, said, _apart(place) or f"call {_AGAIN} again after {quoted(first)}, or give it a generator of its own"
        )
    if gone:
        first = earlier.ops[gone[0].number].place
        said = f"{quoted(first)} no longer draws random numbers before it: `{op.op}` draws other numbers from there on"
        return Shift(drawn, first, said, _apart(place) or f"call {_AGAIN} before it")
    return Shift(drawn, None, f"`{op.op}` drew other numbers than then: another seed, or a generator that is not seeded", "")


def _apart(place: Location | None) -> str:
    """How a loader is made to draw from a generator of its own."""
    try:
        loop = ast.parse(f"{'' if place is None else place.source}\n  pass").body[0]
    except SyntaxError:
        return ""
    names = [node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)] if isinstance(loop, (ast.For, ast.AsyncFor)) else []
    if not names:
        return ""
    return f"give `{names[-1]}` a generator of its own: `DataLoader(..., generator=torch.Generator().manual_seed(42))`"
