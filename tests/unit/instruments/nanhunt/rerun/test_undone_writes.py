"""Tensors from before a replay that are written in it hold afterwards what they held; no other is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics import nanhunt
from torchdebug_magics.probing.state.contents import Writes

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    "write",
    [
        lambda one: one.add_(1),
        lambda one: one[0].fill_(5),
        lambda one: one.__setitem__(slice(1), 7.0),
        lambda one: one.data.mul_(0),
        lambda one: torch.add(torch.ones(3), 1, out=one),
        lambda one: torch._foreach_add_([one, one.view(3)], 1),
        lambda one: (one[:2].add_(1), one[1:].add_(1)),
        lambda one: (one.add_(1), one[0].zero_(), one.mul_(3)),
    ],
)
def test_a_write_is_undone(write: Callable[[torch.Tensor], Any]) -> None:
    one, writes = torch.arange(3.0), Writes()
    with writes.listener():
        write(one)
    assert one.tolist() != [0, 1, 2]
    writes.put_back()
    assert one.tolist() == [0, 1, 2]
    assert one._version == 0


def test_statistics_that_batch_norm_writes_past_its_schema() -> None:
    norm, writes = nn.BatchNorm1d(2), Writes()
    with writes.listener():
        norm(torch.arange(4.0).view(2, 2))
    assert norm.running_mean.tolist() != [0, 0]
    writes.put_back()
    assert norm.running_mean.tolist() == [0, 0]
    assert norm.num_batches_tracked == 0


def test_what_the_replay_made_is_not_copied() -> None:
    writes = Writes()
    with writes.listener():
        made = torch.ones(3) * 2
        made.add_(1)
        made[0].zero_()
        torch.empty(2).fill_(1)
    assert not len(writes.contents)
    assert made.tolist() == [0, 3, 3]


def test_weights_that_a_hook_updates_are_updated_once() -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)

        def update(one: torch.Tensor) -> None:
            with torch.no_grad():
                one -= 0.1 * one.grad.nan_to_num()
            one.grad = None

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(update)
        for step in range(3):
            loss = model(torch.ones(1, 2)).square().sum()
            if step == 1:
                loss = loss + (loss * 0 - 1).sqrt()
            loss.backward()
        return model.weight.detach()

    plain = run()
    for options in ({"keep_going": True}, {"keep_going": True, "layers": True}):
        with nanhunt(**options):
            watched = run()
        assert torch.equal(watched, plain)
