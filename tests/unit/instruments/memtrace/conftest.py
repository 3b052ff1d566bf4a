"""Shared by the tests of ``memtrace``."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_of_other_tests(little_to_search: None, no_other_tests: None) -> None:
    """The census passes by what was there before the test."""
    gc.collect()
    gc.freeze()
