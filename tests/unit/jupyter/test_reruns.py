"""What is remembered from one run of a cell to the next: by its text, bounded, and of one instrument alone."""

from __future__ import annotations

import pytest

from torchdebug_magics.jupyter import magics


def test_the_same_text_has_the_same_memory_and_another_its_own() -> None:
    runs = magics.memories()
    runs("one", "a").append(1)
    assert (list(runs("one", "a")), list(runs("one", "b")), list(runs("two", "a"))) == ([1], [], [])


def test_the_oldest_runs_and_cells_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magics, "_CELLS", 2)
    runs = magics.memories()
    first = runs("one", "a")
    first.extend(range(100))
    assert list(first) == [95, 96, 97, 98, 99]
    second = runs("one", "b")
    assert runs("one", "a") is first
    runs("one", "c")
    assert runs("one", "a") is first
    assert runs("one", "b") is not second
