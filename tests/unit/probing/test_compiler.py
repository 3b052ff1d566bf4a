"""Calls of compiled functions are told of, and nothing of ours is in what is compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, final

import pytest
import torch
from torch.nn.modules import module as torch_module

from torchdebug_magics.probing.compiler import CompiledCalls
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@final
class Watch:
    """What was told, and hooks of all kinds."""

    def __init__(self, *modules: torch.nn.Module, is_ours: bool = True) -> None:
        self.hooks, self.guard, self.told, self.stack = Hooks(), Guard(), list[Any](), ExitStack()
        self.hooks.module_calls(self.stack, lambda *_: self.told.append("module"), lambda *_: None)
        for module in modules:
            self.hooks.own_calls(self.stack, module, lambda *_: self.told.append("own"), lambda *_: None)
        CompiledCalls(
            self.hooks, self.guard, lambda: modules, lambda: is_ours, lambda _: self.told.append("begins"), self.told.append
        ).attach(self.stack)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        assert self.guard.problems == []


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def test_begin_and_end_are_told() -> None:
    double = compiled(lambda x: x * 2)
    with Watch() as watch:
        double(torch.ones(2))
        double(torch.ones(2))
    assert [one if isinstance(one, str) else one.tolist() for one in watch.told] == ["begins", [2.0, 2.0]] * 2


def test_one_inside_another_is_a_part_of_it() -> None:
    inner = compiled(lambda x: x * 2)

    @compiled
    def outer(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return inner(x) + 1

    with Watch() as watch:
        outer(torch.ones(2))
    assert watch.told.count("begins") == 1


def test_what_is_kept_from_the_compiler_ends_no_call() -> None:
    away = torch.compiler.disable(lambda x: x + 1)

    @compiled
    def outer(x: torch.Tensor) -> torch.Tensor:
        return away(x * 2) * 3

    with Watch() as watch:
        outer(torch.ones(1))
        away(torch.ones(1))
    assert [one if isinstance(one, str) else one.item() for one in watch.told] == ["begins", 9.0]


def test_one_that_raises_has_ended() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        raise ValueError

    with Watch() as watch:
        for _ in range(2):
            with pytest.raises(ValueError, match=""):
                compiled(fails)(torch.ones(1))
    assert watch.told == ["begins", None, "begins", None]


def test_another_thread_is_passed_by() -> None:
    with Watch(is_ours=False) as watch:
        compiled(lambda x: x * 2)(torch.ones(2))
    assert watch.told == []


def test_two_watches_are_both_told() -> None:
    double = compiled(lambda x: x * 2)
    with Watch() as first, Watch() as second:
        double(torch.ones(2))
    assert (len(first.told), len(second.told)) == (2, 2)


def test_nothing_of_ours_is_compiled() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: None)
    run = compiled(lambda x: layer(x).relu())
    run(torch.ones(1, 2))
    with Watch(layer) as watch:
        run(torch.ones(1, 2))
        assert len(layer._forward_pre_hooks) == 2
        assert isinstance(next(reversed(layer._forward_pre_hooks.values())), type(lambda: None))  # ours is the first, as it was
        assert torch_module._global_forward_hooks
        layer(torch.ones(1, 2))
    run(torch.ones(1, 2))
    assert counters["stats"]["unique_graphs"] == 1
    assert [one for one in watch.told if isinstance(one, str)] == ["begins", "module", "own"]


def test_a_compiler_that_is_imported_later_is_watched_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = sys.modules["torch._dynamo.eval_frame"]
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame")
    with Watch() as watch:
        monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", compiler)
        compiled(lambda x: x * 2)(torch.ones(2))
    assert watch.told[0] == "begins"
    assert "_torchdebug_owner" not in vars(torch.compile)


def test_a_sweep_ends_the_watch() -> None:
    with Watch() as watch:
        watch.hooks.sweep()
        compiled(lambda x: x * 2)(torch.ones(2))
    assert watch.told == []
