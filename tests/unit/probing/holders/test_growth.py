"""Histories that grow are seen by the name of the variable, though they hold no tensor; to count them changes nothing."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics.probing.holders import count_graph_nodes

if TYPE_CHECKING:
    from collections.abc import Callable


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        self.total: Any = 0.0
        self.losses: list[Any] = []
        self.log: dict[str, list[Any]] = {"train": []}
        self.by_step: dict[int, Any] = {}

    def step(self, keep: Callable[[Any, torch.Tensor, int], None], number: int) -> None:
        loss = self.net(torch.ones(1, 2)).sum()
        loss.backward()
        keep(self, loss, number)


def add(trainer: Trainer, loss: torch.Tensor, _: int) -> None:
    trainer.total = trainer.total + loss


def add_number(trainer: Trainer, loss: torch.Tensor, _: int) -> None:
    trainer.total += loss.item()


def append(trainer: Trainer, loss: torch.Tensor, _: int) -> None:
    trainer.losses.append(loss)


def append_detached(trainer: Trainer, loss: torch.Tensor, _: int) -> None:
    trainer.losses.append(loss.detach())


def log(trainer: Trainer, loss: torch.Tensor, _: int) -> None:
    trainer.log["train"].append({"loss": loss})


def by_step(trainer: Trainer, loss: torch.Tensor, number: int) -> None:
    trainer.by_step[number] = [loss]


def overwrite(trainer: Trainer, loss: torch.Tensor, _: int) -> None:
    trainer.losses[:] = [loss]


def counted(trainer: Trainer) -> dict[str, int]:
    return {name: nodes for name, nodes in count_graph_nodes().nodes.items() if "trainer" in name and name.startswith("grown")}


def grown(keep: Callable[[Any, torch.Tensor, int], None]) -> list[dict[str, int]]:
    trainer, seen = Trainer(), []
    for number in range(4):
        trainer.step(keep, number)
        seen.append(counted(trainer))
    return seen


@pytest.mark.parametrize(
    ("keep", "name"),
    [(add, ".total"), (append, ".losses"), (log, ".log"), (by_step, ".by_step")],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_history_that_grows_is_named(keep: Any, name: str) -> None:
    seen = grown(keep)
    path = f"grown() local 'trainer'{name}"
    counts = [one.get(path, 0) for one in seen[1:]]
    assert counts == sorted(set(counts)), seen
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0


@pytest.mark.parametrize("keep", [add_number, append_detached])
def test_no_history_is_none(keep: Any) -> None:
    assert grown(keep) == [{}] * 4


def test_a_history_that_is_replaced_does_not_grow() -> None:
    counts = [sum(one.values()) for one in grown(overwrite)]
    assert len(set(counts)) == 1


def test_a_long_history_is_no_deep_recursion() -> None:
    total = torch.zeros(1, requires_grad=True)
    for _ in range(20_000):
        total = total + 1
    name = f"{test_a_long_history_is_no_deep_recursion.__name__}() local 'total'"
    assert count_graph_nodes().nodes[name] == 20_001


def test_to_count_keeps_nothing() -> None:
    loss = (torch.ones(3, requires_grad=True) * 2).exp()
    saved = weakref.ref(loss.grad_fn._raw_saved_result.data)
    count_graph_nodes()
    del loss
    gc.collect()
    assert saved() is None


def test_what_was_made_before_is_not_counted() -> None:
    before = (torch.ones(2, requires_grad=True) * 2).sum()
    since = torch.autograd._get_sequence_nr()
    after = before + (torch.ones(2, requires_grad=True) * 3).sum()
    counts = {name: nodes for name, nodes in count_graph_nodes(since).nodes.items() if "made_before" in name}
    assert {name.split("'")[1]: nodes for name, nodes in counts.items()} == {"before": 0, "after": 4}
    assert after.requires_grad
