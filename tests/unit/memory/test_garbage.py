"""What the collector would free is found without it; and how large a collection of plain objects is."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest

from torchdebug_magics.memory.cycles import garbage
from torchdebug_magics.memory.python_weights import PlainCollection, plain_collections


class Node:
    def __init__(self) -> None:
        self.me: Any = self
        self.finalized: list[int] = FINALIZED

    def __del__(self) -> None:
        self.finalized.append(1)


FINALIZED: list[int] = []


@pytest.fixture(autouse=True)
def no_collection_between() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_what_only_holds_itself_is_garbage_and_stays() -> None:
    ref = weakref.ref(Node())
    before = len(FINALIZED)
    assert [type(one) for one in garbage() if type(one) is Node] == [Node]
    assert ref() is not None
    assert len(FINALIZED) == before
    gc.collect()
    assert ref() is None
    assert not any(type(one) is Node for one in garbage())


def test_what_a_variable_or_a_running_call_leads_to_is_none() -> None:
    held, inside = Node(), [{"a": Node()}]
    assert not any(type(one) is Node for one in garbage())
    assert held.me is held
    assert inside


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
