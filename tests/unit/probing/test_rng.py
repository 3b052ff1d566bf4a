from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torchdebug_magics.probing.rng import RandomKeeper, RandomState, _numpy_twister, _python_twister, same_state

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


GLOBAL = np.random  # the global one is the one that users seed


def test_a_keeper_sees_every_draw() -> None:
    keeper = RandomKeeper()
    draws: list[Callable[[], object]] = [
        lambda: None,
        GLOBAL.rand,
        GLOBAL.randn,  # draws two, and keeps one
        GLOBAL.randn,  # takes the one that was kept
        lambda: GLOBAL.rand(624 * 2),
        GLOBAL.randn,
        lambda: GLOBAL.seed(0),
        lambda: None,
    ]
    for draw in draws:
        draw()
        taken, told = keeper.take(), GLOBAL.get_state()
        expected = GLOBAL.randn(3).tolist()
        taken.put_back()
        assert GLOBAL.randn(3).tolist() == expected
        GLOBAL.set_state(told)


def test_a_keeper_sees_every_draw_from_pythons_generator() -> None:
    keeper, before = RandomKeeper(), random.getstate()
    draws: list[Callable[[], object]] = [
        lambda: None,
        random.random,
        lambda: random.gauss(0, 1),  # draws two, and keeps one
        lambda: random.gauss(0, 1),  # takes the one that was kept
        lambda: [random.random() for _ in range(624)],  # comes back to the same position
        lambda: random.seed(0),
        random.random,
        lambda: random.seed(1),
        random.random,
        lambda: random.setstate(before),
        lambda: None,
    ]
    for draw in draws:
        draw()
        assert keeper.take().python == random.getstate()


def test_an_unchanged_state_is_not_read_again() -> None:
    keeper = RandomKeeper()
    first = keeper.take()
    assert _python_twister() is not None
    assert keeper.take().python is first.python
    assert keeper.take().numpy is first.numpy
    random.random()
    assert keeper.take().python is not first.python


def test_a_keeper_with_another_kind_of_generator() -> None:
    before = GLOBAL.get_bit_generator()
    try:
        GLOBAL.set_bit_generator(GLOBAL.PCG64(1))
        keeper = RandomKeeper()
        assert _numpy_twister(GLOBAL.get_bit_generator()) is None
        drawn = keeper.take().numpy
        GLOBAL.rand()
        assert not same_state(keeper.take().numpy, drawn)
    finally:
        GLOBAL.set_bit_generator(before)
    assert keeper.take().numpy is not None
