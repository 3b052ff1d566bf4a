"""Planted bugs, and cells with nothing wrong, as data: what `%%nanhunt` must say about each.

A truth was found by running the plain code and looking at the values, never by asking the engine.
"""

from __future__ import annotations

import importlib

from tests.nan_cases.case import ANY, Case, Expect, Nothing, Problem

__all__ = ["ANY", "Case", "Expect", "Nothing", "Problem", "all_cases"]

_FILES = (
    "data",
    "forward",
    "assorted",
    "precision",
    "loss",
    "backward",
    "optimizer",
    "flows",
    "loops",
    "libraries",
    "hard",
    "science",
    "numbers",
    "odd",
    "origins",
    "wild",
    "nothing",
    "quiet",
)


def all_cases() -> tuple[Case, ...]:
    """Every case, in the order of the files."""
    return tuple(case for name in _FILES for case in importlib.import_module(f"tests.nan_cases.{name}").CASES)
