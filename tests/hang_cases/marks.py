"""Cells in which the lines where to look are marked, so that nobody has to count them."""

from __future__ import annotations

from typing import Any

from tests.hang_cases.case import HangCase

__all__ = ["WARM", "planted"]

MARK = "#!"
WARM = """
import torch

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
"""
"""A setup after which nothing large is imported any more: the first optimizer of a process imports for seconds."""


def planted(*, cell: str, **truth: Any) -> HangCase:
    """The case whose `line` are those that end in ``#!``, which the cell itself lacks; without a mark the line is not judged."""
    lines = cell.strip("\n").split("\n")
    marked = tuple(number for number, line in enumerate(lines, start=2) if line.endswith(MARK))
    plain = "\n".join(line.removesuffix(MARK).rstrip() for line in lines) + "\n"
    if "setup" in truth:
        truth["setup"] = truth["setup"].strip("\n") + "\n"
    return HangCase(cell=plain, line=marked or None, **truth)
