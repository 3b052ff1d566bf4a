"""What code can reach from an object is, after put_back, what it was; nothing is asked of it, and nothing else is touched."""

from __future__ import annotations

import functools
import gc
import io
import logging
import queue
import random
import sys
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import CellType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state import kinds
from torchdebug_magics.probing.state.attributes import Names
from torchdebug_magics.probing.state.process_settings import SETTINGS
from torchdebug_magics.probing.state.snapshot import OF_A_STEP, Bound, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Box:
    made = 0

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def count(self) -> None:
        type(self).made += 1


class Slotted:
    __slots__ = ("n",)


@dataclass
class Data:
    n: int = 0
    items: list[int] = field(default_factory=list)


class Pair(NamedTuple):
    left: Any
    right: Any


class Key:
    """It counts how often it is asked for its hash."""

    asked = 0

    def __hash__(self) -> int:
        Key.asked += 1
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other


class Loud(list[Any]):
    """A list that counts what is asked of it."""

    asked = 0

    def append(self, item: Any) -> None:
        self.asked += 1
        super().append(item)

    def clear(self) -> None:
        raise AssertionError


def slotted() -> Slotted:
    one = Slotted()
    one.n = 1
    return one


def queue_of(*items: int) -> queue.Queue[int]:
    one: queue.Queue[int] = queue.Queue()
    for item in items:
        one.put(item)
    return one


def reading(text: str) -> io.StringIO:
    stream = io.StringIO(text)
    stream.readline()
    return stream


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what there is, what is done to it, how it is looked at
    "list": (lambda: [1, 2], lambda one: one.append(3), list),
    "order of a list": (lambda: [1, 2], lambda one: one.reverse(), list),
    "dict": (lambda: {"a": 1}, lambda one: one.update(a=2, b=3), dict),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda one: one.update(a=one.pop("a")), lambda one: list(one.items())),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda one: one.move_to_end("a"), lambda one: list(one.items())),
    "set": (lambda: {1}, lambda one: one.add(2), set),
    "deque": (lambda: deque([1, 2], 2), lambda one: one.append(3), list),
    "counter": (lambda: Counter("aab"), lambda one: one.update("c"), dict),
    "emptied": (lambda: [[1], [2]], lambda one: one.clear(), list),
    "taken out": (lambda: [Box(n=1)], lambda one: setattr(one.pop(), "n", 2), lambda one: [part.n for part in one]),
    "missing key": (lambda: defaultdict(list), lambda one: one["k"].append(1), dict),
    "inside": (lambda: {"a": [{"b": [0]}]}, lambda one: one["a"][0]["b"].append(1), lambda one: one["a"][0]["b"]),
    "inside a tuple": (lambda: ([0],), lambda one: one[0].append(1), lambda one: one[0]),
    "inside a named tuple": (lambda: Pair([0], 1), lambda one: one.left.append(1), repr),
    "attribute": (lambda: Box(n=1), lambda one: setattr(one, "n", 2), vars),
    "new attribute": (Box, lambda one: setattr(one, "n", 2), vars),
    "list in an attribute": (lambda: Box(n=[1]), lambda one: one.n.append(2), lambda one: one.n),
    "inside an attribute": (lambda: Box(one=Box(n=0)), lambda one: setattr(one.one, "n", 5), lambda one: one.one.n),
    "deleted attribute": (lambda: Box(n=1), lambda one: delattr(one, "n"), vars),
    "dataclass": (Data, lambda one: (one.items.append(1), setattr(one, "n", 3)), repr),
    "namespace": (lambda: SimpleNamespace(n=[1]), lambda one: one.n.append(3), repr),
    "empty slot": (Slotted, lambda one: setattr(one, "n", 2), lambda one: hasattr(one, "n")),
    "slot": (slotted, lambda one: setattr(one, "n", 2), lambda one: one.n),
    "class attribute": (Box, lambda one: one.count(), lambda _: Box.made),
    "a list of one's own": (Loud, lambda one: one.append(1), lambda one: (list(one), one.asked)),
    "queue": (lambda: queue_of(1, 2), lambda one: one.get(), lambda one: list(one.queue)),
    "random": (lambda: random.Random(0), lambda one: one.random(), lambda one: one.getstate()),
    "generator": (torch.Generator, lambda one: torch.rand(1, generator=one), lambda one: one.get_state().tolist()),
    "numpy generator": (lambda: np.random.default_rng(0), lambda one: one.random(), lambda one: str(one.bit_generator.state)),
    "array": (lambda: np.zeros(2), lambda one: one.__setitem__(0, 1), lambda one: one.tolist()),
    "stream read": (lambda: reading("a\nb\nc"), lambda one: one.readline(), lambda one: one.tell()),
    "stream written": (lambda: reading("a\nb"), lambda one: one.write("xyz"), lambda one: (one.getvalue(), one.tell())),
    "part of a module": (lambda: nn.Sequential(nn.ReLU()), lambda one: one[0].eval(), lambda one: one[0].training),
    "hook": (
        lambda: torch.ones(1, requires_grad=True),
        lambda one: one.register_hook(print),
        lambda one: len(one._backward_hooks or ()),
    ),
    "hook after a gradient": (
        lambda: torch.ones(1, requires_grad=True),
        lambda one: one.register_post_accumulate_grad_hook(print),
        lambda one: len(one._post_accumulate_grad_hooks or ()),
    ),
    "one more hook": (
        lambda: nn.Linear(1, 1),
        lambda one: one.register_forward_hook(print),
        lambda one: len(one._forward_hooks),
    ),
    "data of a parameter": (
        lambda: nn.Linear(1, 1),
        lambda one: setattr(one.weight, "data", torch.full((1, 1), 9.0)),
        lambda one: one.weight.data_ptr(),
    ),
}


