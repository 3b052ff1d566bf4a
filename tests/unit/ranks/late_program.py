"""A program that imports torch only in the function that a process runs."""

from __future__ import annotations


def train(rank: int, fault: str) -> None:
    from tests.unit.ranks import programs

    programs.train_alone(rank, fault)
