from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchdebug_magics import nanhunt
from torchdebug_magics.instruments.nanhunt.watch.sentinel import Leaves, survey
from torchdebug_magics.probing.graphs import leaves_of

nan, inf = math.nan, math.inf


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_a_mode_of_the_users_does_not_see_the_survey() -> None:
    class Mine(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    loss, gradients = [t(1.0)], [t(2.0), t(3.0)]
    with Mine() as mode:
        survey(loss, gradients)
    assert mode.count == 0


def test_a_deep_graph_is_no_recursion() -> None:
    x = h = torch.ones(1, requires_grad=True)
    for _ in range(5000):
        h = h * 1
    assert [id(one) for one in leaves_of([h])] == [id(x)]


def test_leaves_are_held_weakly() -> None:
    leaves, x = Leaves(), torch.ones(1, requires_grad=True)
    assert list(leaves.of("here", (x * 2,), {})) == [id(x)]
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    y = torch.ones(1, requires_grad=True)
    assert list(leaves.of("here", (y * 2,), {})) == [id(y)]


@pytest.mark.parametrize("bad", [nan, inf])
def test_a_new_leaf_at_a_known_place_is_watched(bad: float) -> None:
    # The graph of a place may change: here a second leaf joins after some steps, and only its gradient is bad.
    a, b = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    with nanhunt(keep_going=True) as session:
        for step in range(3):
            loss = a.sum() if step < 2 else a.sum() + (b * t(bad)).sum() * 0
            with torch.no_grad():
                finite = torch.zeros(())
            loss = loss if step < 2 else torch.where(torch.tensor(True), finite + a.sum(), loss)
            loss.backward()
    assert session.report.found


def test_history_is_the_largest_magnitude_of_each_backward() -> None:
    x = t(2.0).requires_grad_()
    with nanhunt() as session:
        for scale in (1.0, 10.0, 0.5):
            x.grad = None
            (x * scale).sum().backward()
    assert session.report.history == (2.0, 20.0, 1.0)
    assert session.report.losses == (2.0, 20.0, 1.0)
    assert session.report.backward_count == 3


def test_one_finite_run_says_what_was_checked() -> None:
    model = torch.nn.Linear(2, 1)
    with nanhunt() as session:
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
    assert "1 backward pass" in session.report.verdict
    assert "1 forward-only model call" in session.report.verdict
