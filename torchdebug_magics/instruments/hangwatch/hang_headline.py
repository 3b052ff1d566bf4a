"""Shortens a headline to its first clauses, so that a title and the line it quotes stand in two lines of a page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

__all__ = ["first_clauses", "titled"]

_LONGEST = 90
"""Characters of a title before the line that it quotes."""
_BREAKS = re.compile(
    r"`[^`]*`|(?P<at>, and |, in which |, which |, whose |, but |, with |, kept by |: |; | whose | because | where | \((?=[^()]*\)$))"
)
_SHORT = 12
"""A clause of fewer characters says nothing by itself."""


def titled(begin: str, headline: str, where: Location | None) -> tuple[str, str]:
    """``"Stuck: rank 1 has run out of batches · In[3] line 5: `loss.backward()`"``, and the clauses that were left out."""
    place = "" if where is None else f" · {where.place}"
    quoted = f": `{where.source}`" if where is not None and where.source and "`" not in where.source else ""
    first, rest = first_clauses(headline, _LONGEST - len(begin) - len(place) - len(": "))
    return f"{begin}{first}{place}{quoted}", rest


def first_clauses(headline: str, most: int) -> tuple[str, str]:
    """The clauses that fit into `most` characters, and the rest; code in backticks is never divided."""
    if len(headline) <= most:
        return headline, ""
    breaks = [found for found in _BREAKS.finditer(headline) if found["at"] is not None and _SHORT <= found.start() <= most]
    if not breaks:
        return f"{headline[: most - 3]}...", headline
    end = breaks[-1]
    rest = headline[end.end() :]
    return headline[: end.start()], rest.removesuffix(")") if end["at"] == " (" else rest