NOT_PLAIN = {"class attribute", "array", "part of a module", "hook", "hook after a gradient", "one more hook", "data of a parameter"}
BOUNDS = [pytest.param(Bound(), id="all"), pytest.param(OF_A_STEP, id="plain")]
BOUNDED = [(name, bound) for name in CHANGES for bound in (Bound(), OF_A_STEP) if name not in NOT_PLAIN or not bound.plain]


def place(one: object) -> Names:
    """Where the user keeps it."""
    return Names({"name": one}, frozenset({"name"}))


@pytest.mark.parametrize(("name", "bound"), BOUNDED, ids=lambda value: value if isinstance(value, str) else f"plain={value.plain}")
def test_what_changed_is_as_it_was(name: str, bound: Bound) -> None:
    make, change, look = CHANGES[name]
    one = make()
    before = repr(look(one))
    snapshot = Snapshot([place(one)], bound)
    change(one)
    assert repr(look(one)) != before
    snapshot.put_back(Guard())
    snapshot.put_back(Guard())  # as after an interrupt in the middle of it
    assert repr(look(one)) == before


def closure() -> Callable[[], None]:
    count, kept = 0, [0]

    def call() -> None:
        nonlocal count
        count += 1
        kept.append(count)

    return call


SEEN: list[int] = []


def names_a_global() -> None:
    global LATEST  # noqa: PLW0603 - what is tested
    SEEN.append(1)
    LATEST = len(SEEN)


LATEST = 0


def defaults(kept: list[int] = []) -> None:  # noqa: B006 - what is tested
    kept.append(1)


class Called:
    def __init__(self) -> None:
        self.n = 0

    def method(self) -> None:
        self.n += 1
        names_a_global()


@pytest.mark.parametrize(
    ("call", "look"),
    [
        pytest.param(one := closure(), lambda: [cell.cell_contents for cell in one.__closure__], id="closure"),
        pytest.param(names_a_global, lambda: (list(SEEN), LATEST), id="global"),
        pytest.param(defaults, lambda: defaults.__defaults__, id="default"),
        pytest.param((called := Called()).method, lambda: (called.n, list(SEEN)), id="method"),
        pytest.param(functools.partial(defaults), lambda: defaults.__defaults__, id="partial"),
        pytest.param(functools.partial(SEEN.append, 1), lambda: list(SEEN), id="method of a list"),
    ],
)
def test_what_a_hook_reaches_is_as_it_was(call: Any, look: Callable[[], Any]) -> None:
    model = nn.Linear(1, 1)
    model.register_forward_hook(lambda *_: call())
    before = repr(look())
    snapshot = Snapshot([model])
    model(torch.ones(1, 1))
    assert repr(look()) != before
    snapshot.put_back(Guard())
    assert repr(look()) == before


