"""Finds the part of a line of code that a sentence about it quotes."""

from __future__ import annotations

import re

__all__ = ["quoted_span"]


def quoted_span(line: str, sentence: str) -> tuple[int, int] | None:
    """Where the longest code in backticks that stands in the line once begins and ends; None where there is none.

    A call in backticks is found by its name, too: ``queue.get()`` in ``queue.get(timeout=2)``.
    """
    quoted = [text for code in re.findall(r"`([^`]+)`", sentence) for text in (code, code.removesuffix("()"))]
    found = [[one.span() for one in re.finditer(rf"(?<![\w.]){re.escape(text)}(?!\w)", line)] for text in quoted]
    spans = [places[0] for places in found if len(places) == 1 and places[0] != (0, len(line))]
    return max(spans, key=lambda span: span[1] - span[0], default=None)
