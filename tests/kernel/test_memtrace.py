"""In a real kernel, on both stacks: what a cell leaves behind and what grows, by the name that its user gave."""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel, Ran

BEGIN = """
import sys, types, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
x, y = torch.randn(32, 64), torch.randint(10, (32,))
sys.modules['mymod'] = mymod = types.ModuleType('mymod')
mymod._CACHE = {}
"""
ASK = """print({
    'growth': None if {r}.growth is None else (
        {r}.growth.holder, {r}.growth.fix, {r}.growth.location.line, {r}.growth.location.cell, {r}.growth.bytes_per_iteration),
    'graph': {r}.graph_growth and {r}.graph_growth.holder,
    'holders': [(one.path, one.live_bytes) for one in {r}.holders],
    'net': {r}.net_bytes, 'verdict': {r}.verdict, 'title': {r}.title, 'problems': {r}.problems,
})"""
names = itertools.count()


@pytest.fixture
def bare(kernel: Kernel) -> Kernel:
    """A kernel of both stacks in turn."""
    assert kernel.run(BEGIN).status == "ok"
    return kernel


def trace(kernel: Kernel, body: str, options: str = "") -> tuple[Ran, dict[str, Any]]:
    name = f"report_{next(names)}"
    ran = kernel.run(f"%%memtrace -o {name} {options}\n{body}")
    asked = kernel.run(ASK.replace("{r}", name))
    assert asked.status == "ok", asked.traceback
    found: dict[str, Any] = ast.literal_eval(asked.stdout)
    assert found["problems"] == ()
    return ran, found


GROWS = {
    "losses": ("losses = []\nfor _ in range(9):\n    losses.append((net(x) ** 2).mean())", "losses[0]", "no_grad", 4),
    "a hook": (
        """def watch(store):
    net[1].register_forward_hook(lambda module, args, out: store.append(out.detach().clone()))
watch([])
for _ in range(9):
    net(x).sum().backward()""",
        "net._forward_hooks|net.1._forward_hooks|net[1]._forward_hooks",
        ".remove()",
        3,
    ),
    "a cache of a module": (
        "for i in range(9):\n    with torch.no_grad():\n        mymod._CACHE[i] = net(x).repeat(9, 9)",
        "mymod._CACHE[0]",
        "mymod._CACHE",
        4,
    ),
    "a function's own list": (
        """def train():
    outs = []
    for _ in range(9):
        out = net(x)
        F.cross_entropy(out, y).backward()
        outs.append(out)
train()""",
        "train() local 'outs'[0]",
        "outs",
        5,
    ),
}


@pytest.mark.parametrize("name", GROWS)
def test_what_grows(bare: Kernel, name: str) -> None:
    body, holders, fix, line = GROWS[name]
    ran, found = trace(bare, body)
    assert ran.status == "ok", ran.traceback
    assert found["growth"] is not None, found["verdict"]
    holder, said, at, cell, each_bytes = found["growth"]
    assert holder.startswith(tuple(holders.split("|")))
    assert fix in said
    assert (at, cell) == (line, ran.count)
    assert each_bytes >= 32 * 10 * 4
    assert " ".join(found["title"].split()) in " ".join(ran.text.split())


def test_a_graph_that_grows(bare: Kernel) -> None:
    _, found = trace(bare, "total = 0\nfor _ in range(40):\n    loss = F.cross_entropy(net(x), y)\n    loss.backward()\n    total += loss")
    assert (found["growth"], found["graph"]) == (None, "total")


def test_training_is_clean(bare: Kernel) -> None:
    body = """opt = torch.optim.Adam(net.parameters())
for _ in range(9):
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()"""
    _, first = trace(bare, body)
    assert (first["growth"], first["graph"]) == (None, None)
    _, second = trace(bare, body.split("\n", 1)[1])
    assert (second["growth"], second["graph"], second["net"]) == (None, None, 0)


def test_the_last_value_is_held_by_the_output(bare: Kernel) -> None:
    ran, found = trace(bare, "torch.ones(1000)")
    assert found["net"] == 4000
    assert any(path.startswith(f"Out[{ran.count}]") for path, _ in found["holders"])


def test_an_exception_holds_the_locals_of_the_function_that_raised(bare: Kernel) -> None:
    ran, found = trace(bare, "def f():\n    big = torch.ones(1 << 20)\n    raise ValueError('no')\nf()")
    assert (ran.status, ran.ename) == ("error", "ValueError")
    assert found["net"] == 4 << 20
    assert any("big" in path and size_bytes == 4 << 20 for path, size_bytes in found["holders"])


def test_a_leak_before_an_exception(bare: Kernel) -> None:
    ran, found = trace(bare, "kept = []\nfor i in range(9):\n    kept.append(net(x))\n    if i == 7:\n        raise ValueError('no')")
    assert ran.status == "error"
    assert found["growth"][0].startswith("kept[0]")


def test_an_interrupt_shows_the_report(bare: Kernel) -> None:
    bare.run("%load_ext torchdebug_magics")
    ran = bare.run("%%memtrace -o stopped\nkept = torch.ones(1000)\nwhile True:\n    net(x).sum().backward()", interrupt_s=3)
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert "Lines that allocated" in ran.text
    assert bare.value("(stopped.steps_count > 3, stopped.growth, stopped.problems)") == "(True, None, ())"


def test_await(bare: Kernel) -> None:
    ran, found = trace(
        bare, "import asyncio\nfor _ in range(5):\n    net(x).sum().backward()\n    await asyncio.sleep(0)\nmade = torch.ones(100)"
    )
    assert ran.status == "ok", ran.traceback
    assert ("made", 400) in found["holders"]


def test_the_extension_unloaded_inside_the_cell(bare: Kernel) -> None:
    ran = bare.run("%%memtrace\nnet(x).sum().backward()\n%unload_ext torchdebug_magics\nnet(x).sum().backward()")
    assert ran.status == "ok", ran.traceback
    assert bare.value("len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())") == "0"
    assert bare.value("len(net._forward_pre_hooks)") == "0"
    assert bare.run("%load_ext torchdebug_magics").status == "ok"
