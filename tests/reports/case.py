"""One report as a notebook that a person would have had open, and the truth about it."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Final

__all__ = ["MARKER", "PRELUDE", "ReportCase"]

MARKER: Final = "# <- here"
"""Stands on each line that is a right answer to where. ``# <- saved``, ``first`` and ``shared`` mark what else a finding names."""
_MARKS: Final = re.compile(r"# <- (?P<names>[a-z, ]+)$")

PRELUDE: Final = """\
import math, os, random, time
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
"""
"""The first cell of every notebook. It seeds nothing."""


@dataclass(frozen=True, kw_only=True)
class ReportCase:
    """The reporter's structure and sizes (smaller where only time demands it), and the accepted answer as truth."""

    name: str
    source: str
    """The public thread's address."""
    answer: str
    """The accepted answer, in one sentence of our own."""
    magic: str
    """``"nanhunt"``, ``"shapes"``, ``"memtrace"``, ``"deterministic"`` or ``"autograd"``."""
    cells: tuple[str, ...]
    """In order, word for word; the one with the magic says ``-o r``. Lines that are a right answer to where carry the marker."""
    healthy: bool = False
    """Whether the accepted answer is that nothing is wrong: any finding is then a false alarm."""
    line: bool = True
    """Whether the marked lines are judged; False where the answer has no line."""
    op: tuple[str, ...] = ()
    """Any of these is right, as the report names ops; empty where it is not judged."""
    module: tuple[str | None, ...] = ()
    """Any of these module paths is right; empty where it is not judged."""
    says: tuple[str, ...] = ()
    """Regular expressions, ignoring case: each must be found in what the report says of the cause (verdict, explanation, fix)."""
    never: tuple[str, ...] = ()
    """Regular expressions of what would be untrue, or would mislead."""
    fix: str = ""
    """A regular expression, ignoring case, that the fix which the report shows must match; empty for a healthy case."""
    fixed: tuple[tuple[str, str], ...] = ()
    """(old, new) texts that apply that fix to the cells; the notebook is then run anew under the same magic, which must find nothing."""
    works: str = ""
    """An expression that must be true at the end of the fixed notebook, such as that the loss is finite and the shape is the meant one."""
    defeated_by: str = ""
    """What still defeats the magic, in a sentence: such a report is scored, and no test asks for it."""
    needs: str = ""
    """A package without which the case cannot run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", (PRELUDE, *(textwrap.dedent(cell).strip("\n") + "\n" for cell in self.cells)))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(In[n], line), both 1-based, of every marker."""
        return self.marked("here")

    def marked(self, name: str) -> tuple[tuple[int, int], ...]:
        """The same for the lines with that name behind the arrow."""
        lines = ((number, line, text) for number, cell in enumerate(self.cells, 1) for line, text in enumerate(cell.splitlines(), 1))
        found = ((number, line, _MARKS.search(text)) for number, line, text in lines)
        return tuple((number, line) for number, line, match in found if match and name in match["names"].split(", "))

    @property
    def repaired(self) -> tuple[str, ...]:
        """The cells with the shown fix applied; ValueError where a text to be replaced does not occur."""
        cells = self.cells
        for old, new in self.fixed:
            if not any(old in cell for cell in cells):
                msg = f"{self.name}: {old!r} is in no cell"
                raise ValueError(msg)
            cells = tuple(cell.replace(old, new) for cell in cells)
        return cells
