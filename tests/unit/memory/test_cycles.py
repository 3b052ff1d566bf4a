"""What only the collector frees is named by the cycle that held it; the collector is left as it was, and everything is freed."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchdebug_magics.memory.cycles import cycles_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    Refs = list[weakref.ref[Any]]


@pytest.fixture(autouse=True)
def no_collection_in_between() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


class Node:
    def __init__(self, parent: Node | None = None) -> None:
        self.parent, self.children, self.data = parent, [], torch.ones(4)


def ref(tensor: torch.Tensor) -> weakref.ref[Any]:
    return weakref.ref(tensor.untyped_storage())


def tree() -> Refs:
    root = Node()
    root.children.append(Node(root))
    return [ref(root.data), ref(root.children[0].data)]


def test_what_is_held_otherwise_is_not_named() -> None:
    kept = torch.ones(4)
    refs = [*tree(), ref(kept)]
    assert kept.untyped_storage()._cdata not in cycles_of(refs)
    assert refs[-1]() is not None


def test_the_collector_is_left_as_it_was() -> None:
    flags, garbage, threshold = gc.get_debug(), list(gc.garbage), gc.get_threshold()
    cycles_of(tree())
    assert (gc.get_debug(), gc.garbage, gc.get_threshold(), gc.isenabled()) == (flags, garbage, threshold, False)


def test_finalizers_run_once() -> None:
    ended = []

    class Ends:
        def __init__(self) -> None:
            self.me, self.data = self, torch.ones(4)

        def __del__(self) -> None:
            ended.append(1)

    refs = [ref(Ends().data)]
    assert list(cycles_of(refs).values()) == ["Ends.me"]
    assert ended == [1]
    assert refs[0]() is None


def test_an_object_that_comes_back_to_life_stays() -> None:
    risen = []

    class Rises:
        def __init__(self) -> None:
            self.me, self.data = self, torch.ones(4)

        def __del__(self) -> None:
            risen.append(self)

    refs = [ref(Rises().data)]
    assert cycles_of(refs) == {}
    assert refs[0]() is not None
    assert risen[0].data.sum() == 4
    risen[0].me = None


def test_many_storages_behind_long_chains_take_no_square_of_time() -> None:
    def chain() -> Refs:
        first = node = Node()
        refs = [ref(node.data)]
        for _ in range(3_000):
            node.children.append(Node())
            node = node.children[0]
            refs.append(ref(node.data))
        node.parent = first
        return refs

    refs = chain()
    found = cycles_of(refs)
    assert len(found) == len(refs)
    assert len(set(found.values())) == 1
    assert len(next(iter(found.values()))) < 200
