"""Shared by the tests of ``memtrace``."""

from __future__ import annotations

import gc

import pytest

from torchdebug_magics.machine.process import trim_heap


@pytest.fixture(autouse=True)
def nothing_of_other_tests(little_to_search: None) -> None:
    """The census passes by what was there before the test, and what grows finds no freed heap to grow into."""
    gc.collect()
    gc.freeze()
    trim_heap()
