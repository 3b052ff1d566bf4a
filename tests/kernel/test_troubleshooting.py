"""The examples of docs/troubleshooting.md say what the page says that they say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kernel.kernels import Kernel

EXAMPLE = re.compile(r"^```python\n(.*?)^```\n+(?:```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
LAST = "## Cell magic"


def words(text: str) -> str:
    """Without the breaks of the lines, and without sizes, counts and times that depend on the machine and on torch."""
    told = re.sub(r"[\d,.]+ ((?:[KMGT]i)?B\b|ops)", r"N \1", " ".join(text.split()))
    return re.sub(r"\bpid \d+|\bfor [\d.]+ s\b", "N", told)


@pytest.fixture
def fresh(start_kernel: Callable[[str], Kernel]) -> Kernel:
    """A kernel whose first cell is the first of the page."""
    return start_kernel("modern")


def test_every_example_says_what_the_page_says(root: Path, fresh: Kernel) -> None:
    page = (root / "docs/troubleshooting.md").read_text(encoding="utf-8")
    examples = EXAMPLE.findall(page.partition(LAST)[0])
    assert sum(bool(said) for _, said in examples) == 17
    for code, said in examples:
        shown = fresh.run(code.rstrip("\n")).text
        assert words(said) in words(shown), f"{code}\nsays\n{shown}"
