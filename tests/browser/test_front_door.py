"""What someone sees first: the list of magics, and what this machine offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torchdebug_magics import catalog

if TYPE_CHECKING:
    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser


def test_every_magic_is_listed_and_the_machine_described(lab: Lab) -> None:
    lab.open("front_door.ipynb", ["%load_ext torchdebug_magics", "%torchdebug"])
    lab.run_all()
    said = lab.text(1)
    for row in catalog.instruments():
        assert row.magic in said
        assert row.summary.replace("`", "") in said  # code is told by its letters
    for word in ("python", "torch", "IPython", "ipykernel", "ipywidgets", "memory"):
        assert word.lower() in said.lower(), word
    assert lab.text(0) == ""
    lab.shots("front_door")
    assert lab.console_errors == []
