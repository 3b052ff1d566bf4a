"""Shared by the tests of plants."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def only_the_plant(little_to_search: None, no_other_tests: None) -> None:
    """What was there before the test is passed by: a census of memory would find it, and a search for holders go through it."""
    gc.collect()
    gc.freeze()
