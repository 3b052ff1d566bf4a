"""Which statements a replay runs, with which names; what it refuses, and that it says so."""

# ruff: noqa: E501 - bodies of cells, each on a line

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.doors import FunctionDoor, Observed
from torchdebug_magics import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


SETUP = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(3, 2)
data = [torch.ones(3, 2) for _ in range(4)]
ran = []
"""


@pytest.fixture
def hunt(tmp_path: Path) -> Callable[..., Observed]:
    door = FunctionDoor(tmp_path)
    return lambda body, **options: door("nanhunt", SETUP + body, **options)


REPRODUCED: dict[str, str] = {
    "a comprehension": "loss = sum([(model(one) * 0).log().sum() for one in data])  # bad\nloss.backward()\n",
    "match": "out = model(x)\nmatch out.dim():\n    case 2:\n        loss = (out * 0).log().sum()  # bad\n    case _:\n        loss = out.sum()\nloss.backward()\n",
    "what an iterator gave before the model": "it = iter([torch.full((3, 2), 0.5)])\nx = torch.ones(3, 2)\nx = next(it)\nh = (x - 1).log()  # bad\nloss = model(h).sum()\nloss.backward()\n",
}  # fmt: skip


@pytest.mark.parametrize("name", REPRODUCED)
def test_these_steps_are_run_again(hunt: Any, name: str) -> None:
    seen = hunt(REPRODUCED[name])
    assert type(seen.error) is NonFiniteError, seen.report.verdict
    assert seen.report.problems == ()
    assert (seen.report.reproduced, seen.report.replay) == (True, "statements")
    finding = seen.report.finding
    assert finding.op == "log"
    assert "# bad" in finding.location.source


REFUSED: dict[str, tuple[str, str]] = {
    "an iterator that has run": ("it = iter(data)\nloss = 0\nfor one in it:\n    loss = loss + (model(one) * 0).log().sum()\nloss.backward()\n", "iterator"),
    "a number that is another one by now": ("w = torch.ones(3, requires_grad=True)\nz = 0\nfor _ in range(1):\n    h = w * z\n    z = 1\n    loss = h.log().sum()\n    loss.backward()\n", "value of z is gone"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_and_the_kind_is_right_all_the_same(hunt: Any, name: str) -> None:
    body, word = REFUSED[name]
    seen = hunt(body)
    assert type(seen.error) is NonFiniteError
    assert seen.report.finding.kind == "inf"
    assert seen.report.problems
    assert word in " ".join(seen.report.problems)


def test_a_generator_that_yields_the_loss(hunt: Any) -> None:
    seen = hunt("def losses():\n    out = model(x)\n    yield (out * 0).log().sum()\nfor loss in losses():\n    loss.backward()\n")
    assert seen.report.finding.kind == "inf"
    assert seen.report.finding.op == "log" or seen.report.problems


def test_the_iterator_of_the_user_is_not_advanced(hunt: Any) -> None:
    body = "it = iter(range(100))\nfor x in data:\n    loss = (model(x * next(it)) * 0).log().sum()\n    opt.zero_grad()\n    loss.backward()\n"
    seen = hunt(body, keep_going=True)
    assert next(seen.namespace["it"]) == 4
    assert seen.report.finding.op == "log"


def test_an_iterator_in_a_loop_of_the_step_is_not_advanced(hunt: Any) -> None:
    body = (
        "it = iter(range(100))\nfor i in range(2):\n    loss = 0\n"
        "    for k, one in zip(it, data[:2]):\n        loss = loss + (model(one) * 0 * k).log().sum()\n    loss.backward()\n"
    )
    seen = hunt(body, keep_going=True)
    assert next(seen.namespace["it"]) == 6  # zip draws one more each time


REPORTS = [
    "ran.append(loss.item())",
    "ran += [1]",
    "table['n'] = table.get('n', 0) + 1",
    "table.setdefault('k', []).append(1)",
    "box.n += 1",
    "box.items.append(1)",
    "meter.observe_value(loss)",
    "total += loss.detach()",
    "totals[0] += 1",
    "array[0] += 1",
    "queue.get_nowait()",
    "stack_.pop()",
    "file.readline()",
    "own.random()",
    "weight = schedule.value()",
    "noted = note(loss)",
    "nested['a']['b'] += 1",
]


@pytest.mark.parametrize("layers", [False, True], ids=["keep_going", "layers"])
@pytest.mark.parametrize("statement", REPORTS)
def test_what_a_statement_does_besides_is_done_once(hunt: Any, statement: str, layers: bool) -> None:
    setup = """\
import io, queue as queues, random
import numpy as np
class Schedule:
    n = 0
    def __init__(self): self.n = 0
    def value(self):
        self.n += 1
        return self.n
    def observe_value(self, loss): self.n += 1
class Box: pass
noted_values = []
def note(loss):
    noted_values.append(1)
    return 1
box = Box(); box.n = 0; box.items = []
schedule, meter = Schedule(), Schedule()
table, nested, deep = {}, {'a': {'b': 0}}, [[]]
total, running = torch.zeros(()), torch.zeros(())
totals, array = [0], np.zeros(1)
queue, stack_ = queues.Queue(), list(range(50))
for k in range(50): queue.put(k)
file = io.StringIO('\\n'.join(map(str, range(50))))
rng, own, gen = np.random.default_rng(0), random.Random(0), torch.Generator().manual_seed(0)
opt = torch.optim.SGD(model.parameters(), lr=0.0)
"""
    loop = f"for i in range(4):\n    out = model(x)\n    loss = out.sum() * (0.0 if i == 2 else 1.0)\n    PLANT\n    {statement}\n    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"
    loop = loop.replace("PLANT", "pass" if layers else "loss = loss + ((out * 0).log().sum() if i == 2 else 0)")
    reads = """\
def still(value):
    return value.tolist() if hasattr(value, 'tolist') else value
state = [still(v) for v in (ran, table, nested, deep, box.n, box.items, schedule.n, meter.n, totals, array, stack_, queue.qsize(), file.tell(), noted_values)]
state += [repr(total), repr(running), rng.random(), own.random(), torch.rand(1, generator=gen).item()]
"""
    plain: dict[str, Any] = {}
    exec(SETUP + setup + loop + reads, plain)
    seen = hunt(setup + loop + reads, **({"layers": True} if layers else {"keep_going": True}))
    assert seen.error is None
    assert seen.report.found is not layers
    assert repr(seen.namespace["state"]) == repr(plain["state"])
