"""Rewrites the leading ``%%name`` lines of a cell as calls that open sessions, so that IPython runs the body as ordinary code."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from IPython.core.inputtransformer2 import cell_magic, leading_indent

from torchdebug_magics.jupyter.arguments import without_comment

__all__ = ["MagicLines", "lines_as_typed"]

_CALL = re.compile(r"get_ipython\(\)\.run_cell_magic\((.*), None\)\n")


class MagicLines:
    """An input transformer for the magics called `names`."""

    has_side_effects = True
    """Makes a terminal's completeness check see ``%%name`` and wait for the body."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __call__(self, lines: list[str]) -> list[str]:
        """Replace each magic line by one line, so that line numbers stay."""
        read: list[str] = []
        found = False
        for at, line in enumerate(lines):
            name, arguments = _cell_magic_line(line)
            if name in self._names:
                found = True
                # A body of None says: the body is what follows in this cell.
                read.append(f"get_ipython().run_cell_magic({name!r}, {arguments!r}, None)\n")
                if {"-h", "--help"} & set(without_comment(arguments).split()):
                    return read
            elif line.strip() and not line.startswith("#"):
                # What IPython would do to the body if our lines were not there: another's cell magic, or an indented body.
                return [*read, *cell_magic(leading_indent(lines[at:]))] if found else lines
            else:
                read.append(line)
        return read


def _cell_magic_line(line: str) -> tuple[str, str]:
    if not line.startswith("%%"):
        return "", ""
    name, *arguments = [*line[2:].split(None, 1), ""][:2]
    return name, "".join(arguments).strip()


@contextmanager
def lines_as_typed(error: BaseException) -> Iterator[None]:
    """While the traceback of `error` is drawn, magic lines read ``# %%name``, not as the calls that `MagicLines` made of them."""
    changed: list[tuple[list[str], list[str]]] = []
    for file in {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}:
        entry = linecache.cache.get(file, ())
        if len(entry) > 2 and isinstance(lines := entry[2], list) and lines and _CALL.fullmatch(lines[0]):  # noqa: PLR2004 - not a lazy one
            changed.append((lines, lines[:]))
            lines[:] = [_as_typed(line) for line in lines]
    try:
        yield
    finally:
        for lines, before in changed:
            lines[:] = before


def _as_typed(line: str) -> str:
    match = _CALL.fullmatch(line)
    if match is None:
        return line
    name, arguments = ast.literal_eval(match[1])
    return f"# %%{name} {arguments}".rstrip() + "\n"
