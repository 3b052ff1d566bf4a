"""Shared by the tests of ``memtrace``."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def little_to_search() -> Iterator[None]:
    """The census passes by what was there before the test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
