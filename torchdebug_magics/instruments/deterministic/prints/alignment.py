"""Two runs side by side: lines by their text, results by their bits, and the op from which the last one that differs has its difference."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint, OpPrint
from torchdebug_magics.probing.state.digest import EMPTY
from torchdebug_magics.report import Location

_NO_CODE = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER})
_NO_LINE = ("#", "%", "get_ipython().run_cell_magic")
_COPIES = frozenset({"copy_", "clone", "_to_copy", "lift_fresh", "detach", "contiguous", "_foreach_copy_"})
_ALIKE = 0.5
"""Of two texts in the same place, from where on one is the other, edited."""
_NAME = re.compile(r"[A-Za-z_]\w*")


class PrintedRun:
    """One run, read once."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.ops: tuple[OpPrint, ...] = tuple(fingerprint)
        flows = tuple(fingerprint.flows())
        self.reads: tuple[tuple[int, ...], ...] = tuple(read for read, _ in flows)
        self.updates = fingerprint.updates
        self.settings = fingerprint.torch_version, fingerprint.device, fingerprint.threads_count
        self._overwritten = {number for _, overwritten in flows for number in overwritten}
        self.values = {op.gave: number for number, op in enumerate(self.ops) if _has_value(op)}
        """What each op gave -> the last op that did."""
        self.lines: dict[str, Location] = {}
        """Text -> where it is first."""
        for place in (*fingerprint.code, *(op.place for op in self.ops)):
            if place is not None and not place.source.startswith(_NO_LINE):
                self.lines.setdefault(text_of(place), place)

    @cached_property
    def live_at(self) -> list[bool]:
        """For each op, whether its result is read in the end, or left at the end: not, where it is only written over."""
        found = [number not in self._overwritten for number in range(len(self.ops))]
        for number in reversed(range(len(self.ops))):
            if found[number]:
                for given in self.reads[number]:
                    found[given] = True
        return found

    def occurrence(self, number: int) -> int:
        """Which call of that op at that line it is, 1-based."""
        op, text = self.ops[number].op, text_of(self.ops[number].place)
        return sum(1 for one in self.ops[: number + 1] if one.op == op and text_of(one.place) == text)


def text_of(place: Location | None) -> str:
    """A line without its comment and with single spaces: the same text is the same line, wherever it stands."""
    return "" if place is None else _code_of(place.source)


@cache
def _code_of(source: str) -> str:
    words: list[str] = []
    with suppress(tokenize.TokenError, SyntaxError):  # a line that is a part of a statement
        words.extend(token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in _NO_CODE)
    return " ".join(words) or source


def edited_lines(earlier: PrintedRun, later: PrintedRun) -> Mapping[str, str]:
    """The text of lines that are new, with the one that each has replaced."""
    before, now = list(earlier.lines), list(later.lines)
    found: dict[str, str] = {}
    for kind, i, j, k, m in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if kind == "replace":
            old = [text for text in before[i:j] if text not in later.lines]
            for text in now[k:m]:
                if text not in earlier.lines and (closest := get_close_matches(text, old, 1, cutoff=_ALIKE)):
                    found[text] = closest[0]
                    old.remove(closest[0])
    return found


def roots(earlier: PrintedRun, later: PrintedRun, edited: Mapping[str, str]) -> list[int]:
    """The ops of the later run from which the last result that differs has its difference, first to last; none where none differs."""
    differing = _differing(earlier, later, edited)
    last = next((number for number in sorted(differing, reverse=True) if later.live_at[number]), None)
    if last is None:
        return []
    found, seen, todo = [], {last}, [last]
    while todo:
        number = todo.pop()
        given, made_anew = [*later.reads[number]], set[int]()
        while given:
            source = given.pop()
            if is_new(later.ops[source], earlier):
                made_anew.add(source)
            elif not _has_value(later.ops[source]):  # a copy stands for what it is a copy of
                given += later.reads[source]
        if not made_anew:
            found.append(number)
        todo += made_anew - seen
        seen |= made_anew
    return sorted(found)


def is_new(op: OpPrint, other: PrintedRun) -> bool:
    """Whether the other run has nowhere had this result."""
    return _has_value(op) and op.gave not in other.values


def _has_value(op: OpPrint) -> bool:
    """Not a copy: what it gives is met where it was made, or is first used, and there as one op of the earlier run may have made many."""
    return op.gave != EMPTY and not op.is_unread and not is_copy(op)


def is_copy(op: OpPrint) -> bool:
    """Whether it gives the numbers of a tensor that it was given."""
    return op.op.split(".")[1] in _COPIES


