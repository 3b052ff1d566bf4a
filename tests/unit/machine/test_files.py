"""A file that is not there, or ends in a blank, is no trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.machine.process_state import read

if TYPE_CHECKING:
    from pathlib import Path


def test_the_text_without_blanks_around(tmp_path: Path):
    (tmp_path / "x").write_text(" 12 \n\n")
    assert read(f"{tmp_path}/x") == "12"
    assert read(f"{tmp_path}/x", 2) == "1"


def test_what_cannot_be_read_is_none(tmp_path: Path):
    assert read(f"{tmp_path}/nowhere") is None
    assert read(str(tmp_path)) is None
