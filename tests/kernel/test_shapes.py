"""`%shapes` in a kernel: the line, above a cell, and after an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel, Ran

SETUP = """
import torch, torch.nn.functional as F
from torch import nn
class Net(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.conv, self.fc, self.calls = nn.Conv2d(3, 8, 3), nn.Linear(features, 10), 0
    def forward(self, x):
        self.calls += 1
        x = F.relu(self.conv(x))
        return self.fc(x.flatten(1))
good, bad, x = Net(288), Net(100), torch.randn(2, 3, 8, 8)
mlp = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
"""
FIX = "fix `fc = nn.Linear(288, 10)` · verified on a copy"


def said(ran: Ran) -> str:
    """All that is to be read, however the lines were broken."""
    return " ".join(ran.text.split())


@pytest.fixture
def kernel(kernel: Kernel) -> Kernel:
    """The shared kernel with models that run and one that does not."""
    assert kernel.run(SETUP).status == "ok"
    return kernel


@on_both_stacks
def test_the_line_shows_the_table_and_computes_nothing(kernel: Kernel) -> None:
    ran = kernel.run("%shapes -o seen good x")
    assert ran.status == "ok"
    for word in ("3,114 parameters", "x 2 x 3 x 8 x 8 float32 → 2 x 10", "nothing was computed", "Training memory, estimated"):
        assert word in said(ran)
    assert kernel.run("(good.calls, seen.mode, [row.path for row in seen.rows])").value == "(0, 'fake', ['', 'conv', 'fc'])"


def test_the_line_on_a_broken_model_shows_why_and_the_fix(kernel: Kernel) -> None:
    ran = kernel.run("%shapes bad (2, 3, 8, 8)")
    assert ran.status == "ok"
    assert "`fc` expects 100 features, gets 288 = 8 x 6 x 6 from `conv`" in said(ran)
    assert FIX in said(ran)
    assert kernel.run("bad.calls, bad.fc.in_features").value == "(0, 100)"


def test_a_wrong_line_is_one_line(kernel: Kernel) -> None:
    ran = kernel.run("%shapes --depth -1 good x")
    assert (ran.status, ran.ename) == ("error", "UsageError")
    assert "--depth must be 0 or more" in said(ran)
    assert "Traceback" not in ran.text


def test_above_a_cell_every_model_in_it_is_shown_and_runs(kernel: Kernel) -> None:
    ran = kernel.run("%%shapes -o seen\ngood.calls = 0\nfor _ in range(3):\n    out = good(x)\nmlp(x)\nout.shape")
    assert ran.status == "ok"
    assert ran.value == "torch.Size([2, 10])"
    assert "Net was called 3 times" in said(ran)
    assert kernel.run("good.calls, [row.path for row in seen.rows if row.depth == 0], seen.mode").value == "(3, ['', ''], 'real')"


@on_both_stacks
def test_a_cell_that_fails_ends_in_its_own_error_under_the_report(kernel: Kernel) -> None:
    plain = kernel.run("# nothing\nbad.calls = 0\nbad(x)")
    ran = kernel.run("%%shapes -o seen\nbad.calls = 0\nbad(x)")
    assert (ran.status, ran.ename, ran.evalue) == ("error", plain.ename, plain.evalue)
    assert FIX in said(ran)
    assert kernel.run("bad.calls").value == "1"


@on_both_stacks
def test_after_an_error_the_bare_line_explains_it(kernel: Kernel) -> None:
    assert kernel.run("bad.calls = 0\nbad(x)").status == "error"
    ran = kernel.run("%shapes -o post")
    assert ran.status == "ok"
    assert "`return self.fc(x.flatten(1))`" in said(ran)
    assert FIX in said(ran)
    assert kernel.run("bad.calls, post.failure.module").value == "(1, 'fc')"


def test_nothing_is_left_in_the_kernel(kernel: Kernel) -> None:
    kernel.run("before = set(globals())")
    kernel.run("%shapes good x")
    kernel.run("%shapes bad x")
    kernel.run("%%shapes\ngood(x)")
    assert kernel.run("sorted(name for name in set(globals()) - before if not name.startswith('_') and name != 'before')").value == "[]"
    hooks = "torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks"
    assert kernel.run(f"[len(one) for one in ({hooks})]").value == "[0, 0]"
