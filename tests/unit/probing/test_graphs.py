"""A walk through an autograd graph touches few nodes of one graph: a process that has seen very many crashes when they are freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import torchdebug_magics
from torchdebug_magics.probing import graphs
from torchdebug_magics.probing.graphs import is_graph_leaf, upstream

if TYPE_CHECKING:
    from tests.torch_forks import TorchForks

DOORS = {"nanhunt": ({}, 2), "memtrace": ({}, 1), "hangwatch": ({"after": 0.3}, 2), "shapes": ({}, 2)}
"""By instrument: its options, and how many steps are watched; memtrace follows one op by op for ten seconds."""
LONG = """
import gc, os
import torch, torchdebug_magics

LINKS = 65_000  # a graph whose every node has been seen crashes from 50,000 on

def chain():
    x = weight = torch.ones(4, requires_grad=True)
    for _ in range(LINKS):
        x = x * weight
    return x

def free(door):
    options, steps = DOORS[door]
    with getattr(torchdebug_magics, door)(**options) as session:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        for _ in range(steps):
            x = chain()
            x.sum().backward(retain_graph=True)
            optimizer.step()
    session.report.verdict
    del x
    gc.collect()

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # imports for seconds what each fork would
for door in DOORS:
    if not os.fork():
        free(door)
        print(door, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def freed(torch_forks: TorchForks) -> list[str]:
    """The doors behind which a very long graph was freed; each in a process of its own, forked from one that has torch."""
    return torch_forks.check(f"DOORS = {DOORS!r}\n{LONG}", limit_s=150).splitlines()


@pytest.mark.parametrize("door", DOORS)
def test_a_very_long_graph_is_freed_without_a_crash(door: str, freed: list[str]) -> None:
    assert door in freed


def doubled(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x * 2
    return x


def test_every_node_comes_once_and_of_one_graph_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_NODES", 30)
    weight = torch.ones(2, requires_grad=True)
    short = [doubled(weight, 20).grad_fn for _ in range(5)]
    assert len(list(upstream([*short, None]))) == 5 * 20 + 1, "they share a leaf alone: they are graphs of their own"
    long = doubled(weight, 50)
    assert len(list(upstream([long.grad_fn]))) == 30
    first = doubled(weight, 25)
    second, third = doubled(first, 25), doubled(first, 25)
    assert len(list(upstream([second.grad_fn, third.grad_fn, first.grad_fn]))) < 70, "what hangs together is one"
    steps = [weight]
    for _ in range(200):
        steps.append(steps[-1] * 2)
    assert len(list(upstream(one.grad_fn for one in steps[1:]))) < 70, "one root after the other, the oldest first"
    diamond = doubled(weight, 2)
    nodes = list(upstream([(diamond * diamond + diamond).grad_fn]))
    assert len(nodes) == len(set(nodes)) == 5


@pytest.mark.parametrize("instrument", ["memtrace", "overfit", "deterministic", "nanhunt"])
def test_a_view_whose_history_pytorch_refuses_to_tell_is_no_obstacle(instrument):
    base = torch.ones(2, 2, requires_grad=True).clone()
    view, _ = base.unbind()
    base.add_(1)
    with pytest.raises(RuntimeError, match="multiple views"):
        view.is_leaf  # noqa: B018 - asked for the error
    assert not is_graph_leaf(view)
    with getattr(torchdebug_magics, instrument)() as session:
        torch.ones(2).sum()
    assert session.report.problems == ()