def _differing(earlier: PrintedRun, later: PrintedRun, edited: Mapping[str, str]) -> set[int]:
    """Results that stand where the earlier run has others. What one of them has besides, such as further epochs, does not differ."""
    lines: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for op in filter(_has_value, earlier.ops):
        lines[text_of(op.place)][0].append(op.gave)
    for number, op in enumerate(later.ops):
        if _has_value(op):
            text = text_of(op.place)
            lines[edited.get(text, text)][1].append(number)
    return {number for before, now in lines.values() for number in _replaced(before, now, later)}


def _replaced(before: Sequence[int], now: Iterable[int], later: PrintedRun) -> list[int]:
    """The new results among those of one line that stand where one is gone; the gaps end at results which the line had only once."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, value in enumerate(before):
        places[value].append(place)
    gone = [0, *accumulate(value not in later.values for value in before)]
    found: list[int] = []
    gap: list[int] = []
    reached = 0
    for number in now:
        known = places.get(later.ops[number].gave, ())
        if not known:
            gap.append(number)
        elif reached in known:
            reached += 1
            gap = []
        elif len(known) == 1 and known[0] > reached:
            found += gap if gone[known[0]] > gone[reached] else ()
            reached = known[0] + 1
            gap = []
    return found + (gap if gone[-1] > gone[reached] else [])


class EditedLine(NamedTuple):
    """A line that is not as it was."""

    now: Location | None
    """None where it is gone."""
    before: Location | None
    """None where it is new."""

    @property
    def explanation(self) -> str:
        """A clause on it."""
        if self.before is None:
            return "this line is new"
        return f"`{_plain(self.before)}` was removed" if self.now is None else f"this line was `{_plain(self.before)}`"


def edit_behind(earlier: PrintedRun, later: PrintedRun, edited: Mapping[str, str], place: Location | None) -> EditedLine | None:
    """The line itself where it was edited, else the nearest edited one that binds what it uses, at first or second hand."""
    changed = {text: line for text, line in later.lines.items() if text not in earlier.lines}
    if place is None or not changed:
        return None
    text = text_of(place)
    if text in changed:
        return _edit(text, changed[text], earlier, edited)
    targets = [(_bound(line), text) for text, line in later.lines.items()]
    names, seen = set(_NAME.findall(text)), {text}
    while True:
        behind = [text for target, text in targets if not target.isdisjoint(names) and text not in seen]
        for text in behind:
            if text in changed:
                return _edit(text, changed[text], earlier, edited)
        if not behind:
            return None
        seen.update(behind)
        names = {name for text in behind for name in _NAME.findall(text)}


def edit_with(words: Iterable[str], earlier: PrintedRun, later: PrintedRun, edited: Mapping[str, str]) -> EditedLine | None:
    """The first line that was edited, or else is gone, with one of the words in it."""
    new = [(text, _edit(text, line, earlier, edited)) for text, line in later.lines.items() if text not in earlier.lines]
    kept = {*later.lines, *edited.values()}
    gone = [(text, EditedLine(None, line)) for text, line in earlier.lines.items() if text not in kept]
    return next((edit for word in words for text, edit in (*new, *gone) if word in text), None)


def _edit(text: str, line: Location, earlier: PrintedRun, edited: Mapping[str, str]) -> EditedLine:
    return EditedLine(line, earlier.lines[edited[text]] if text in edited else None)


def _bound(place: Location) -> frozenset[str]:
    """Every name that a line binds, of an attribute its own one."""
    found = re.match(r"([\w\s.,*()\[\]]+?)(?::[^=]+)?=(?!=)", place.source) or re.match(r"(?:async )?for\b(.+?)\bin\b", place.source)
    return frozenset() if found is None else frozenset(re.findall(r"(\w+)\s*(?![\w.])", found.group(1)))


def quoted(place: Location | None) -> str:
    """A line, by what it binds or loops over, else by its text."""
    if place is None:
        return "code outside the cell"
    if target := re.match(r"(?:self\.)?([\w.]+)\s*(?::[^=]+)?=(?!=)", place.source):  # `conv` of `self.conv = nn.Conv2d(1, 8, 3)`
        return f"`{target.group(1)}`"
    loop = re.match(r"(?:async )?for\b.*?\bin\b\s*(.+):", place.source)
    return f"`for ... in {loop.group(1)}`" if loop else f"`{_plain(place)}`"


def _plain(place: Location) -> str:
    """Its text without what would break a quotation."""
    return place.source.split("#", 1)[0].strip().replace("`", "'") or str(place)
