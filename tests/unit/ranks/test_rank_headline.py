"""The headline of a report of ranks: what fits into one line, and what stands below it."""

from __future__ import annotations

import pytest

from torchdebug_magics.ranks.merging import parted

LONG = "the buffers of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 24 more drift after 6 steps"


def test_sentences_stand_together_while_they_fit() -> None:
    assert parted(["All ranks agree", "nothing found"]) == ("All ranks agree · nothing found", ())
    assert parted(["All ranks agree", LONG, "nothing found"]) == ("All ranks agree", (LONG, "nothing found"))


def test_nothing_follows_a_quoted_line() -> None:
    quoted = "Rank 1 of 2: NaN from log · train.py:3: `loss = x.log()`"
    assert parted([quoted, "rank 0 received it"]) == (quoted, ("rank 0 received it",))


@pytest.mark.parametrize(
    ("sentence", "headline"),
    [
        (f"Rank 1 of 2: {'x' * 80} · a.py:3", f"Rank 1: {'x' * 80}"),
        (f"Rank 1 of 2: {'x' * 60} · a.py:3 in {'f' * 20}: `y = 1`", f"Rank 1: {'x' * 60} · a.py:3: `y = 1`"),
        (f"Rank 0 raised RuntimeError: {'x' * 200} at a.py:3", "Rank 0 raised RuntimeError"),
        (f"2 ranks, nothing found on any; rank 0: {'x' * 80}", "2 ranks, nothing found on any"),
        (f"All 2 ranks: Gradients look healthy: {'x' * 80}", "All 2 ranks: Gradients look healthy"),
        (f"{LONG}, first {'x' * 80}", LONG),
    ],
)
def test_a_long_sentence_loses_what_the_rows_below_say(sentence: str, headline: str) -> None:
    assert parted([sentence]) == (headline, ())
