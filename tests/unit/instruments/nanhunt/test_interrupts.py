"""An interrupt at any point of a look into a bad step leaves all as the bad step did, and nothing of ours behind."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from torchdebug_magics import nanhunt
from torchdebug_magics.instruments.nanhunt.rerun.step_rerun import StepRerun

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.rand(4, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin, self.calls = nn.BatchNorm1d(3), nn.Linear(3, 1), list[int]()

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.append(len(self.calls))
        return self.lin(nn.functional.dropout(self.norm(x), 0.5))


@functools.cache
def _is_ours(file: str) -> bool:
    return "torchdebug_magics" in file or file.endswith(("contextlib.py", "warnings.py"))


class Interrupts:
    """Raises at chosen lines of ours, counted while a replay is under way, down to those that put things back."""

    def __init__(self, *places: int) -> None:
        self._places = set(places)
        self.seen = 0
        self._inside = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not _is_ours(frame.f_code.co_filename):
            return None  # of its lines nothing is told: those of torch are the most by far
        if frame.f_code is StepRerun._run.__code__:
            self._inside += {"call": 1, "return": -1}.get(event, 0)
        if self._inside and event == "line":
            self.seen += 1
            if self.seen in self._places:
                raise KeyboardInterrupt
        return self

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def interrupted(*places: int) -> tuple[bool, int]:
    """A hunted cell with interrupts.coming(): whether one came, and how many places there were."""
    model = Model()
    interrupts, after = Interrupts(*places), dict[str, torch.Tensor]()
    before = sys.stdout, logging.root.manager.disable, warnings.filters
    came, random_state = False, torch.get_rng_state()
    try:
        with nanhunt(keep_going=True):
            loss = (model(X).sum() * 0).sqrt()
            after = {name: buffer.clone() for name, buffer in model.named_buffers()}
            calls, random_state = list(model.calls), torch.get_rng_state()
            with interrupts.coming():
                loss.backward()
    except KeyboardInterrupt:
        came = True
    assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())
    assert model.calls == calls
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.lin.weight.grad is not None
    assert (sys.stdout, logging.root.manager.disable) == before[:2]
    assert warnings.filters is before[2]
    assert not torch._C._len_torch_dispatch_stack()
    assert model(X).isfinite().all()
    return came, interrupts.seen


def test_one_interrupt_wherever_it_comes() -> None:
    came, places = interrupted()
    assert not came
    assert places > 500
    for place in random.Random(0).sample(range(1, places), 8):
        interrupted(place)


def test_a_second_interrupt_in_the_middle_of_putting_back() -> None:
    _, places = interrupted()
    for place in random.Random(1).sample(range(places // 2, places), 4):
        interrupted(place, place + 3, place + 40)
