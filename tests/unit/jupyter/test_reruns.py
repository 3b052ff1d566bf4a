"""What is remembered from one run of a cell to the next: by its text, bounded, and of one instrument alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torchdebug_magics.jupyter import magics
from torchdebug_magics.jupyter.magics import Reruns

if TYPE_CHECKING:
    from collections import deque

    from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture
def book(shell: InteractiveShell) -> Reruns:
    shell.user_ns |= {"book": Reruns(), "seen": []}
    found: Reruns = shell.user_ns["book"]
    return found


def run(shell: InteractiveShell, text: str, name: str = "one") -> deque[int]:
    shell.run_cell(f"seen.append(book.of_running_cell({name!r}))  # {text}")
    found: deque[int] = shell.user_ns["seen"].pop()
    return found


def test_the_same_text_has_the_same_memory_and_another_its_own(shell: InteractiveShell, book: Reruns):
    first = run(shell, "a")
    first.append(1)
    assert run(shell, "a") is first
    assert list(run(shell, "b")) == []


def test_each_instrument_has_its_own(shell: InteractiveShell, book: Reruns):
    shell.run_cell("seen += [book.of_running_cell('one'), book.of_running_cell('two')]")
    one, two = shell.user_ns["seen"]
    assert one is not two


def test_the_oldest_runs_and_cells_are_forgotten(shell: InteractiveShell, book: Reruns, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(magics, "_CELLS", 2)
    first = run(shell, "a")
    first.extend(range(100))
    assert list(first) == [95, 96, 97, 98, 99]
    second = run(shell, "b")
    assert run(shell, "a") is first
    run(shell, "c")
    assert run(shell, "a") is first
    assert run(shell, "b") is not second


def test_where_no_cell_runs_there_is_nothing_to_remember():
    assert Reruns().of_running_cell("one") is None
