"""The headline of a report of ranks: as many of its sentences as one line holds. What is left has rows of its own below."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torchdebug_magics.report import fits_a_title

__all__ = ["parted"]

_RANK = re.compile(r"Rank \d+|All \d+ ranks")
_NUMBER = re.compile(r"^(Rank \d+) of \d+: ")


def parted(sentences: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The headline, and the sentences that stand below it."""
    shorter = list(_shorter(sentences[0]))
    headline, left = next(filter(fits_a_title, shorter), shorter[-1]), list(sentences[1:])
    while left and ": `" not in headline and fits_a_title(f"{headline} · {left[0]}"):  # a quoted line stands last
        headline += f" · {left.pop(0)}"
    return headline, tuple(left)


def _shorter(sentence: str) -> Iterator[str]:
    """The same with less: without the number of ranks, then without its line, the name of a tensor, or the message of an error."""
    yield sentence
    sentence = _NUMBER.sub(r"\1: ", sentence)
    yield sentence
    head, dot, rest = sentence.partition(" · ")
    place, colon, source = rest.partition(": `")
    yield f"{head}{dot}{place.partition(' in ')[0]}{colon}{source}"
    yield head
    head = head.partition(", first ")[0].partition("; ")[0]
    yield head
    rank, colon, what = head.partition(": ")
    yield f"{rank}: {what.partition(': ')[0]}" if _RANK.fullmatch(rank) else rank
