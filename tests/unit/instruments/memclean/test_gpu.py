"""On a GPU: what the allocator keeps is told, explained, and emptied only by name."""

from __future__ import annotations

import pytest
import torch

import torchdebug_magics
from torchdebug_magics.html import plain
from torchdebug_magics.instruments.memclean.view import page

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZE = 64 << 20


def test_the_cache_is_told_and_emptied_by_name() -> None:
    torch.cuda.empty_cache()
    torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    told = torchdebug_magics.memclean()
    assert told.cache_bytes >= SIZE
    assert "the next tensor takes it" in plain.render(page(told))
    torchdebug_magics.memclean(free="all")
    assert torch.cuda.memory_reserved() >= SIZE
    emptied = torchdebug_magics.memclean(free="cache")
    assert next(one.freed_bytes for one in emptied.freed if one.name == "cache") >= SIZE
    assert torch.cuda.memory_reserved() < SIZE
