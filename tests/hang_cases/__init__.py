"""Planted hangs, and cells that only seem to hang or are well, as data: what `%%hangwatch` must say about each.

A truth was found by running the plain code and looking at where it stood, never by asking the engine.
"""

from __future__ import annotations

import importlib

from tests.hang_cases.case import HangCase

__all__ = ["HangCase", "all_cases"]

_FILES = (
    "threads",
    "processes",
    "ranks",
    "slow",
    "waits",
    "healthy",
    "reports_loaders",
    "reports_ranks",
    "reports_other",
)


def all_cases() -> tuple[HangCase, ...]:
    """Every case, in the order of the files."""
    return tuple(case for name in _FILES for case in importlib.import_module(f"tests.hang_cases.{name}").CASES)
