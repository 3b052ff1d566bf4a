"""Shared by the tests of holders."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def little_to_walk(no_other_tests: None) -> None:
    """Each walk would go through the globals of every file of tests."""
