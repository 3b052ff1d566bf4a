"""A job of two ranks in one process: the fake backend sends nothing, and knows what it was asked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process, as one of two ranks."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there, for good
    dist.init_process_group("fake", rank=request.param, world_size=2, store=FakeStore())
    yield request.param
    dist.destroy_process_group()
