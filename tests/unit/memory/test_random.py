"""Whatever is built at random: each path that reads as Python leads to a tensor of the storage that it was given for."""

from __future__ import annotations

import collections
import random
import re
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from torchdebug_magics.memory.found import find_holders

_NAMES = 8
READS_AS_PYTHON = re.compile(r"mymod(\.\w+|\[[^\]]+\])*$")


class Box:
    def __init__(self, held: object) -> None:
        self.held = held


class Slot:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class Chain(dict):
    """A dict with attributes of its own."""


def chained(held: object, number: int) -> Chain:
    made = Chain({number: held})
    made.beside = held
    return made


def module(held: object) -> nn.Module:
    made = nn.Module()
    if isinstance(held, nn.Module):
        made.part = held
    elif isinstance(held, torch.Tensor):
        made.register_buffer("buffer", held)
    else:
        made.other = held
    return made


MAKERS: list[Any] = [
    lambda held, number: [number] * number + [held],
    lambda held, number: (held, number),
    lambda held, number: {f"key{number}": held},
    lambda held, number: {number: held, (number, "x"): number},
    lambda held, _: collections.deque([held]),
    lambda held, number: collections.OrderedDict({number: held}),
    lambda held, _: Box(held),
    lambda held, _: Slot(held),
    lambda held, _: types.SimpleNamespace(held=held),
    lambda held, _: module(held),
    chained,
]


def built(rng: random.Random, module: types.ModuleType) -> set[int]:
    """Names in the module under each of which a tensor lies deep; some are shared, some are views."""
    storages, parts = set(), []
    for number in range(_NAMES):
        tensor = torch.ones(4) if not parts or rng.random() < 0.6 else torch.zeros(2, requires_grad=True) * 2
        storages.add(tensor.untyped_storage()._cdata)
        held: Any = tensor[1:] if rng.random() < 0.3 else tensor
        for _ in range(rng.randrange(6)):
            held = rng.choice(MAKERS)(held, rng.randrange(4))
            if parts and rng.random() < 0.2:
                held = [held, rng.choice(parts)]
            parts.append(held)
        setattr(module, f"name{number}", held)
    return storages


def value_of(path: str, names: dict[str, Any]) -> Any:
    """Attributes of a module by its dotted path are reached as `get_submodule` does."""
    return eval(re.sub(r"\.(\d+)", r"[\1]", path), dict(names))


@pytest.mark.parametrize("seed", range(10))
def test_a_path_leads_to_what_it_was_given_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mymod = types.ModuleType("mymod")
    monkeypatch.setitem(sys.modules, "mymod", mymod)
    wanted = built(random.Random(seed), mymod)
    held = find_holders(wanted)
    assert held.is_whole
    assert set(held.paths) == wanted
    for storage, path in held.paths.items():
        assert READS_AS_PYTHON.match(path), path
        assert value_of(path, {"mymod": mymod}).untyped_storage()._cdata == storage, path

    monkeypatch.delitem(sys.modules, "mymod")
    for number in range(_NAMES):  # each of the roots that are named keeps it alive for itself, and no other one does
        root = f"mymod.name{number}"
        told = {
            storage
            for storage, holding in held.holdings.items()
            if root in holding.others or re.split(r"[.\[]", holding.path)[1] == f"name{number}"
        }
        alone = find_holders(wanted, extra_roots=[("alone", getattr(mymod, f"name{number}"))])
        assert set(alone.paths) == told
