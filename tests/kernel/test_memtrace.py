"""What a cell leaves behind and what grows, by the name that its user gave."""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.kernel.kernels import on_both_stacks, on_stacks

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
    """The shared kernel with a network and a batch."""
    assert kernel.run(BEGIN).status == "ok"
    return kernel


def trace(kernel: Kernel, body: str, options: str = "", name: str = "") -> tuple[Ran, dict[str, Any]]:
    name = name or f"report_{next(names)}"
    ran = kernel.run(f"%%memtrace -o {name} {options}\n{body}")
    asked = kernel.run(ASK.replace("{r}", name))
    assert asked.status == "ok", asked.traceback
    found: dict[str, Any] = ast.literal_eval(asked.stdout)
    assert found["problems"] == ()
    return ran, found


GROWS = {
    "losses": ("losses = []\nfor _ in range(9):\n    losses.append((net(x) ** 2).mean())", "losses[0]", "no_grad", 4),
    "a cache of a module": (
        "for i in range(9):\n    with torch.no_grad():\n        mymod._CACHE[i] = net(x).repeat(9, 9)",
        "mymod._CACHE[0]",
        "mymod._CACHE",
        4,
    ),
}


@pytest.mark.parametrize(("stack", "name"), on_stacks(GROWS, colab=["losses"]), indirect=["stack"])
def test_what_grows(bare: Kernel, name: str) -> None:
    body, path, fix, line = GROWS[name]
    ran, found = trace(bare, body)
    assert ran.status == "ok", ran.traceback
    assert found["growth"] is not None, found["verdict"]
    holder, said, at, cell, each_bytes = found["growth"]
    assert holder.startswith(path)
    assert fix in said
    assert (at, cell) == (line, ran.count)
    assert each_bytes >= 32 * 10 * 4
    assert " ".join(found["title"].split()) in " ".join(ran.text.split())


@pytest.mark.parametrize(
    ("stack", "body", "keeper"),
    [
        ("modern", "kept.append(torch.ones(1024, 1024))", "line 2: `kept.append(torch.ones(1024, 1024))` · fix: "),
        ("colab", "torch.ones(1024, 1024)", "line 2: `torch.ones(1024, 1024)` · fix: end the line with `;`"),
    ],
    indirect=["stack"],
)
def test_the_third_run_of_a_cell_says_what_each_leaves(bare: Kernel, body: str, keeper: str) -> None:
    bare.run("kept = []")
    verdicts = [trace(bare, body, "-q", "same")[1]["verdict"] for _ in range(3)]
    assert "Each run" not in verdicts[0] + verdicts[1]
    assert verdicts[2].startswith("Each run of this cell adds 4.0 MiB to `")
    assert keeper in verdicts[2]


def test_the_last_value_is_held_by_the_output(bare: Kernel) -> None:
    ran, found = trace(bare, "torch.ones(1000)")
    assert found["net"] == 4000
    assert any(path.startswith(f"Out[{ran.count}]") for path, _ in found["holders"])


@on_both_stacks
def test_an_exception_holds_the_locals_of_the_function_that_raised(bare: Kernel) -> None:
    ran, found = trace(bare, "def f():\n    big = torch.ones(1 << 20)\n    raise ValueError('no')\nf()")
    assert (ran.status, ran.ename) == ("error", "ValueError")
    assert found["net"] == 4 << 20
    assert any("big" in path and size_bytes == 4 << 20 for path, size_bytes in found["holders"])


def test_a_leak_before_an_exception(bare: Kernel) -> None:
    ran, found = trace(bare, "kept = []\nfor i in range(9):\n    kept.append(net(x))\n    if i == 7:\n        raise ValueError('no')")
    assert ran.status == "error"
    assert found["growth"][0].startswith("kept[0]")


@on_both_stacks
def test_an_interrupt_shows_the_report(bare: Kernel) -> None:
    bare.run("%load_ext torchdebug_magics")
    ran = bare.run("%%memtrace -o stopped\nkept = torch.ones(1000)\nwhile True:\n    net(x).sum().backward()", interrupt_s=4)
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert "Lines that allocated" in ran.text
    assert bare.value("(stopped.steps_count > 3, stopped.growth, stopped.problems)") == "(True, None, ())"


@on_both_stacks
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
