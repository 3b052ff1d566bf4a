"""The pages under docs/ say what the code says, and lead where they say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from torchdebug_magics import catalog

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def help_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("help_pages", ROOT / "tools/help_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = HEADING.findall(re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_of_each_magic_is_what_its_help_says(help_pages: ModuleType) -> None:
    made = help_pages.pages()
    assert {path.name for path in (ROOT / "docs/magics").iterdir()} == set(made)
    assert set(made) >= {f"{row.name}.md" for row in catalog.instruments()}
    for name, text in made.items():
        assert (ROOT / "docs/magics" / name).read_text(encoding="utf-8") == text, f"{name}: run tools/help_pages.py"


def test_a_page_holds_the_help_the_options_and_the_fields_of_the_report(help_pages: ModuleType) -> None:
    text = "\n".join(help_pages.page(catalog.instrument("memclean")))
    assert "%memclean --free exception,out      free only these two" in text
    assert "| `out` | each cell's last value stays in Out[n], _n and _;" in text
    assert "| `--free NAMES` | free everything, or only the named parts, such as exception,out (see above) |" in text
    assert "| `asked` | `tuple[str, ...]` | What was to be freed. |" in text
    assert text.index("### `MemcleanReport`") < text.index("### `Holding`")


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target
