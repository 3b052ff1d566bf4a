"""Finds the edited line behind an op that gives other numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.deterministic.prints.alignment import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchdebug_magics.instruments.deterministic.prints.alignment import Run
    from torchdebug_magics.report import Location

__all__ = ["Edit", "edit_behind", "edit_with", "quoted", "target_of"]

_NAME = re.compile(r"[A-Za-z_]\w*")


class Edit(NamedTuple):
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

    @property
    def standing(self) -> str:
        """The same, with the place."""
        return self.explanation if self.now is None else self.explanation.replace("this line", str(self.now), 1)


def edit_behind(earlier: Run, later: Run, edited: Mapping[str, str], place: Location | None) -> Edit | None:
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


def edit_with(words: Iterable[str], earlier: Run, later: Run, edited: Mapping[str, str]) -> Edit | None:
    """The first line that was edited, or else is gone, with one of the words in it."""
    for word in words:
        now = [_edit(text, line, earlier, edited) for text, line in later.lines.items() if word in text and text not in earlier.lines]
        old = set(edited.values())
        gone = [Edit(None, line) for text, line in earlier.lines.items() if word in text and text not in later.lines and text not in old]
        if now or gone:
            return (*now, *gone)[0]
    return None


def _edit(text: str, line: Location, earlier: Run, edited: Mapping[str, str]) -> Edit:
    return Edit(line, earlier.lines[edited[text]] if text in edited else None)


def _bound(place: Location) -> frozenset[str]:
    """Every name that a line binds, of an attribute its own one."""
    found = re.match(r"([\w\s.,*()\[\]]+?)(?::[^=]+)?=(?!=)", place.source) or re.match(r"(?:async )?for\b(.+?)\bin\b", place.source)
    return frozenset() if found is None else frozenset(re.findall(r"(\w+)\s*(?![\w.])", found.group(1)))


def target_of(place: Location | None) -> str:
    """What a line binds, such as ``conv`` of ``self.conv = nn.Conv2d(1, 8, 3)``; empty where it binds nothing."""
    found = re.match(r"(?:self\.)?([\w.]+)\s*(?::[^=]+)?=(?!=)", "" if place is None else place.source)
    return "" if found is None else found.group(1)


def quoted(place: Location | None) -> str:
    """A line, by what it binds or loops over, else by its text."""
    if place is None:
        return "code outside the cell"
    loop = re.match(r"(?:async )?for\b.*?\bin\b\s*(.+):", place.source)
    return f"`{target_of(place) or (f'for ... in {loop.group(1)}' if loop else _plain(place))}`"


def _plain(place: Location) -> str:
    """Its text without what would break a quotation."""
    return place.source.split("#", 1)[0].strip().replace("`", "'") or str(place)
