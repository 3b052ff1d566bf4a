from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from torchdebug_magics.probing.state.rng import RandomState

GLOBAL = np.random  # the global one is the one that users seed
DRAWS = {
    "python": lambda: [random.random(), random.gauss(0, 1), random.randrange(100)],
    "numpy": lambda: [*np.random.rand(3), np.random.randn()],  # noqa: NPY002 - the global one is the one that users seed
    "torch": lambda: torch.rand(3).tolist() + torch.randn(1).tolist() + torch.randperm(5).tolist(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(20)).tolist(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_numbers_come_again(name: str) -> None:
    state = RandomState.take()
    first = DRAWS[name]()
    state.put_back()
    assert DRAWS[name]() == first


def test_taking_the_state_draws_nothing() -> None:
    state = RandomState.take()
    wanted = [draw() for draw in DRAWS.values()]
    state.put_back()
    RandomState.take()
    assert [draw() for draw in DRAWS.values()] == wanted


def test_whatever_is_drawn_or_set_before_the_same_numbers_come_again() -> None:
    chosen = random.Random(0)
    acts = [
        lambda: None,
        GLOBAL.rand,
        GLOBAL.randn,
        lambda: GLOBAL.rand(700),
        lambda: GLOBAL.seed(3),
        lambda: GLOBAL.set_bit_generator(GLOBAL.PCG64(1)),
        lambda: GLOBAL.set_bit_generator(GLOBAL.MT19937(1)),
    ]
    before = GLOBAL.get_bit_generator()
    try:
        for _ in range(100):
            chosen.choice(acts)()
            state = RandomState.take()
            assert state.holds()
            first = DRAWS["numpy"]()
            state.put_back()
            assert DRAWS["numpy"]() == first
    finally:
        GLOBAL.set_bit_generator(before)


def test_a_state_may_be_put_back_twice() -> None:
    state = RandomState.take()
    state.put_back()
    first = DRAWS["torch"]()
    state.put_back()
    assert DRAWS["torch"]() == first


def test_cuda_is_not_woken() -> None:
    before = torch.cuda.is_initialized()
    RandomState.take().put_back()
    assert torch.cuda.is_initialized() is before


def test_numpy_with_another_kind_of_generator() -> None:
    before = GLOBAL.get_bit_generator()
    try:
        GLOBAL.set_bit_generator(GLOBAL.PCG64(1))
        state = RandomState.take()
        drawn = GLOBAL.rand()
        assert not state.holds()
        state.put_back()
        assert GLOBAL.rand() == drawn
    finally:
        GLOBAL.set_bit_generator(before)
