"""How large a collection of plain objects is."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from torchdebug_magics.memory.found import PlainCollection, plain_collections

ROWS: list[Any] = []


def test_a_collection_that_got_longer_is_weighed() -> None:
    ROWS[:] = [{"text": "x" * 1000 + str(n)} for n in range(10)]
    (path,) = (path for path in plain_collections({}) if path.endswith("ROWS"))
    before = plain_collections({})
    ROWS.extend({"text": "x" * 1000 + str(n)} for n in range(30))
    found = plain_collections(before)[path]
    assert found.length == 40
    assert 1000 <= found.each_bytes <= 2000
    assert before[path] == PlainCollection(10, 0, None)
    ROWS.clear()


def test_a_repository_with_many_globals_hides_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    large = ModuleType("large_repository")
    large.__dict__.update({f"TABLE_{n}": [n, n] for n in range(6_000)})
    monkeypatch.setitem(sys.modules, large.__name__, large)
    trainer = {"history": {"losses": [0.5] * 100}}
    found = plain_collections({})
    assert any(path.endswith("local 'trainer'['history']['losses']") for path in found)
    assert any(".TABLE_" in path for path in found)
    assert trainer
