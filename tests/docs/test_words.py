"""The pages speak as the reports do: the phrases that are banned from reports are banned from them, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests import plain_words
from tests.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts),
]


def prose(page: Path) -> str:
    """What a page says, without its listings."""
    if page.suffix == ".ipynb":
        cells = nbformat.read(page, as_version=4).cells
        return "\n".join(prose_of(cell.source) for cell in cells if cell.cell_type == "markdown")
    return prose_of(page.read_text(encoding="utf-8"))


def prose_of(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_says_nothing_that_is_banned(page: Path) -> None:
    assert plain_words.complaints(prose(page)) == []


def test_a_banned_phrase_on_a_page_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nslope\n```\nThe `slope` is fine, this slope is not.\n", encoding="utf-8")
    assert len(plain_words.complaints(prose(page))) == 1
