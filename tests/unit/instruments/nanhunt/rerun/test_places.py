"""Counters, globals, closures and small containers that a step writes come back; what it does not write is left alone."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from torchdebug_magics.instruments.nanhunt.rerun.written_places import Namespace, places_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.attributes import Names
from torchdebug_magics.probing.state.snapshot import OF_A_STEP, Snapshot

CODE = """\
import torch

total = 0
table = {"n": 0}
seen = []


class Config:
    count = 0

    def __init__(self):
        self.temperature = 1.0


config = Config()


def cool():
    config.temperature *= 0.5


def by_class():
    Config.count += 1


def closure():
    count = 0

    def inner():
        nonlocal count
        count += 1
        return count

    return inner


ticking = closure()


def helper():
    global total
    total += 1
    deeper()


def deeper():
    table["n"] += 1
    seen.append(table["n"])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.log = []
        self.names = {}
        self.lin = torch.nn.Linear(1, 1)

    def forward(self, x):
        self.steps += 1
        self.last = x
        self.log.append(self.steps)
        self.names[self.steps] = "step"
        helper()
        cool()
        by_class()
        ticking()
        return self.own(x)

    def own(self, x):
        self.inner = getattr(self, "inner", 0) + 1
        return x


def caller():
    helper()
    return sys._getframe(0)
"""


def naming(names: dict[str, Any]) -> Namespace:
    return Names(names, frozenset(names))


@pytest.fixture
def world() -> dict[str, Any]:
    names: dict[str, Any] = {"sys": sys, "__name__": "users_code"}
    exec(compile(CODE, "/home/me/users_code.py", "exec"), names)
    return names


READS = {
    "attribute": lambda w, net: net.steps,
    "attribute of an own method": lambda w, net: getattr(net, "inner", "absent"),
    "attribute that was not there": lambda w, net: hasattr(net, "last"),
    "global": lambda w, net: w["total"],
    "closure": lambda w, net: w["ticking"].__closure__[0].cell_contents,
}


@pytest.mark.parametrize("what", READS)
def test_what_a_forward_writes_comes_back(world: dict[str, Any], what: str) -> None:
    net = world["Net"]()
    net(torch.ones(1))
    before = READS[what](world, net)
    state = Snapshot(places_of([net]), OF_A_STEP)
    net(torch.ones(1))
    if what != "attribute that was not there":
        assert READS[what](world, net) != before
    state.put_back(Guard())
    assert READS[what](world, net) == before


def test_what_was_absent_is_absent_again(world: dict[str, Any]) -> None:
    net = world["Net"]()
    state = Snapshot(places_of([net]), OF_A_STEP)
    net(torch.ones(1))
    state.put_back(Guard())
    assert not hasattr(net, "last")
    assert not hasattr(net, "inner")


def test_containers_keep_their_identity(world: dict[str, Any]) -> None:
    net = world["Net"]()
    log, seen = net.log, world["seen"]
    state = Snapshot(places_of([net]), OF_A_STEP)
    net(torch.ones(1))
    state.put_back(Guard())
    assert net.log is log
    assert world["seen"] is seen


def test_functions_that_the_caller_names_are_looked_into(world: dict[str, Any]) -> None:
    frame = world["caller"]()
    state = Snapshot(places_of([], [frame]), OF_A_STEP)
    before = world["total"], dict(world["table"])
    world["helper"]()
    state.put_back(Guard())
    assert (world["total"], world["table"]) == before


def test_the_slots_of_a_state_take_the_present_one(world: dict[str, Any]) -> None:
    net = world["Net"]()
    first = Snapshot(places_of([net]), OF_A_STEP)
    net(torch.ones(1))
    second = Snapshot(first.objects())
    net(torch.ones(1))
    second.put_back(Guard())
    assert net.steps == 1
    first.put_back(Guard())
    assert net.steps == 0


def test_code_that_writes_nothing_costs_nothing() -> None:
    assert places_of([torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(2), torch.nn.LSTM(1, 1)]) == []


def test_tensors_are_held_weakly(world: dict[str, Any]) -> None:
    net = world["Net"]()
    x = torch.ones(1)
    net(x)
    state = Snapshot(places_of([net]), OF_A_STEP)
    alive = weakref.ref(x)
    del net.last, x
    gc.collect()
    assert alive() is None
    state.put_back(Guard())
    assert not hasattr(net, "last")


def test_a_tensor_that_still_lives_comes_back_itself(world: dict[str, Any]) -> None:
    net = world["Net"]()
    x = torch.ones(1)
    net(x)
    state = Snapshot(places_of([net]), OF_A_STEP)
    net(torch.zeros(1))
    state.put_back(Guard())
    assert net.last is x


def test_large_containers_of_a_function_are_left_alone(world: dict[str, Any]) -> None:
    # They are kept at each step: a list of ten thousand would cost more than it is worth.
    net = world["Net"]()
    world["seen"].extend(range(10_000))
    state = Snapshot(places_of([net]), OF_A_STEP)
    world["helper"]()
    state.put_back(Guard())
    assert len(world["seen"]) == 10_001
    assert world["table"] == {"n": 0}


def test_a_method_and_what_it_calls_are_looked_into() -> None:
    names: dict[str, Any] = {"__name__": "users_code"}
    source = """\
noted = []
class Meter:
    def __init__(self): self.n = {"seen": [0]}
    def update(self): self.n["seen"][0] += 1; note()
    def __call__(self): self.n["called"] = True; note()
def note(): noted.append([1])
meter = Meter()
"""
    exec(compile(source, "/home/me/users_code.py", "exec"), names)
    statement = "meter.update(); meter()"
    state = Snapshot([naming(names)])
    exec(statement, names)
    assert (names["noted"], names["meter"].n) == ([[1], [1]], {"seen": [1], "called": True})
    state.put_back(Guard())
    assert (names["noted"], names["meter"].n) == ([], {"seen": [0]})


def test_an_object_that_was_replaced_since_has_its_present_state_again() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = [1]

        def forward(self) -> None:
            self.log = [*self.log, 2]

    net = Net()
    first = net.log
    then = Snapshot(places_of([net]), OF_A_STEP)
    first.append(5)
    net.log = [7]
    now = Snapshot(then.objects())
    then.put_back(Guard())
    assert net.log is first
    assert first == [1]
    now.put_back(Guard())
    assert net.log == [7]
    assert first == [1, 5]


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(3), lambda: random.Random(3), lambda: np.random.default_rng(3)])
@pytest.mark.parametrize("where", ["variable", "attribute", "module", "global"])
def test_a_generator_continues_from_where_it_was(make: Any, where: str) -> None:
    def draw() -> Any:
        return generator.random() if hasattr(generator, "random") else torch.rand(1, generator=generator).item()

    generator = make()
    names: dict[str, Any] = {"generator": generator, "hold": Holder(generator), "where": sys._getframe}
    modules: list[torch.nn.Module] = []
    if where == "global":
        exec(compile("frame = where(0)\ndef draw(): return generator", "<a cell>", "exec"), names)
        places = places_of((), [names["frame"]])
    elif where == "module":
        modules = [Drawing(generator)]
        places = places_of(modules)
    else:
        places = places_of((), [frame_with(generator if where == "variable" else Holder(generator))])
    taken = Snapshot(places, OF_A_STEP)
    first = draw()
    taken.put_back(Guard())
    assert draw() == first


class Drawing(torch.nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.source = generator

    def forward(self) -> Any:
        return self.source


def frame_with(held: Any) -> Any:
    return sys._getframe() if held else None