def test_what_others_put_into_a_queue_meanwhile_stays() -> None:
    one = queue_of(1, 2, 3)
    snapshot = Snapshot([one])
    assert one.get() == 1
    other = threading.Thread(target=one.put, args=(4,))
    other.start()
    other.join()
    snapshot.put_back(Guard())
    assert list(one.queue) == [1, 2, 3, 4]


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_holds_a_lock_is_left_alone_while_others_are_at_work(bound: Bound) -> None:
    shared, go_on = Box(lock=threading.Lock(), done=0), threading.Event()

    def work() -> None:
        go_on.wait()

    other = threading.Thread(target=work)
    other.start()
    snapshot = Snapshot([place(shared)], bound)
    go_on.set()
    other.join()
    shared.done = 1
    snapshot.put_back(Guard())
    assert shared.done == 1


def test_what_holds_a_lock_is_put_back_where_nobody_else_is_at_work() -> None:
    mine = Box(lock=threading.Lock(), done=0)
    snapshot = Snapshot([mine])
    mine.done = 1
    snapshot.put_back(Guard())
    assert mine.done == 0


def test_a_file_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n2\n3\n")
    with (tmp_path / "lines").open() as lines:
        lines.readline()
        snapshot = Snapshot([lines])
        lines.readline()
        snapshot.put_back(Guard())
        assert lines.readline() == "2\n"


@pytest.mark.parametrize("bound", BOUNDS)
def test_nothing_of_the_users_is_called(bound: Bound) -> None:
    def trap(*_: Any, **__: Any) -> Any:
        pytest.fail("called")

    names = ["getattr", "getattribute", "eq", "iter", "len", "bool", "setattr", "repr", "contains", "copy", "deepcopy", "reduce_ex"]
    body = {f"__{name}__": trap for name in names} | {"asked": property(trap), "__hash__": None}
    trapped, listed, mapped = (type("Trap", (base,), body)() for base in (object, list, dict))
    object.__setattr__(trapped, "n", 1)
    list.append(listed, [1])
    dict.__setitem__(mapped, "k", [1])
    kept = [trapped, listed, mapped, {"trap": trapped}]
    snapshot = Snapshot([place(kept)], bound)
    object.__setattr__(trapped, "n", 2)
    list.append(listed, 2)
    dict.__setitem__(mapped, "k", 3)
    kept.clear()
    snapshot.put_back(Guard())
    assert (object.__getattribute__(trapped, "n"), list.__len__(listed), dict.__getitem__(mapped, "k"), len(kept)) == (1, 1, [1], 4)


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_did_not_change_is_not_written_and_no_key_is_asked_for_its_hash(bound: Bound) -> None:
    kept = {Key(): Box(n=1), "b": [1, 2]}
    Key.asked = 0
    iterator = iter(kept)
    Snapshot([place(kept)], bound).put_back(Guard())
    assert len(list(iterator)) == 2  # a dict that was written would say that it changed
    assert Key.asked == 0


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_key_of_the_users_comes_back(bound: Bound) -> None:
    kept = {Key(): [1]}
    before = list(kept)
    snapshot = Snapshot([place(kept)], bound)
    kept[before[0]].append(2)
    kept[Key()] = [3]
    snapshot.put_back(Guard())
    assert list(kept) == before
    assert kept[before[0]] == [1]


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_cell_to_which_nothing_was_bound_is_empty_again(bound: Bound) -> None:
    cell = CellType()
    snapshot = Snapshot([cell], bound)
    cell.cell_contents = 1
    snapshot.put_back(Guard())
    assert cell == CellType()


def test_what_was_dropped_since_comes_back_itself() -> None:
    line = deque([(torch.ones(1), torch.zeros(1)), (torch.ones(2), torch.zeros(2))])
    before = [id(one) for one in line]
    snapshot = Snapshot([line])
    line.clear()
    gc.collect()
    snapshot.put_back(Guard())
    assert [id(one) for one in line] == before


