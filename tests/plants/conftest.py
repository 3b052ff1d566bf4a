"""Shared by the tests of plants."""

from __future__ import annotations

import gc

import pytest

from torchdebug_magics.machine.process import trim_heap


@pytest.fixture(autouse=True)
def only_the_plant(little_to_search: None, no_other_tests: None) -> None:
    """What was there before the test is passed by, in a census and in a search for holders; growth finds no freed heap to go into."""
    gc.collect()
    gc.freeze()
    trim_heap()
