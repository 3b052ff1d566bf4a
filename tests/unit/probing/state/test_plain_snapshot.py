"""A snapshot of plain objects gives back what they held, by identity, and keeps alive nothing else."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.attributes import Names
from torchdebug_magics.probing.state.snapshot import OF_A_STEP, Bound, Snapshot


def place(**names: Any) -> Names:
    """Where the user keeps them."""
    return Names(names, frozenset(names))


class Box:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Pair(NamedTuple):
    left: Any
    right: Any


def grown(chance: random.Random, made: list[Any], depth: int = 4) -> Any:
    """A structure as users build them; `made` gets all that is not a number."""
    if not depth or chance.random() < 0.2:
        value: Any = chance.choice([1, "a", None, lambda: torch.ones(2, requires_grad=True) * 2])
        value = value() if callable(value) else value
    else:
        parts = [grown(chance, made, depth - 1) for _ in range(chance.randrange(4))]
        parts += chance.sample(made, min(len(made), chance.randrange(2)))  # one object in several places
        kinds: list[Callable[[], Any]] = [
            lambda: list(parts),
            lambda: tuple(parts),
            lambda: deque(parts, maxlen=9),
            lambda: Pair(parts, 1),
            lambda: dict(enumerate(parts)),
            lambda: Box(**{f"name{number}": one for number, one in enumerate(parts)}),
            lambda: Box(layer=torch.nn.Linear(1, 1), parts=parts),
        ]
        value = chance.choice(kinds)()
    if not isinstance(value, (int, str, type(None))):
        made.append(value)
    return value


def change(value: Any, chance: random.Random) -> None:
    """Something is added, and what is no container is replaced."""
    if isinstance(value, Box):
        value.new = 1
    elif isinstance(value, dict):
        value.update({key: 7 for key, one in value.items() if isinstance(one, (int, str))}, new=[1])
    elif isinstance(value, (list, deque)):
        value.appendleft(1) if isinstance(value, deque) else value.insert(chance.randrange(len(value) + 1), [2])


def look(value: Any) -> list[int]:
    parts = vars(value) if isinstance(value, Box) else value
    parts = parts.items() if isinstance(parts, dict) else parts if isinstance(parts, (list, tuple, deque)) else ()
    return [id(value), *(id(one) for part in parts for one in (part if isinstance(parts, type({}.items())) else (part,)))]


@pytest.mark.parametrize("seed", range(40))
def test_what_a_step_holds_comes_back_itself(seed: int) -> None:
    chance, made = random.Random(seed), list[Any]()
    where = place(value=[grown(chance, made) for _ in range(3)])
    before = [look(one) for one in made]
    snapshot = Snapshot([where], OF_A_STEP)
    for one in made:
        change(one, chance)
    snapshot.put_back(Guard())
    assert [look(one) for one in made] == before


def marked(node: Any) -> Box:
    """An object that dies with a node of a graph."""
    node.metadata["mark"] = mark = Box()
    return mark


@pytest.mark.parametrize("seed", range(40))
def test_no_tensor_is_kept_alive_and_no_graph(seed: int) -> None:
    made: list[Any] = []
    names = {"value": [torch.ones(1), *(grown(random.Random(seed), made) for _ in range(3))]}
    alive = [weakref.ref(mark) for one in made if isinstance(one, torch.Tensor) for mark in (one, marked(one.grad_fn))]
    snapshot = Snapshot([Names(names, frozenset(names))], OF_A_STEP)
    names.clear()
    made.clear()
    gc.collect()
    assert not any(one() is not None for one in alive)
    snapshot.put_back(Guard())
    assert not names


@pytest.mark.parametrize("make", [lambda one: {one: 1}, lambda one: [lambda: one]])
def test_a_tensor_dies_that_is_a_key_or_in_a_function(make: Any) -> None:
    names = {"held": make(torch.ones(1))}
    alive = weakref.ref(next(iter(names["held"])))
    snapshot = Snapshot([Names(names, frozenset(names))], OF_A_STEP)
    names.clear()
    gc.collect()
    assert alive() is None
    snapshot.put_back(Guard())
    assert not names


def test_a_queue_comes_back() -> None:
    line: Queue[Any] = Queue()
    for item in ([1], (2, [3])):
        line.put(item)
    first = line.queue[0]
    kept = Snapshot([place(line=line)], OF_A_STEP)
    line.get_nowait().append(5)
    line.get_nowait()
    line.task_done()
    kept.put_back(Guard())
    assert line.qsize() == 2
    assert line.unfinished_tasks == 2
    assert line.get_nowait() is first
    assert first == [1]
    assert line.get_nowait() == (2, [3])


def test_the_objects_are_the_very_same() -> None:
    inner: list[Any] = [1]
    outer = {"inner": inner, "again": inner}
    kept = Snapshot([place(outer=outer)], OF_A_STEP)
    outer["inner"], outer["again"] = [], []
    inner.append(2)
    kept.put_back(Guard())
    assert outer["inner"] is inner
    assert outer["again"] is inner
    assert inner == [1]


def test_a_structure_that_holds_itself() -> None:
    loop: list[Any] = [1, torch.ones(1)]
    loop.append((loop, {"loop": loop}))
    kept = Snapshot([place(loop=loop)], OF_A_STEP)
    loop.append(2)
    kept.put_back(Guard())
    assert len(loop) == 3
    assert loop[2][0] is loop


def test_a_list_of_tensors_that_still_live_comes_back() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    inner = [x, (y, 1), Pair(x, y)]
    value = {"k": inner, "n": 1}
    kept = Snapshot([place(value=value)], OF_A_STEP)
    inner.clear()
    value["n"] = 2
    kept.put_back(Guard())
    assert value["k"] is inner
    assert value["n"] == 1
    assert inner[0] is x
    assert inner[1][0] is y
    assert inner[2] == Pair(x, y)


def test_a_dead_value_of_a_dict_does_not_hinder_the_others() -> None:
    value = Box(loss=torch.ones(1), n=1)
    kept = Snapshot([place(value=value)], OF_A_STEP)
    value.loss, value.n = torch.zeros(1), 2
    gc.collect()
    kept.put_back(Guard())
    assert value.n == 1
    assert value.loss == 0


def test_numbers_of_tensors_and_modules_are_not_touched() -> None:
    x, net = torch.ones(1), torch.nn.Linear(1, 1)
    value = [x, net, np.ones(1)]
    kept = Snapshot([place(value=value)], OF_A_STEP)
    x.fill_(3)
    net.note = 1
    net.register_forward_hook(lambda *_: None)
    kept.put_back(Guard())
    assert x == 3
    assert net.note == 1
    assert len(net._forward_hooks) == 1


def test_an_installed_object_comes_back_where_it_holds_numbers_alone() -> None:
    kind = type("Meter", (Box,), {"__module__": "pytest"})
    meter, other = kind(n=1), kind(n=1, held=Box())
    snapshot = Snapshot([place(meter=meter, other=other)], OF_A_STEP)
    meter.n = other.n = 2
    snapshot.put_back(Guard())
    assert (meter.n, other.n) == (1, 2)


def test_a_property_called_dict_is_not_asked() -> None:
    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            pytest.fail("asked")

    Snapshot([place(odd=Odd())], OF_A_STEP).put_back(Guard())
    Snapshot([Odd()]).put_back(Guard())


def test_it_is_bounded() -> None:
    nested: list[Any] = []
    for _ in range(50):
        nested = [nested]
    large = list(range(1000))
    kept = Snapshot([place(nested=nested, large=large, small=[1])], Bound(bytes=1600, levels=3, plain=True))
    assert len(kept._held) < 10
    large.append(1)
    kept.put_back(Guard())
    assert len(large) == 1001


def test_a_place_in_a_class_comes_back() -> None:
    class Config:
        count = 0

    kept = Snapshot([Names(Config, frozenset({"count", "new"}))], OF_A_STEP)
    Config.count, Config.new = 1, 2  # type: ignore[attr-defined]
    kept.put_back(Guard())
    assert Config.count == 0
    assert not hasattr(Config, "new")
