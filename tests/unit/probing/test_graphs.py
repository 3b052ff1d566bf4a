"""A walk through an autograd graph touches few nodes of one graph: a process that has seen very many crashes when they are freed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import torchdebug_magics
from torchdebug_magics.probing import graphs
from torchdebug_magics.probing.graphs import is_graph_leaf, upstream

LONG = """
import gc
import torch, torchdebug_magics

def chain(links):
    x = weight = torch.ones(4, requires_grad=True)
    for _ in range(links):
        x = x * weight
    return x

x = None
with torchdebug_magics.{door} as session:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in range(2):
        x = chain({links})
        x.sum().backward(retain_graph=True)
        optimizer.step()
session.report.verdict
del x
gc.collect()
print("freed")
"""


@pytest.mark.parametrize("door", ["nanhunt()", "memtrace()", "hangwatch(after=0.3)", "shapes()"])
def test_a_very_long_graph_is_freed_without_a_crash(door: str) -> None:
    script = LONG.format(door=door, links=100_000)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert (ran.returncode, ran.stdout.strip().splitlines()[-1:]) == (0, ["freed"]), ran.stderr[-2000:]


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
