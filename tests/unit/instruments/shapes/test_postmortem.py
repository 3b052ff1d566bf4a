"""``%shapes`` after a cell that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """import torch, torch.nn.functional as F
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(100, 10)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        x = F.relu(self.conv(x))
        return self.fc(x.flatten(1))
net, x = Net(), torch.randn(2, 3, 8, 8)
"""


def after(shell: InteractiveShell, cell: str) -> Any:
    """The report of a bare ``%shapes`` after a cell that ended in an error."""
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        assert not shell.run_cell(cell).success
        shell.run_cell("%shapes -o post")
    return shell.user_ns["post"]


FAILURES = {
    "an operator": ("a, b = torch.randn(2, 3), torch.randn(4, 5)\na @ b", "matmul", None, ((2, 3), (4, 5)), "a @ b"),
    "a method": ("x.view(-1, 7)", "view", None, ((2, 3, 8, 8),), "x.view(-1, 7)"),
    "an index": ("x[5]", "getitem", None, ((2, 3, 8, 8),), "x[5]"),
    "a slice among operands": (
        "torch.cat([x, x[:, :1]], dim=0)",
        "cat",
        None,
        ((2, 3, 8, 8), (2, 1, 8, 8)),
        "torch.cat([x, x[:, :1]], dim=0)",
    ),
    "a function of torch's in Python": (
        "scores, target = torch.randn(2, 3), torch.zeros(3, dtype=torch.long)\nF.cross_entropy(scores, target)",
        "cross_entropy",
        None,
        ((2, 3), (3,)),
        "F.cross_entropy(scores, target)",
    ),
}


@pytest.mark.parametrize(("cell", "op", "module", "operands", "line"), FAILURES.values(), ids=FAILURES)
def test_it_says_what_failed(shell: InteractiveShell, cell: str, op: str, module: str | None, operands: Any, line: str) -> None:
    failure = after(shell, cell).failure
    assert (failure.op, failure.module, failure.operand_shapes) == (op, module, operands)
    assert failure.location.source == line
    assert failure.location.line == (11 if line.startswith("return") else len(cell.splitlines()))


WRONG_DTYPES = {
    "a result that does not fit": ("n = torch.arange(4)\nn.clamp_(0.5, 2.5)", "n = n.clamp(0.5, 2.5)"),
    "a sum that does not fit": ("n = torch.zeros(4, dtype=torch.long)\nn += torch.ones(4)", "n = n + torch.ones(4)"),
    "an index written to": (
        "n, at = torch.zeros(4), torch.tensor([0.0, 2.0])\nn.scatter_add_(0, at, torch.ones(2))",
        "n.scatter_add_(0, at.long(), torch.ones(2))",
    ),
    "an index": ("n, at = torch.zeros(4), torch.tensor([0.0, 2.0])\nm = n.index_select(0, at)", "n.index_select(0, at.long())"),
    "classes": ("n = torch.tensor([0.0, 2.0])\nm = F.one_hot(n, 3)", "F.one_hot(n.long(), 3)"),
}


@pytest.mark.parametrize(("cell", "fix"), WRONG_DTYPES.values(), ids=WRONG_DTYPES)
def test_the_cast_with_which_the_op_runs(shell: InteractiveShell, cell: str, fix: str) -> None:
    failure, explained = after(shell, cell).failure, shell.user_ns["n"].clone()
    assert (failure.fixes[0].code, failure.fixes[0].verified) == (fix, True)
    assert shell.run_cell(cell.splitlines()[0]).success
    torch.testing.assert_close(explained, shell.user_ns["n"], rtol=0, atol=0)
    assert shell.run_cell(fix).success


def test_nothing_of_the_cell_is_run_again(shell: InteractiveShell) -> None:
    after(shell, "seen = []\nhandle = net.register_forward_pre_hook(lambda *_: seen.append(1))\nnet(x)")
    assert shell.user_ns["seen"] == [1]
    assert shell.user_ns["net"].calls == 1


def test_the_rows_up_to_the_failure_are_shown(shell: InteractiveShell) -> None:
    report = after(shell, "net(x)")
    assert [(row.path, row.output_shapes) for row in report.rows] == [("", ()), ("conv", ((2, 8, 6, 6),)), ("fc", ())]
    assert report.failure.error.startswith("RuntimeError: ")  # newer releases of torch name the op here
    assert report.failure.error.endswith("mat1 and mat2 shapes cannot be multiplied (2x288 and 100x10)")


GENERATOR = """class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x
class Kept(Steps):
    def forward(self, start):
        x = start
        for layer in self.layers:
            x = layer(x)
            yield x
steps, kept, rows = Steps(), Kept(), torch.randn(5, 6)
"""


@pytest.mark.parametrize(
    "cell",
    ["for y in steps(rows):\n    pass", "found = list(steps(x=rows))", "found = kept(rows)\nnext(found)\nnext(found)"],
    ids=["a loop", "a list", "one at a time"],
)
def test_a_forward_that_yields_is_explained_as_a_whole(shell: InteractiveShell, cell: str) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP + GENERATOR)
        assert not shell.run_cell(cell).success
        shell.run_cell("%shapes -o post")
    failure = shell.user_ns["post"].failure
    assert (failure.module, failure.op, failure.location.source) == ("layers.1", "linear", "x = layer(x)")
    assert failure.explanation == "`layers.1` expects 6 features, gets 8 from `layers.0`"
    assert failure.fixes[0].code == "layers[1] = nn.Linear(8, 8)"


@pytest.mark.parametrize("cell", ["1 / 0", "raise ValueError('mine')", "{}['k']", "net.nothing"])
def test_of_other_errors_it_says_that_it_cannot_explain_them(shell: InteractiveShell, cell: str) -> None:
    report = after(shell, cell)
    assert report.failure is None
    error = shell.last_execution_result.error_in_exec  # of the bare `%shapes`, which raises nothing
    assert error is None
    assert report.verdict.startswith("cannot explain the last error: ")
    assert report.verdict.rpartition(": ")[2] in {"division by zero", "mine", "'k'", "'Net' object has no attribute 'nothing'"}


def test_after_a_cell_that_passed_there_is_nothing_to_explain(shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        shell.run_cell("net(x)")
        shell.run_cell("1")
        shell.run_cell("%shapes -o post\nnet.conv(x)")
    assert [row.type for row in shell.user_ns["post"].rows] == ["Conv2d"]


def test_lines_are_those_of_the_model_and_never_the_one_that_asked(shell: InteractiveShell) -> None:
    post = after(shell, "nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 6))(torch.randn(1, 3))")
    assert [(step.op, step.location) for step in post.failure.chain] == [("input", None), ("linear", None), ("relu", None)]
    post = after(shell, "net(x)")
    assert [step.location.source for step in post.failure.chain if step.location] == [
        "x = F.relu(self.conv(x))",
        "x = F.relu(self.conv(x))",
        "return self.fc(x.flatten(1))",
    ]


def test_a_compiled_model_is_explained_as_it_was_written(shell: InteractiveShell) -> None:
    post = after(shell, "torch.compile(net, backend='eager')(x)")
    assert post.verdict.startswith("`fc` expects 100 features, gets 288 = 8 x 6 x 6 from `conv`")
    assert post.failure.location.source == "return self.fc(x.flatten(1))"
    assert post.failure.fixes[0].code == "fc = nn.Linear(288, 10)"
    assert "TorchRuntimeError" in post.failure.error
