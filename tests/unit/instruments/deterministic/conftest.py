"""A process whose flags are as torch begins, before and after each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch._inductor.config

from tests.unit.instruments.deterministic.everything import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def as_torch_begins() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for name, backend in BACKENDS.items():
        backend.fp32_precision = "tf32" if name in {"cudnn.conv", "cudnn.rnn"} else "none"
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
