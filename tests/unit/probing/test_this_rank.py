"""Which process of a job runs here."""

from __future__ import annotations

import pytest
import torch

from torchdebug_magics.probing.distributed.this_rank import rank, world_size


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (None, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"RANK": "", "WORLD_SIZE": "x"}, (None, 1)),
        ({"WORLD_SIZE": "0"}, (None, 1)),
    ],
)
def test_as_the_launcher_says(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int | None, int]):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (rank(), world_size()) == expected


def test_as_torch_knows_it_once_a_group_has_begun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (("is_initialized", True), ("get_rank", 5), ("get_world_size", 8)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert (rank(), world_size()) == (5, 8)
