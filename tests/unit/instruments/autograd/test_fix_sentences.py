"""Sentences of fixes that are made from the text of a line."""

from __future__ import annotations

import torch
from torch import nn

import torchdebug_magics


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
