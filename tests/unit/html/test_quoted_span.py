"""The part of a line that a sentence quotes."""

from __future__ import annotations

import pytest

from torchdebug_magics.html.page import quoted_span

LINE = "x = torch.log(y) + torch.log(z)"


@pytest.mark.parametrize(
    ("sentence", "part"),
    [
        ("replace `torch.log(z)` with a constant", "torch.log(z)"),
        ("`y` is drawn from `torch.log(y)`", "torch.log(y)"),  # the longest
        ("`x` differs", "x"),
        ("`torch.log()` is called", None),  # twice in the line
        ("`lo` and `log`", None),  # no part of a name
        (f"`{LINE}` as a whole", None),
        ("nothing is quoted", None),
    ],
)
def test_the_part_that_is_quoted(sentence: str, part: str | None) -> None:
    span = quoted_span(LINE, sentence)
    assert (None if span is None else LINE[slice(*span)]) == part


def test_a_call_is_found_by_its_name() -> None:
    line = "batch = queue.get(timeout=2)"
    span = quoted_span(line, "waits in `queue.get()`")
    assert span is not None
    assert line[slice(*span)] == "queue.get"