@pytest.mark.parametrize("kind", [queue.LifoQueue, queue.PriorityQueue])
def test_every_queue_comes_back_and_keeps_what_others_put(kind: type[queue.Queue[int]]) -> None:
    line = kind()
    for item in (3, 1, 2):
        line.put(item)
    snapshot = Snapshot([line])
    first = line.get()
    line.put(5)
    snapshot.put_back(Guard())
    assert sorted(line.queue) == [1, 2, 3, 5]
    assert line.get() == (5 if kind is queue.LifoQueue else first)


def test_installed_modules_and_our_own_objects_are_left_alone() -> None:
    snapshot = Snapshot([Box(modules=[sys, torch, np, Snapshot([])])])
    assert len(snapshot._held) < 50


def test_there_is_an_end_to_it() -> None:
    chain: list[Any] = []
    for _ in range(300):
        chain = [chain]
    assert len(Snapshot([chain], Bound(objects=100))._held) == 100


def test_what_takes_too_much_memory_is_passed_by() -> None:
    large, small = np.zeros(2000), np.zeros(10)
    snapshot = Snapshot([large, small], Bound(bytes=8000))
    large[0] = small[0] = 1
    snapshot.put_back(Guard())
    assert (large[0], small[0]) == (1, 0)


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_set_stands_in_the_order_that_it_had(*, is_joined: bool) -> None:
    chance = random.Random(0)
    for _ in range(300):
        numbers = [chance.randrange(10**6) for _ in range(chance.choice([2, 3, 5, 7, 8]))]
        held, twin = (set(numbers) | {-1, -2} if is_joined else set(numbers) for _ in range(2))
        assert list(held) == list(twin)
        snapshot = Snapshot([held])
        taken = [held.pop() for _ in range(2)]
        snapshot.put_back(Guard())
        assert list(held) == list(twin), numbers
        assert [held.pop() for _ in range(2)] == taken


SETS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "the standard streams": lambda patch: patch.setattr(sys, "stdout", io.StringIO()),
    "the working folder": lambda patch: patch.chdir("/"),
    "the environment": lambda patch: patch.setenv("OF_THE_USER", "1"),
    "the level of logging": lambda _: logging.disable(logging.INFO),
    "the handlers of loggers": lambda _: logging.getLogger("of the user").addHandler(logging.NullHandler()),
    "the filters of warnings": lambda _: warnings.simplefilter("error"),
    "the default dtype": lambda _: torch.set_default_dtype(torch.float64),
    "the grad mode": lambda _: torch.set_grad_enabled(False),
    "deterministic algorithms": lambda _: torch.use_deterministic_algorithms(True, warn_only=True),
    "the number of threads": lambda _: torch.set_num_threads(2),
    "the recursion limit": lambda _: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "the path of imports": lambda _: sys.path.append("/of/the/user"),
}


@pytest.mark.parametrize("name", SETS)
def test_a_setting_of_the_process_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("of the user")
    before = SETTINGS[name].read()
    snapshot = Snapshot([])
    SETS[name](monkeypatch)
    assert SETTINGS[name].read() != before
    snapshot.put_back(Guard())
    assert SETTINGS[name].read() == before


def test_gradients_tensors_and_random_numbers_are_as_they_were() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = gradient = torch.ones(2, 2)
    snapshot = Snapshot([model])
    snapshot.contents.keep(model.weight)
    before, drawn = model.weight.tolist(), torch.rand(2).tolist()
    model.requires_grad_(False)
    model.weight.fill_(7)
    model.weight.grad = None
    snapshot.put_back(Guard())
    assert (model.weight.tolist(), model.weight.requires_grad, torch.rand(2).tolist()) == (before, True, drawn)
    assert model.weight.grad is gradient


def test_a_large_set_is_filled_a_few_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(kinds, "same", lambda now, parts: looks.append(len(now)) or now == parts)
    names = {f"name {number}" for number in range(30_000)}
    snapshot = Snapshot([Box(names=names)])
    before = set(names)
    names.clear()
    names.update(str(number) for number in range(40_000))
    looks.clear()
    snapshot.put_back(Guard())
    assert names == before
    assert sum(looks) < 12 * 30_000
