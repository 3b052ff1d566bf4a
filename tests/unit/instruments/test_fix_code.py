"""What a report shows as code in a fix could run where it would stand, through both doors: as the right code, or as words."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tests.doors import Door

SETUP = """\
import itertools
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(64, 64)
opt = torch.optim.SGD(net.parameters(), 0.01)
"""
GAN = """\
G, D, real = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(8, 4)
og, od = torch.optim.SGD(G.parameters(), 0.01), torch.optim.SGD(D.parameters(), 0.01)
"""
RNN = """\
rnn, head = nn.LSTM(4, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([*rnn.parameters(), *head.parameters()], 0.01)
"""
BY_FUNCTION_THOROUGHLY = pytest.mark.parametrize("observe", [pytest.param("function", marks=pytest.mark.thorough), "magic"], indirect=True)
"""Tracing memory takes a second: the function is the same check once more."""
STEP = """\
    opt.zero_grad()
    net(x).mean().backward()
    opt.step()
"""


def fix_of(door: Door, instrument: str, setup: str, body: str) -> str:
    door.plain(SETUP + setup)
    report = door(instrument, body).report
    assert report.problems == ()
    found = getattr(report, "finding", None) or getattr(report, "growth", None)
    fix: str = found.fix
    for code in re.findall(r"`([^`]+)`", fix):
        ast.parse(code if not code.startswith(".") else f"_{code}")
    return fix


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("od.zero_grad(); loss_d.backward(); od.step()", "og.zero_grad(); loss_g.backward(); og.step()"),
        ("od.zero_grad()\nloss_d.backward()\nod.step()", "og.zero_grad()\nloss_g.backward()\nog.step()"),
    ],
)
def test_each_loss_of_a_gan_trains_a_model_of_its_own(observe: Door, first: str, second: str) -> None:
    body = f"fake = G(torch.randn(8, 4))\nloss_d = D(fake).mean() - D(real).mean()\n{first}\nloss_g = -D(fake).mean()\n{second}\n"
    assert fix_of(observe, "autograd", GAN, body).startswith("compute `loss_d` from `fake.detach()`; or pass `retain_graph=True`")


def test_several_statements_on_a_line_are_no_loss(observe: Door) -> None:
    body = "h = net(torch.randn(8, 64)).exp()\na, b = h.mean(), h.sum()\nopt.zero_grad(); a.backward()\nprint(); b.backward()\n"
    assert fix_of(observe, "autograd", "", body).startswith("replace both calls with `(a + b).backward()`")


@pytest.mark.parametrize(
    ("start", "fix"),
    [
        ("(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))", "run `state = tuple(part.detach() for part in state)` at the end of each step"),
        ("None", "run `state = tuple(part.detach() for part in state)` at the end of each step"),
    ],
)
def test_a_state_that_is_a_tuple_is_detached_part_by_part(observe: Door, start: str, fix: str) -> None:
    body = f"""\
state = {start}
for step in range(3):
    out, state = rnn(torch.randn(5, 2, 4), state)
    loss = head(out).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    assert fix_of(observe, "autograd", RNN, body) == fix


def test_a_target_network_is_not_to_be_trained(observe: Door) -> None:
    setup = "q, target = nn.Linear(4, 2), nn.Linear(4, 2)\nopt = torch.optim.SGD(q.parameters(), 0.01)\n"
    body = """\
for _ in range(3):
    best = target(torch.randn(8, 4)).max(1).values
    loss = F.mse_loss(q(torch.randn(8, 4)).max(1).values, 1 + 0.9 * best)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    fix = fix_of(observe, "autograd", setup, body)
    assert fix == "if `target` is a target network, call it under `torch.no_grad()`; otherwise also pass its parameters to `opt`"


def test_a_variable_that_the_user_calls_otherwise_is_not_in_the_code(observe: Door) -> None:
    body = "for i in range(5):\n    l = net(torch.randn(8, 64)).mean()\n    opt.step()\n"
    assert fix_of(observe, "autograd", "", body) == "call backward() before the step"


@BY_FUNCTION_THOROUGHLY
def test_an_optimizer_has_the_name_that_the_user_gave_it_or_none(observe: Door) -> None:
    body = """\
for i in range(20):
    x = torch.randn(100, 100, requires_grad=True)
    y = (x ** 3).sum()
    y.backward(create_graph=True)
    g = x.grad
"""
    assert fix_of(observe, "memtrace", "", body).endswith("set each `.grad` to None after the step, as zero_grad() does")


@BY_FUNCTION_THOROUGHLY
def test_what_cannot_be_emptied_is_not_to_be_emptied(observe: Door) -> None:
    setup = "def batches():\n    for _ in range(60):\n        yield torch.randn(256, 64)\n"
    body = f"endless = itertools.cycle(batches())\nfor i in range(30):\n    x = next(endless)\n{STEP}"
    fix = fix_of(observe, "memtrace", setup, body)
    assert fix == "keep in `endless` only what is needed, such as a number or a mean; or keep only the latest"


@BY_FUNCTION_THOROUGHLY
@pytest.mark.parametrize(
    ("start", "add", "is_list"),
    [("{}", "kept[i] = x", False), pytest.param("[]", "kept.append(x)", True, marks=pytest.mark.thorough)],
)
def test_only_a_list_is_bounded_by_a_deque(observe: Door, start: str, add: str, is_list: bool) -> None:
    body = f"kept = {start}\nfor i in range(30):\n    x = torch.randn(256, 64)\n{STEP}    {add}\n"
    fix = fix_of(observe, "memtrace", "", body)
    assert "or clear it after use, `kept.clear()`" in fix
    assert ("deque" in fix) is is_list


@BY_FUNCTION_THOROUGHLY
def test_gradients_are_not_switched_off_above_a_backward_pass(observe: Door) -> None:
    body = """\
total = 0
for i in range(30):
    total = total + net(torch.randn(256, 64)).tanh().mean()
    assert i < 29
total.backward()
"""
    fix = fix_of(observe, "memtrace", "", body)
    assert fix == "call `backward()` in each iteration: until it is called, `total` keeps the graph of every iteration"


def test_punctuation_is_no_code_that_lacks_anything(shell: InteractiveShell) -> None:
    for _ in range(3):
        shell.run_cell("%%memtrace -q -o report\nimport torch\ntorch.ones(1024, 1024)", store_history=True).raise_error()
    assert shell.user_ns["report"].rerun_growth.fix == "end the line with `;`, or free it with `%memclean --free out`"
