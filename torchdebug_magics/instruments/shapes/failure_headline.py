"""Divides an explanation into what a headline has room for, and the reason, which has a row of its own."""

from __future__ import annotations

import re

__all__ = ["ROOM", "divided", "fitted"]

ROOM = 90
"""Characters of a headline before the line of code that it quotes."""
_LEAST = 24
"""A headline that is cut shorter names no problem any more."""
_SKIPPED = re.compile(r"`[^`]*`|\([^()]*\)|\[[^\[\]]*\]")
"""Code and brackets, in which a colon or a comma ends nothing."""
_SENTENCE_SEAM = re.compile(r"[:;] ")
_CLAUSE_SEAM = re.compile(r", ")
_ORIGIN = re.compile(r", gets (?P<size>[\dx ]*\d)(?P<origin> (?:= \d|from (?:_|the )).*)$")
"""The origin of a size, in text whose code is masked by underscores."""
_NAMED_SHAPE = re.compile(r"`[^`]*` of (?=[\d(])| \([^()]*[a-z][^()]*\)")
"""The name of a tensor before its shape, and a remark in brackets."""
_LONG_CODE = 26


def divided(explanation: str, room: int) -> tuple[str, str]:
    """Return ``(headline, reason)``: the first clause in at most `room` characters, and what it left out."""
    first = _SENTENCE_SEAM.search(_masked(explanation))
    head, reason = (explanation[: first.start()], explanation[first.end() :]) if first is not None else (explanation, "")
    if len(head) <= room:
        return head, reason
    origin = _ORIGIN.search(_masked(head))
    if origin is not None and origin.start("origin") <= room:
        start = origin.start("origin")
        return head[:start], "; ".join(filter(None, (f"{origin['size']}{head[start:]}", reason)))
    shapes = _NAMED_SHAPE.sub("", head)
    if len(shapes) <= room:
        return shapes, explanation
    seams = [seam.start() for seam in _CLAUSE_SEAM.finditer(_masked(shapes)) if _LEAST <= seam.start() <= room]
    return shapes[: seams[-1]] if seams else fitted(shapes, room), explanation


def fitted(text: str, room: int) -> str:
    """Shorten a text to `room` characters: long code between backticks first, then the end."""
    if len(text) > room:
        text = re.sub(r"`([^`]*)`", lambda code: f"`{_abridged(code[1])}`", text)
    if len(text) <= room:
        return text
    cut = text[: room - 1].rpartition(" ")[0]
    return f"{cut.rpartition(' ')[0] if cut.count('`') % 2 else cut}…"


def _abridged(code: str) -> str:
    """Keep the end of a dotted path, and the beginning of any other expression."""
    if len(code) <= _LONG_CODE:
        return code
    return f"…{code[1 - _LONG_CODE :]}" if re.fullmatch(r"[\w.]+", code) else f"{code[: _LONG_CODE - 1]}…"


def _masked(text: str) -> str:
    return _SKIPPED.sub(lambda skipped: "_" * len(skipped[0]), text)
