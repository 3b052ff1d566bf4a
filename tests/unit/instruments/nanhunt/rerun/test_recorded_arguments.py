"""Which call of a replay gets which recorded arguments, and what is known of tensors that were made again."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Place, places, same_call
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry
from torchdebug_magics.instruments.nanhunt.rerun.step_rerun import Feed
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.state.rng import RandomState

nan, inf = float("nan"), float("inf")
model = nn.Linear(1, 1)


def entry(*args: Any, place: tuple[Place, ...] = (), **kwargs: Any) -> Entry:
    versions = tuple(value._version for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return Entry(model, args, kwargs, RandomState.take(), versions, place=place)


def fed(recorded: Entry, *args: Any, trace: Trace | None = None, **kwargs: Any) -> Any:
    return Feed([recorded], None, trace or Trace(ModuleCalls(())))(model, args, kwargs)


def test_recorded_arguments_win_but_for_what_is_in_the_graph() -> None:
    leaf = torch.ones(1, requires_grad=True)
    old, new, data, other = leaf * 1, leaf * 2, torch.ones(1), torch.zeros(1)
    args, kwargs = fed(entry(old, data, k=data), new, other, k=other)
    assert args[0] is new
    assert args[1] is data
    assert kwargs["k"] is data


def test_arguments_of_another_shape_are_the_recorded_ones() -> None:
    data = torch.ones(1)
    assert fed(entry(data), data, 3) == ((data,), {})


def test_a_tensor_made_again_that_is_bad_in_the_same_elements_tells_where_the_recorded_one_came_from() -> None:
    trace = Trace(ModuleCalls(()))
    recorded, made = torch.tensor([nan, 1.0]), torch.tensor([nan, 2.0])
    args, _ = fed(entry(recorded), made, trace=trace)
    assert args[0] is recorded
    assert trace.original(recorded) is made


def test_one_that_is_bad_elsewhere_or_not_at_all_tells_nothing() -> None:
    trace = Trace(ModuleCalls(()))
    for recorded, made in (([nan, 1.0], [1.0, nan]), ([nan, 1.0], [inf, 1.0]), ([1.0, 2.0], [2.0, 1.0])):
        then = torch.tensor(recorded)
        args, _ = fed(entry(then), torch.tensor(made), trace=trace)
        assert args[0] is then
        assert trace.original(then) is then


def here() -> tuple[Place, ...]:
    return places(sys._getframe(1), sys._getframe(1).f_code)


def test_a_call_from_another_place_is_another_call() -> None:
    at_one, at_other = here(), here()
    assert same_call(at_one, at_one)
    assert not same_call(at_one, at_other)
    feed = Feed([entry(torch.ones(1), place=at_other)], None, Trace(ModuleCalls(())))
    assert not feed.has_begun
    feed._code = sys._getframe().f_code
    assert feed(model, (torch.zeros(1),), {}) is None
    assert not feed.has_begun


def test_a_place_is_known_again_in_code_that_was_compiled_anew() -> None:
    source = "found = here()\nother = here()\n"
    rounds: list[dict[str, Any]] = [{"here": lambda: places(sys._getframe(1), sys._getframe(1).f_code)} for _ in range(2)]
    for names in rounds:
        exec(compile(source, "<a cell>", "exec"), names)
    assert same_call(rounds[0]["found"], rounds[1]["found"])
    assert not same_call(rounds[0]["found"], rounds[1]["other"])


def test_each_recorded_call_is_fed_once_and_a_step_without_calls_has_begun() -> None:
    one, other = torch.ones(1), torch.zeros(1)
    feed = Feed([entry(one), entry(other)], None, Trace(ModuleCalls(())))
    assert feed(model, (one,), {}) == ((one,), {})
    assert feed.has_begun
    assert feed(model, (one,), {}) == ((other,), {})
    assert feed(model, (one,), {}) is None
    assert Feed([], None, Trace(ModuleCalls(()))).has_begun
