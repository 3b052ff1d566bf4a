"""Plain objects get back what they held, by identity; nothing of the user's is called, and no tensor is kept alive."""

from __future__ import annotations

import copy
import gc
import io
import queue
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchdebug_magics.instruments.nanhunt.rerun.written_places import Namespace
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.attributes import Names
from torchdebug_magics.probing.state.snapshot import OF_A_STEP, Bound, Snapshot


def place(*values: Any) -> Namespace:
    """Where the user keeps them."""
    names = {f"name{number}": value for number, value in enumerate(values)}
    return Names(names, frozenset(names))


class Box:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Slotted:
    __slots__ = ("a", "b")


@dataclass
class Data:
    n: int = 0
    items: list[int] = field(default_factory=list)


class MyList(list):  # type: ignore[type-arg]
    note = "class"


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - as users write it


def deep() -> dict[str, Any]:
    return {"a": [{"b": deque([{1, 2}])}], "n": 0}


def mylist() -> MyList:
    made = MyList([1])
    made.note = "own"
    return made


CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "deep": (deep(), lambda v: (v["a"][0]["b"][0].add(3), v.update(n=1), v["a"].append(4)), repr),
    "reordered": (OrderedDict(a=1, b=[2]), lambda v: (v.move_to_end("a"), v["b"].append(1)), repr),
    "counter": (Counter("aab"), lambda v: v.update("b"), repr),
    "defaultdict": (defaultdict(list), lambda v: v["x"].append(1), repr),
    "bounded": (deque([1, 2], maxlen=2), lambda v: v.append(3), repr),
    "emptied": ([[1], [2]], lambda v: v.clear(), repr),
    "popped": ([Box(n=1)], lambda v: setattr(v.pop(), "n", 2), lambda v: [one.n for one in v]),
    "attributes": (
        Box(n=1, inner=Box(m=[1])),
        lambda v: (v.inner.m.append(2), setattr(v, "new", 1), delattr(v, "n")),
        lambda v: (vars(v).get("n"), v.inner.m, hasattr(v, "new")),
    ),
    "dataclass": (Data(), lambda v: (v.items.append(1), setattr(v, "n", 3)), repr),
    "namespace": (SimpleNamespace(n=[1]), lambda v: v.n.append(3), repr),
    "subclass": (mylist(), lambda v: (v.append(1), setattr(v, "note", "")), lambda v: (list(v), v.note)),
    "tuple": (([1], Pair([2], 3)), lambda v: (v[0].append(1), v[1].left.append(1)), repr),
    "file": (io.StringIO("a\nb\nc\n"), lambda v: v.readline(), lambda v: v.tell()),
    "random": (Box(r=random.Random(0)), lambda v: v.r.random(), lambda v: copy.copy(v.r).random()),
    "numpy": (Box(r=np.random.default_rng(0)), lambda v: v.r.random(), lambda v: copy.deepcopy(v.r).random()),
    "generator": (Box(r=torch.Generator().manual_seed(0)), lambda v: torch.rand(1, generator=v.r), lambda v: v.r.get_state().tolist()),
}


@pytest.mark.parametrize("bound", [OF_A_STEP, Bound()])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_comes_back(name: str, bound: Bound) -> None:
    made, change, read = CHANGES[name]
    value = copy.deepcopy(made)
    before = read(value)
    kept = Snapshot([place(value)], bound)
    change(value)
    assert read(value) != before
    kept.put_back(Guard())
    assert read(value) == before


def test_slots_come_back_also_those_that_were_empty() -> None:
    value = Slotted()
    value.a = [1]
    kept = Snapshot([place(value)], OF_A_STEP)
    value.a.append(2)
    value.b = 1
    kept.put_back(Guard())
    assert value.a == [1]
    assert not hasattr(value, "b")


def test_a_queue_comes_back() -> None:
    line: queue.Queue[Any] = queue.Queue()
    for item in ([1], (2, [3])):
        line.put(item)
    first = line.queue[0]
    kept = Snapshot([place(line)], OF_A_STEP)
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
    kept = Snapshot([place(outer)], OF_A_STEP)
    outer["inner"], outer["again"] = [], []
    inner.append(2)
    kept.put_back(Guard())
    assert outer["inner"] is inner
    assert outer["again"] is inner
    assert inner == [1]


def test_a_structure_that_holds_itself() -> None:
    loop: list[Any] = [1]
    loop.append((loop, {"loop": loop}))
    kept = Snapshot([place(loop)], OF_A_STEP)
    loop.append(2)
    kept.put_back(Guard())
    assert len(loop) == 2
    assert loop[1][0] is loop


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [[x]],
        lambda x: {"k": ({1: [x]},)},
        lambda x: Box(held=[Box(x=x)]),
        lambda x: deque([Pair(x, [x])]),
        lambda x: [torch.nn.Linear(1, 1), lambda: x],
        lambda x: {x: 1},
    ],
)
def test_no_tensor_is_kept_alive(make: Any) -> None:
    x = torch.ones(1)
    alive, value = weakref.ref(x), make(x)
    names = {"value": value}
    kept = Snapshot([Names(names, frozenset(names))], OF_A_STEP)
    names.clear()
    del value, x
    gc.collect()
    assert alive() is None
    kept.put_back(Guard())
    assert not names


def test_a_list_of_tensors_that_still_live_comes_back() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    inner = [x, (y, 1)]
    value = {"k": inner, "n": 1}
    kept = Snapshot([place(value)], OF_A_STEP)
    inner.clear()
    value["n"] = 2
    kept.put_back(Guard())
    assert value["k"] is inner
    assert value["n"] == 1
    assert inner[0] is x
    assert inner[1][0] is y


