"""Who holds a tensor that a cell left behind, by the name that its user gave."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

BEGIN = """
import sys, types, torch
from torch import nn
from torchdebug_magics.memory.found import find_holders, histories
wanted = {}
def want(name, tensor): wanted[name] = tensor.untyped_storage()._cdata
sys.modules['mymod'] = mymod = types.ModuleType('mymod')
"""
CELLS = {
    "losses[0].grad_fn -> PowBackward0.saved_self": """
net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
losses = []
losses.append((net(torch.ones(2, 3)) ** 2).mean())
want('losses[0].grad_fn -> PowBackward0.saved_self', losses[0].grad_fn.next_functions[0][0]._saved_self)""",
    "net.0.weight.grad": """
losses[0].backward()
want('net.0.weight.grad', net[0].weight.grad)""",
    "net._forward_hooks[{hook}].<closure store>[0]": """
def watch(store):
    hook = net.register_forward_hook(lambda module, args, out: store.append(out.detach().clone()))
    net(torch.ones(2, 3))
    want('net._forward_hooks[{hook}].<closure store>[0]'.format(hook=hook.id), store[0])
watch([])""",
    "mymod._CACHE[1]": """
mymod._CACHE = [0, torch.ones(5)]
want('mymod._CACHE[1]', mymod._CACHE[1])""",
    "opt.state[...]['exp_avg']": """
opt = torch.optim.Adam(net.parameters()); opt.step()
want("opt.state[...]['exp_avg']", opt.state[net[0].weight]['exp_avg'])""",
    "y": """
y = torch.ones(3)
z = y.view(-1)
want('y', y)""",
}
FAILS = """def f():
    big = torch.ones(10)
    want('big', big)
    raise ValueError
f()"""
ASK = """
held = find_holders(wanted.values())
print({name: held.paths.get(storage) for name, storage in wanted.items()})"""


@pytest.fixture
def bare(kernel: Kernel) -> Kernel:
    """The shared kernel, in which nothing is wanted yet."""
    assert kernel.run(BEGIN).status == "ok"
    return kernel


def paths(kernel: Kernel) -> dict[str, str]:
    asked = kernel.run(ASK)
    assert asked.status == "ok", asked.traceback
    found: dict[str, str] = ast.literal_eval(asked.stdout)
    return found


@on_both_stacks
def test_what_cells_left_behind_is_named(bare: Kernel) -> None:
    for cell in CELLS.values():
        ran = bare.run(cell)
        assert ran.status == "ok", ran.traceback
    found = paths(bare)
    found.pop("losses[0].grad_fn -> PowBackward0.saved_self")  # given back by the backward pass of the next cell
    assert len(found) == len(CELLS) - 1
    assert {path: name for name, path in found.items()} == {path: path for path in found.values()}


def test_a_history_that_was_not_walked_back_holds(bare: Kernel) -> None:
    name = "losses[0].grad_fn -> PowBackward0.saved_self"
    assert bare.run(CELLS[name]).status == "ok"
    assert paths(bare) == {name: name}


def test_the_last_value_of_a_cell_is_held_by_its_output(bare: Kernel) -> None:
    shown = bare.run("torch.full((7,), 3.0)")
    assert bare.run(f"want('out', Out[{shown.count}])").status == "ok"  # `_` may be a variable of another test's in this kernel
    assert paths(bare) == {"out": f"Out[{shown.count}]"}


@on_both_stacks
def test_an_error_holds_the_locals_of_the_call_that_failed(bare: Kernel) -> None:
    assert bare.run(FAILS).ename == "ValueError"
    assert set(paths(bare).values()) == {"sys.last_traceback -> f:4 'big'"}


def test_histories_are_counted_by_the_names_of_variables(bare: Kernel) -> None:
    count = "histories(lambda number: int(number < 1 << 62))['total'].count"
    grow = f"total = {{start}} + (torch.ones(2, requires_grad=True) * 2).sum()\nprint({count})"
    assert [bare.run(grow.format(start=start)).stdout.strip() for start in ("0", "total", "total")] == ["3", "6", "9"]
