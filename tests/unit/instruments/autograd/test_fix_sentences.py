"""Sentences of fixes that are made from the text of a line."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import torchdebug_magics


class Pyramid(nn.Module):
    """Adds to what an activation has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        levels = [side(rows) for side in self.sides]
        levels[0] += levels[1].square()
        return torch.cat(levels)


@dataclasses.dataclass
class Memory:
    """What a step leaves to the next one."""

    rows: torch.Tensor
    parts: list[torch.Tensor]


def turn(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Trains by one loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def run(code: str, memory: object) -> None:
    """In a function of its own: the variables of one that calls `exec` are left alone."""
    exec(code, {"torch": torch}, {"memory": memory})


def test_of_several_calls_of_a_helper_the_one_that_updates_too_early_is_moved() -> None:
    judge, maker = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), nn.Linear(3, 4)
    of_judge, of_maker = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (judge, maker))
    with pytest.raises(RuntimeError, match="inplace"), torchdebug_magics.autograd() as session:  # noqa: PT012 - a loop
        for row in torch.rand(3, 5, 3):
            first = judge(torch.rand(5, 4)).mean()
            second = judge(maker(row)).mean()
            turn(of_judge, first)
            turn(of_maker, second)
    assert (
        session.report.fix
        == "move `turn(of_judge, first)` below `turn(of_maker, second)`, or compute the second loss again after the update"
    )
    assert [(edit.old, edit.new) for edit in session.report.edits] == [
        ("turn(of_judge, first)", ""),
        ("turn(of_maker, second)", "turn(of_maker, second)\nturn(of_judge, first)"),
    ]


def test_no_move_is_advised_where_the_same_lines_run_again() -> None:
    judge, maker = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), nn.Linear(3, 4)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (judge, maker)]
    with pytest.raises(RuntimeError, match="inplace"), torchdebug_magics.autograd() as session:  # noqa: PT012 - a loop
        losses = [judge(torch.rand(5, 4)).mean(), judge(maker(torch.rand(5, 3))).mean()]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            loss.backward()
            optimizer.step()
    assert (session.report.fix, session.report.edits) == ("compute the loss of `loss.backward()` after `optimizer.step()`", ())


@pytest.mark.parametrize(
    ("make", "read", "code"),
    [
        (lambda h: h, lambda m: m, "memory = memory.detach()"),
        (lambda h: {0: (h, h)}, lambda m: m[0][0], "memory = {key: tuple(inner.detach() for inner in part) for key, part in memory.items()}"),  # noqa: E501
        (lambda h: Memory(h, [h]), lambda m: m.rows, "memory.rows, memory.parts = memory.rows.detach(), [part.detach() for part in memory.parts]"),  # noqa: E501
        (lambda h: deque([h]), lambda m: m[0], "memory = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, memory)"),
    ],
)  # fmt: skip
def test_what_a_loop_carries_is_detached_by_its_structure(make: Any, read: Any, code: str) -> None:
    net = nn.Linear(3, 3)
    memory = make(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="second time"), torchdebug_magics.autograd() as session:  # noqa: PT012 - a loop
        for row in torch.rand(3, 2, 3):
            memory = make(net(row + read(memory)).tanh())
            read(memory).mean().backward()
    assert session.report.fix == f"run `{code}` at the end of each step"
    run(code, memory)


@pytest.mark.parametrize(("made", "code"), [("[]", ""), ("[nn.Linear(4, 4)]", "[nn.Linear(4, 4)]")])
def test_a_plain_list_becomes_one_that_registers(made: str, code: str, observe: Any) -> None:
    body = f"""\
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.rest = {made}
        self.rest.append(nn.Linear(4, 4))
    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = self.norm(layer(x))
        return x
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in torch.rand(3, 5, 3):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""
    report = observe("autograd", body).report
    assert (report.finding.kind, report.fix) == ("not_in_optimizer", f"`self.rest = nn.ModuleList({code})`")


def test_of_several_statements_in_a_line_the_one_to_move_is_named() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torchdebug_magics.autograd() as session:
        for row in torch.rand(4, 5, 3):
            loss = net(row).square().mean()
            loss.backward(); optimizer.zero_grad(); optimizer.step()  # noqa: E702 # fmt: skip
    assert session.report.fix == "move `optimizer.zero_grad()` above `loss.backward()`"


def test_what_refuses_a_graph_is_not_left_without_its_detach() -> None:
    encoder, head = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    with torchdebug_magics.autograd() as session:
        for row in torch.rand(4, 5, 3):
            codes = torch.tensor(encoder(row).detach().numpy())
            optimizer.zero_grad()
            head(codes).square().mean().backward()
            optimizer.step()
    assert session.report.fix == "`codes = encoder(row)`"
