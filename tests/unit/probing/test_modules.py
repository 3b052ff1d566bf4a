from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchdebug_magics.probing.modules import ModuleCalls, is_compiled, live, live_modules, one_moment, parts_of, paths, unwrapped


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 1)
        self.tied = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.block(x)))


def followed(root: nn.Module, *args: torch.Tensor) -> list[tuple[str, int, str]]:
    seen: list[tuple[str, int, str]] = []
    calls = ModuleCalls([root])

    def note(*_: object) -> None:
        call = calls.current
        if call is not None:
            seen.append((call.path, call.number, call.type))

    handles = [module.register_forward_pre_hook(note) for module in root.modules()]
    with ExitStack() as stack:
        calls.attach(stack)
        root(*args)
    for handle in handles:
        handle.remove()
    assert calls.current is None
    return seen


def test_paths_are_those_of_the_state_dict() -> None:
    model = Outer()
    known = paths([model])
    assert {known[id(module)] for module in model.modules()} == {"", "block", "block.0", "block.1", "head"}
    owners = {name.rpartition(".")[0] for name in model.state_dict()} - {"tied"}
    assert owners <= set(known.values())


@pytest.mark.parametrize("first", ["part", "whole"])
def test_a_part_that_is_also_given_as_a_root_has_the_name_that_the_whole_gives_it(first: str) -> None:
    model = Outer()
    roots = [model.head, model] if first == "part" else [model, model.head]
    assert paths(roots)[id(model.head)] == "head"


def test_shared_modules_are_counted_by_call() -> None:
    seen = followed(Outer(), torch.ones(1, 2))
    assert [(path, number) for path, number, _ in seen] == [
        ("", 1), ("block", 1), ("block.0", 1), ("block.1", 1), ("block", 2), ("block.0", 2), ("block.1", 2), ("head", 1),
    ]  # fmt: skip


def test_what_is_made_during_the_call_is_named_by_where_it_runs() -> None:
    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = nn.Identity()
            made.register_forward_pre_hook(lambda *_: names.append(calls.current.path if calls.current else None))
            return made(x)

    names: list[str | None] = []
    model = nn.Sequential(Late())
    calls = ModuleCalls([model])
    with ExitStack() as stack:
        calls.attach(stack)
        model(torch.ones(1))
    assert names == ["0.Identity"]


def test_a_call_that_raises_is_left() -> None:
    model = Outer()
    calls = ModuleCalls([model])
    with ExitStack() as stack:
        calls.attach(stack)
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))
        assert calls.current is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_no_further_call(reentrant: bool) -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.lin, x, use_reentrant=reentrant)

    model, numbers = Saved(), []
    calls = ModuleCalls([model])
    with ExitStack() as stack:
        calls.attach(stack)
        model.lin.register_forward_pre_hook(lambda *_: numbers.append(calls.current.number))
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert numbers == [1, 1]


def test_a_compiled_wrapper_is_seen_through() -> None:
    model = Outer()
    compiled = torch.compile(model, backend="eager")
    assert unwrapped(compiled) is model
    assert unwrapped(model) is model
    assert paths([compiled])[id(model.head)] == "head"
    assert not is_compiled(model)
    model.compile(backend="eager")
    assert is_compiled(model)
    torch._dynamo.reset()


def test_live_modules_and_their_parts() -> None:
    model = Outer()
    alive = {id(module) for module in live_modules()}
    assert {id(module) for module in model.modules()} <= alive
    parts = parts_of([model])
    assert id(model.head) in parts
    assert id(model) not in parts


def test_looking_for_modules_wakes_no_lazy_proxy() -> None:
    class Proxy:
        touched = False

        @property
        def __class__(self) -> type:
            Proxy.touched = True
            return nn.Module

    kept = [Proxy()]
    assert all(module is not kept[0] for module in live_modules())
    assert not Proxy.touched


def test_no_module_is_kept_alive_and_its_id_is_free_again():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    calls, seen = ModuleCalls([first]), []
    with ExitStack() as stack:
        calls.attach(stack)
        for model in (first, second):
            model.register_forward_pre_hook(lambda *_: seen.append(calls.current))
            model(torch.ones(1, 2))
        assert [(call.path, call.number) for call in seen] == [("", 1), ("", 1)]
        seen.clear()
        gone = [weakref.ref(first), weakref.ref(second)]
        del first, second, model
        assert [one() for one in gone] == [None, None]
        for _ in range(3):  # each may have the id of the one before it
            model = nn.Linear(2, 2)
            model.register_forward_pre_hook(lambda *_: seen.append(calls.current))
            model(torch.ones(1, 2))
        assert [call.number for call in seen] == [1, 1, 1]
        assert [call.root is call.module for call in seen] == [True, True, True]


def test_what_is_compiled_is_not_compiled_anew_at_each_call() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    calls = ModuleCalls([model])
    with ExitStack() as stack:
        calls.attach(stack)
        for _ in range(4):
            fast(torch.ones(1, 2))
    assert counters["stats"]["unique_graphs"] == 1


def test_within_a_moment_what_is_alive_is_looked_for_once_and_not_kept_alive() -> None:
    early, short = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    with one_moment():
        assert {id(early), id(short)} <= set(map(id, live(torch.nn.Linear)))
        late, number = torch.nn.Linear(4, 4), id(short)
        with one_moment():
            assert id(late) not in set(map(id, live(torch.nn.Module)))
        del short
        gc.collect()
        assert number not in set(map(id, live(torch.nn.Linear)))
        assert early in live(torch.nn.Linear)
    assert late in live(torch.nn.Linear)
