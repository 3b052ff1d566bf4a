"""The ritual in a real kernel: for a cell, over cells, and undone."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernel.kernels import Kernel

BEGIN = """
import random, numpy as np, torch
rng = np.random.default_rng()
def everything():
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), str(rng.bit_generator.state)
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32, states
def draw():
    return random.random(), np.random.rand(), torch.rand(1).item(), rng.random()
"""


@pytest.fixture
def kernel(kernel: Kernel) -> Iterator[Kernel]:
    assert kernel.run(BEGIN).status == "ok"
    kernel.run("before = everything()")
    yield kernel
    assert kernel.value("everything() == before") == "True"


def test_a_cell_draws_the_same_numbers_twice(kernel: Kernel):
    for name in ("a", "b"):
        assert kernel.run(f"%%deterministic --seed 5 -o d\n{name} = draw()").status == "ok"
    assert kernel.value("a == b") == "True"
    assert kernel.value("(d.seed, d.restored, d.generators, d.problems)") == "(5, True, ('rng',), ())"


@on_both_stacks
def test_an_error_and_an_interrupt_leave_nothing(kernel: Kernel):
    assert kernel.run("%%deterministic -o d\ndraw()\n1 / 0").ename == "ZeroDivisionError"
    assert kernel.value("(everything() == before, d.restored)") == "(True, True)"
    assert kernel.run("%%deterministic -o d\ndraw()\nraise KeyboardInterrupt").ename == "KeyboardInterrupt"
    assert kernel.value("d.restored") == "True"


def test_strict_raises_at_the_users_line(kernel: Kernel):
    ran = kernel.run("%%deterministic --strict\nx = torch.zeros(4)\nx.put_(torch.tensor([0]), torch.ones(1))")
    assert ran.ename == "RuntimeError"
    assert "----> 3 x.put_(" in ran.traceback


def test_the_bare_line_stays_on_until_off(kernel: Kernel):
    begun = kernel.run("%deterministic --seed 5")
    assert "until `%deterministic off`" in begun.text
    kernel.run("a = draw()")
    assert kernel.value("torch.are_deterministic_algorithms_enabled()") == "True"
    again = kernel.run("%deterministic --seed 6")
    assert (again.status, again.evalue) == ("error", "%deterministic is on already: `%deterministic off` ends it")
    status = kernel.run("%deterministic status").text
    assert "by %deterministic" in status
    ended = kernel.run("%deterministic off -o d")
    assert "changed and restored" in ended.text
    kernel.run("%%deterministic --seed 5\nb = draw()")
    assert kernel.value("a == b") == "True"


def test_under_and_over_another_magic(kernel: Kernel):
    body = "loss = torch.nn.Dropout()(torch.nn.Linear(4, 4)(torch.randn(2, 4))).sum()\nloss.backward()\n"
    assert kernel.run(f"%%nanhunt\n%%deterministic\n{body}a = loss.item()").status == "ok"
    assert kernel.run(f"%%deterministic\n%%nanhunt\n{body}b = loss.item()").status == "ok"
    assert kernel.value("a == b") == "True"


NETWORK = """
import os, queue, time
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4, shuffle=True)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters())
history, runs = [], queue.SimpleQueue()
def train():
    for (x,) in loader:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        history.append(1)
def weights():
    return [value.tolist() for value in net.state_dict().values()], optimizer.state_dict()["state"][0]["step"].item()
"""
PLANTED = {
    "r = np.random.default_rng()\nx = torch.ones(3)\ny = x + torch.from_numpy(r.random(3))": ("numpy_random", "aten.lift_fresh.default", 4),
    "g = torch.Generator()\ng.seed()\nfor (x,) in loader:\n    y = net(x + torch.randn(4, generator=g))": (
        "unseeded_generator",
        "aten.randn.generator",
        5,
    ),
    "x = torch.ones(3)\n\nw = torch.empty(200)\ny = (w * 2).sum()": ("uninitialized_memory", "aten.empty.memory_format", 4),
}


@pytest.fixture
def network(kernel: Kernel) -> Kernel:
    """A kernel with a small network, which drew its first weights before `before` was taken."""
    kernel.run(NETWORK)
    kernel.run("before = everything()")
    return kernel


@on_both_stacks
def test_verified_what_is_left_is_one_run_and_one_output(network: Kernel):
    network.run("%%deterministic -q\ntrain()\nonce = weights()")
    network.run(NETWORK)  # anew, the same
    ran = network.run("%%deterministic --verify -o d\nprint('a line of mine')\ntrain()\nlen(history)")
    assert (ran.status, ran.value, ran.stdout.count("a line of mine")) == ("ok", "4", 1)
    assert ran.kinds.count("execute_result") == 1
    assert "Same numbers twice" in ran.text
    assert network.value("(d.verified, d.problems, d.unrestorable, len(history), weights() == once)") == "(True, (), (), 4, True)"
    assert network.value(f"Out[{ran.count}]") == "4"


@on_both_stacks
def test_an_interrupt_of_the_second_run_leaves_the_first(network: Kernel):
    body = """
train()
after = weights()
runs.put(1)
if runs.qsize() > 1:
    print("the second")
    history.append("wrong")
    os.mkdir("second")  # which is how the test knows
    while True:
        time.sleep(0.01)
"""
    begun = network.folder / "second"

    def stop() -> None:
        wait_until(begun.exists, 50, "the second run did not begin")
        time.sleep(0.2)  # the call that makes the folder returns only then
        network.manager.interrupt_kernel()

    stopper = threading.Thread(target=stop)
    stopper.start()
    ran = network.run("%%deterministic --verify -o d" + body)
    stopper.join()
    assert not begun.exists()  # what the second run makes is gone with it
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert ran.stdout == ""
    assert network.value("(runs.qsize(), history, weights() == after, d.restored)") == "(2, [1, 1, 1, 1], True, True)"
    assert network.value("(d.verified, d.not_verified)") == "(None, 'the second run did not finish')"


@pytest.mark.parametrize("body", PLANTED)
def test_a_planted_cause_is_named_with_its_op_and_line(network: Kernel, body: str):
    ran = network.run(f"%%deterministic --verify -o d\n{body}")
    assert ran.status == "ok"
    assert "Different every run" in ran.text
    found = "d.divergence"
    assert network.value(f"({found}.cause, {found}.op, {found}.location.line, {found}.location.cell)") == repr((*PLANTED[body], ran.count))
    assert network.value("(d.verified, d.restored, d.problems)") == "(False, True, ())"
