"""Counters, globals, closures and small containers that a step writes come back; what it does not write is left alone."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
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
    "list of the module": lambda w, net: list(net.log),
    "dict of the module": lambda w, net: dict(net.names),
    "global": lambda w, net: w["total"],
    "global dict, two calls deep": lambda w, net: dict(w["table"]),
    "global list, two calls deep": lambda w, net: list(w["seen"]),
    "attribute of a global object": lambda w, net: w["config"].temperature,
    "attribute of a class": lambda w, net: w["Config"].count,
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


@pytest.mark.parametrize(
    "made",
    [
        lambda x: [x],
        lambda x: {"k": x},
        lambda x: {"k": (x, x)},
        lambda x: {"k": [x]},
        lambda x: [[x]],
        lambda x: deque([x]),
    ],
    ids=["list", "dict", "dict of tuple", "dict of list", "list of list", "deque"],
)
def test_no_tensor_is_kept_alive_by_a_container(made: Any) -> None:
    x = torch.ones(1)
    alive, held = weakref.ref(x), made(x)
    state = Snapshot([naming({"held": held})], OF_A_STEP)
    held.clear()
    del x
    gc.collect()
    assert alive() is None
    state.put_back(Guard())


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list": ([1, 2], lambda held: held.append(3)),
    "dict": ({"a": 1}, lambda held: held.update(b=2)),
    "dict order": ({"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a"))),
    "set": ({1}, lambda held: held.add(2)),
    "deque": (deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "Counter": (Counter("ab"), lambda held: held.update("a")),
    "OrderedDict": (OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "defaultdict": (defaultdict(list, a=[1]), lambda held: held["b"]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_kind_of_container_comes_back(name: str) -> None:
    held, change = CONTAINERS[name]
    before, kind, order = repr(held), type(held), list(held)
    state = Snapshot([naming({"held": held})], OF_A_STEP)
    change(held)
    state.put_back(Guard())
    assert (repr(held), type(held), list(held)) == (before, kind, order)


def test_a_list_inside_a_container_comes_back() -> None:
    held: dict[str, list[int]] = {"losses": [1]}
    state = Snapshot([naming({"held": held})], OF_A_STEP)
    held["losses"].append(2)
    state.put_back(Guard())
    assert held == {"losses": [1]}


@pytest.mark.parametrize(
    ("statement", "attribute"), [("box.n += 1", "n"), ("box.inner.n = 5", "inner.n"), ("box.new = 1", "new"), ("box.n, y = 1, 2", "n")]
)
def test_attributes_that_statements_store(statement: str, attribute: str) -> None:
    class Box:
        pass

    box = Box()
    box.n, box.inner = 0, Box()
    box.inner.n = 0
    names: dict[str, Any] = {"box": box}
    state = Snapshot([naming(names)], OF_A_STEP)
    exec(statement, names)
    state.put_back(Guard())
    assert (box.n, box.inner.n, hasattr(box, "new")) == (0, 0, False)


def test_no_property_is_asked() -> None:
    class Trap:
        @property
        def asked(self) -> Any:
            pytest.fail("a property was asked")

        def __getattr__(self, name: str) -> Any:
            pytest.fail(f"{name} was asked")

    Snapshot([naming({"trap": Trap()})], OF_A_STEP).put_back(Guard())
    Snapshot([Trap()]).put_back(Guard())


def test_large_containers_of_a_function_are_left_alone(world: dict[str, Any]) -> None:
    # They are kept at each step: a list of ten thousand would cost more than it is worth.
    net = world["Net"]()
    world["seen"].extend(range(10_000))
    state = Snapshot(places_of([net]), OF_A_STEP)
    world["helper"]()
    state.put_back(Guard())
    assert len(world["seen"]) == 10_001
    assert world["table"] == {"n": 0}


def test_a_large_list_that_a_step_names_is_not_copied_item_by_item() -> None:
    # `losses` of a long run: one entry a step must not make each replay write a hundred thousand.
    held = list(range(100_000))
    state = Snapshot([held])
    held.append(1)
    state.put_back(Guard())
    assert len(held) == 100_000


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
