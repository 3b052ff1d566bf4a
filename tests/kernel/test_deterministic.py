"""The ritual in a real kernel: for a cell, over cells, and undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
    assert "all put back" in ended.text
    kernel.run("%%deterministic --seed 5\nb = draw()")
    assert kernel.value("a == b") == "True"


def test_under_and_over_another_magic(kernel: Kernel):
    body = "loss = torch.nn.Dropout()(torch.nn.Linear(4, 4)(torch.randn(2, 4))).sum()\nloss.backward()\n"
    assert kernel.run(f"%%nanhunt\n%%deterministic\n{body}a = loss.item()").status == "ok"
    assert kernel.run(f"%%deterministic\n%%nanhunt\n{body}b = loss.item()").status == "ok"
    assert kernel.value("a == b") == "True"
