"""Modes of ours leave the stack in any order, and torch's notes of it stay true."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torchdebug_magics.probing.dispatch import enter, modes, put_unnoticed, take_off


class Plain(TorchDispatchMode):
    is_noticed = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return not cls.is_noticed

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return func(*args, **(kwargs or {}))


class Noticed(Plain):
    is_noticed = True


def notes() -> tuple[bool, bool]:
    return _python_dispatch._is_in_torch_dispatch_mode, _python_dispatch._is_in_any_mode_without_ignore_compile_internals


def put(stack: ExitStack, mode: Plain, height: int) -> None:
    if mode.is_noticed:
        enter(stack, mode)
    else:
        put_unnoticed(stack, mode, height)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_the_others_stay_as_they_stood(seed: int) -> None:
    order = random.Random(seed)
    standing: list[tuple[Plain, ExitStack]] = []
    for kind in order.choices([Plain, Noticed], k=6):
        mode, stack = kind(), ExitStack()
        height = len(standing) if kind.is_noticed else order.randint(0, len(standing))
        put(stack, mode, height)
        standing.insert(height, (mode, stack))
        assert modes() == [one for one, _ in standing]
    while standing:
        assert notes() == (any(one.is_noticed for one, _ in standing),) * 2
        _, stack = standing.pop(order.randrange(len(standing)))
        stack.close()
        assert modes() == [one for one, _ in standing]
        assert torch.ones(2).sum().item() == 2.0
    assert notes() == (False, False)


def test_one_that_is_not_there_is_none_to_take_off() -> None:
    with Plain() as stays:
        assert not take_off(Plain())
        assert modes() == [stays]
