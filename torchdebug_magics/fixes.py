"""Edits of a report, applied to the user's cells and files as text; nothing is written to a file."""

from __future__ import annotations

import difflib
import itertools
import linecache
import sys
from collections.abc import Sequence
from typing import Any

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.report import Edit, Report


def fixed_source(report: Report) -> dict[int | str, str]:
    """The whole new source of each cell, by its number, and of each file, by its path, that the edits of a report change.

    Nothing is written. Raises `TorchDebugError` where the report has no edits, as its fix is then advice in words, and where a source is
    gone, or is not as it was when it ran.
    """
    if not report.edits:
        msg = (
            f"the fix is advice in words: {report.fix}"
            if report.fix
            else "the last report has no fix: it found nothing that code would change"
        )
        raise TorchDebugError(msg)
    by_place: dict[int | str, list[Edit]] = {}
    for edit in report.edits:
        by_place.setdefault(edit.file if edit.cell is None else edit.cell, []).append(edit)
    return {place: _edited(place, edits) for place, edits in by_place.items()}


def changes(report: Report) -> str:
    """What the edits of a report change, as a unified diff of each cell and file. Raises as `fixed_source`."""
    lines: list[str] = []
    for place, new in fixed_source(report).items():
        name = place if isinstance(place, str) else f"In[{place}]"
        lines += difflib.unified_diff(_source(place, ""), new.split("\n"), name, name, lineterm="", n=1)
    return "\n".join(lines)


def applied(text: str, edits: Sequence[Edit]) -> str:
    """A source with edits of it, from the last line to the first. Raises ValueError where a statement does not stand where it should."""
    lines = text.split("\n")
    numbered = enumerate(edits)  # what goes before a line comes after its change, the last of several first
    for _, edit in sorted(numbered, key=lambda pair: (-pair[1].line, not pair[1].old, -pair[0])):
        at = edit.line - 1
        old = edit.old.split("\n") if edit.old else []
        beside = lines[min(at, len(lines) - 1)]
        column = beside.find(old[0]) if old else len(beside) - len(beside.lstrip())
        standing = [beside[column:], *(dedented(line, column) for line in lines[at + 1 : at + len(old)])]
        if column < 0 or len(standing) < len(old) or standing[1:-1] != old[1:-1] or not standing[-1].startswith(old[-1] if old else ""):
            msg = f"line {edit.line} does not hold {edit.old!r}"
            raise ValueError(msg)
        tail = standing[-1][len(old[-1]) :] if old else ""
        head = beside[:column] if old else " " * column
        new = edit.new.split("\n") if edit.new else []
        new = [f"{head if number == 0 else ' ' * column}{line}" for number, line in enumerate(new)]
        for number, (before, after) in enumerate(zip(old, edit.new.split("\n"), strict=False)):
            if before != after:
                break
            new[number] = lines[at + number].removesuffix(tail if number == len(old) - 1 else "")  # as in a string that begins further left
        lines[at : at + len(old)] = [*new[:-1], new[-1] + tail] if new else []
    return "\n".join(lines)


def dedented(line: str, columns: int) -> str:
    """A further line of a statement that begins in that column; one that begins further left, as in a string, stays as it is."""
    return line[columns:] if not line[:columns].strip() else line


def _edited(place: int | str, edits: Sequence[Edit]) -> str:
    try:
        return applied("\n".join(_source(place, edits[0].file)), edits)
    except (ValueError, IndexError):
        name = place if isinstance(place, str) else f"In[{place}]"
        msg = f"{name} is no longer as it was when it ran: apply the fix by hand: {'; '.join(edit.new for edit in edits)}"
        raise TorchDebugError(msg) from None


def _source(place: int | str, file: str) -> list[str]:
    """The lines of a cell as the user wrote it, magics and all, or of a file as it is now."""
    if isinstance(place, str):
        linecache.checkcache(place)
        lines = linecache.getlines(place)
        return "".join(lines).split("\n")
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    history = [] if shell is None else shell.history_manager.input_hist_raw
    if place >= len(history):
        return [line.rstrip("\n") for line in linecache.getlines(file)]
    return list(itertools.dropwhile(lambda line: not line.strip(), history[place].split("\n")))  # IPython does not count empty first lines
