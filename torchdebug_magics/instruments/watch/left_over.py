"""A statement that was left over from a test, and ends a block before its others: a trial without it shows whether it is at fault."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torchdebug_magics.probing.source.edited_source import cells
from torchdebug_magics.probing.source.syntax import FUNCTIONS, blocks, nodes
from torchdebug_magics.report import Edit

_ENDS = (ast.Return, ast.Break, ast.Continue)
"""And no `raise`, which may be the very error."""
MOST_TRIED = 3


class LeftOver(NamedTuple):
    """A statement to remove, as a fix."""

    fix: str
    edits: tuple[Edit, ...]


def left_over() -> Iterator[LeftOver]:
    """Of the user's functions, the statements after which others of their block stand that never run."""
    for cell in cells():
        for function in nodes(FUNCTIONS, cell.tree):
            if any(True for _ in nodes((ast.Yield, ast.YieldFrom), function)):
                continue  # an empty generator
            for first, _ in (pair for node in ast.walk(function) for block in blocks(node) for pair in pairwise(block)):
                is_plain = not isinstance(first, ast.Return) or isinstance(first.value, (ast.Constant, ast.Name, type(None)))
                if isinstance(first, _ENDS) and is_plain and len(cell.beside(first)) == 1:
                    text = cell.text(first)
                    owners = [owner.name for owner in nodes(ast.ClassDef, cell.tree) if function in owner.body]
                    fix = f"remove `{text}` from {'.'.join([*owners, function.name])}(): nothing after it runs"
                    yield LeftOver(fix, (cell.replacing(first, ""),))