def test_what_is_alive_for_a_while_comes_back_although_it_was_dropped() -> None:
    line = deque([(torch.ones(1), torch.zeros(1)), (torch.ones(2), torch.zeros(2))])
    ids = [id(one) for one in line]
    kept = Snapshot([line])
    line.popleft()
    line.popleft()
    gc.collect()
    kept.put_back(Guard())
    assert [id(one) for one in line] == ids


def test_a_dead_value_of_a_dict_does_not_hinder_the_others() -> None:
    value = Box(loss=torch.ones(1), n=1)
    kept = Snapshot([place(value)], OF_A_STEP)
    value.loss, value.n = torch.zeros(1), 2
    gc.collect()
    kept.put_back(Guard())
    assert value.n == 1
    assert value.loss == 0


def test_numbers_of_tensors_and_modules_are_not_touched() -> None:
    x, net = torch.ones(1), torch.nn.Linear(1, 1)
    value = [x, net, np.ones(1)]
    kept = Snapshot([place(value)], OF_A_STEP)
    x.fill_(3)
    net.note = 1
    net.register_forward_hook(lambda *_: None)
    kept.put_back(Guard())
    assert x == 3
    assert net.note == 1
    assert len(net._forward_hooks) == 1


def test_nothing_of_the_users_is_called() -> None:
    def trap(*_: Any, **__: Any) -> Any:
        pytest.fail("called")

    names = ["getattr", "eq", "hash", "iter", "len", "bool", "setattr", "repr", "contains", "copy", "deepcopy", "reduce_ex"]
    body = {f"__{name}__": trap for name in names} | {"asked": property(trap)}
    trapped, listed, mapped = (type("Trap", (base,), body)() for base in (object, list, dict))
    object.__setattr__(trapped, "n", 1)
    list.append(listed, [1])
    dict.__setitem__(mapped, "k", [1])
    value = [trapped, listed, mapped, {"trap": trapped}]
    kept = Snapshot([place(value)], OF_A_STEP)
    object.__setattr__(trapped, "n", 2)
    list.append(listed, 2)
    dict.__setitem__(mapped, "k", 3)
    value.clear()
    kept.put_back(Guard())
    assert object.__getattribute__(trapped, "n") == 1
    assert list.__len__(listed) == 1
    assert dict.__getitem__(mapped, "k") == [1]
    assert len(value) == 4


def test_a_property_called_dict_is_not_asked() -> None:
    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            pytest.fail("asked")

    Snapshot([place(Odd())], OF_A_STEP).put_back(Guard())
    Snapshot([Odd()]).put_back(Guard())


def test_it_is_bounded() -> None:
    nested: list[Any] = []
    for _ in range(50):
        nested = [nested]
    large = list(range(1000))
    kept = Snapshot([place(nested, large, [1])], Bound(bytes=1600, levels=3, plain=True))
    assert len(kept._held) < 10
    large.append(1)
    kept.put_back(Guard())
    assert len(large) == 1001


def test_what_did_not_change_is_not_written() -> None:
    class Counting(dict):  # type: ignore[type-arg]
        pass

    value = {"a": Counting(x=1), "b": [1, 2]}
    before = {key: id(one) for key, one in value.items()}
    iterator = iter(value)
    Snapshot([place(value)], OF_A_STEP).put_back(Guard())
    Snapshot([value]).put_back(Guard())
    assert list(iterator) == ["a", "b"]  # a dict that was written would say that it changed
    assert {key: id(one) for key, one in value.items()} == before


@dataclass(frozen=True)
class Key:
    name: str


class Strange:
    """A key that is asked for itself."""

    asked = 0

    def __hash__(self) -> int:
        Strange.asked += 1
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other


def test_no_key_is_asked_for_its_hash_where_nothing_changed() -> None:
    held = {Strange(): [1]}
    Strange.asked = 0
    for bound in (OF_A_STEP, Bound()):
        Snapshot([place(held)], bound).put_back(Guard())
    assert Strange.asked == 0


def test_keys_of_the_users_come_back_with_all_that_is_reachable() -> None:
    made = {Key("a"): [1]}
    kept = Snapshot([made])
    made[Key("a")].append(2)
    made[Key("b")] = [3]
    kept.put_back(Guard())
    assert made == {Key("a"): [1]}


def test_a_list_that_replaced_another_is_the_one_that_is_kept() -> None:
    names: dict[str, Any] = {"log": [1]}
    where = Names(names, frozenset(names))
    Snapshot([where], OF_A_STEP)
    names["log"] = later = [2]
    kept = Snapshot([where], OF_A_STEP)
    later.append(3)
    kept.put_back(Guard())
    assert names["log"] is later
    assert later == [2]


@pytest.mark.parametrize("made", [queue.LifoQueue, queue.PriorityQueue])
def test_every_queue_comes_back_and_keeps_what_others_put(made: Any) -> None:
    line = made()
    for item in (3, 1, 2):
        line.put(item)
    kept = Snapshot([line])
    first = line.get()
    line.put(5)
    kept.put_back(Guard())
    assert sorted(line.queue) == [1, 2, 3, 5]
    assert line.get() == (5 if made is queue.LifoQueue else first)


def test_a_place_in_a_class_comes_back() -> None:
    class Config:
        count = 0

    kept = Snapshot([Names(Config, frozenset({"count", "new"}))], OF_A_STEP)
    Config.count, Config.new = 1, 2  # type: ignore[attr-defined]
    kept.put_back(Guard())
    assert Config.count == 0
    assert not hasattr(Config, "new")
