"""``%shapes`` after a cell that failed outside every model: in an expression with calls inside, in a loss, in a constructor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """import torch, torch.nn.functional as F
from torch import nn
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(12, 5), 0
    def forward(self, x):
        self.calls += 1
        return self.fc(x.flatten(1))
model, x, y = Counts(), torch.randn(2, 3, 4), torch.tensor([0, 1])
words, targets = torch.randn(2, 7, 5), torch.randint(0, 5, (2, 7))
criterion, bce = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()
calls = []
class Asked:
    def __getitem__(self, at):
        calls.append(at)
        return x[:, :1 + at]
    @property
    def first(self):
        calls.append("first")
        return x
asked = Asked()
def logged(x):
    calls.append(1)
    return x
"""


def after(shell: InteractiveShell, cell: str) -> Any:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        assert not shell.run_cell(cell).success
        shell.run_cell("%shapes -o post")
    return shell.user_ns["post"]


EXPRESSIONS = {
    "cat along the wrong dimension": (
        "torch.cat([model(x), x.flatten(1)], dim=0)",
        "the last dimension of `x.flatten(1)` is 12, and 5 would fit",
        "torch.cat([model(x), x.flatten(1)], dim=-1)",
    ),
    "an index of an output": ("model(x)[0, 7]", "`model(x)[0, 7]` selects position 7 of dimension 1, which has 5 (0 to 4)", ""),
    "sum with another batch": (
        "model(x) - torch.randn(3, 5)",
        "`model(x)` of 2 x 5 (from `model.fc`) with `torch.randn(3, 5)` of 3 x 5",
        "",
    ),
}

OTHERS = {
    "einsum": (
        "q, k = torch.randn(2, 5, 8), torch.randn(2, 8, 5)\nscores = torch.einsum('bid,bjd->bij', q, k) * 2",
        "`q` of 2 x 5 x 8, `k` of 2 x 8 x 5: the last dimension of `k` is 5, and 8 would fit",
        "torch.einsum('bid,bjd->bij', q, k.transpose(-2, -1))",
    ),
    "einsum of a list": (
        "torch.einsum('ij,jk->ik', [x[0], x[1]])",
        "dimension 0 of `x[1]` is 3, and 4 would fit",
        "torch.einsum('ij,jk->ik', [x[0], x[1].t()])",
    ),
    "einsum with an ellipsis": (
        "torch.einsum('...ij,jk->...ik', x, torch.ones(5, 6))",
        "dimension 0 of `torch.ones(5, 6)` is 5, and 4 would fit",
        "torch.ones(4, 6)",
    ),
    "einsum with a tensor too few": (
        "torch.einsum('ij,jk', x[0])",
        "fewer operands were provided than specified in the equation (it gets `x[0]` of 3 x 4)",
        "",
    ),
    "a place of another size": (
        "out = torch.zeros(9, 4)\nout[2:5] = x[:, 0]",
        "`out[2:5]` selects 3 x 4 of `out` of 9 x 4, is assigned",
        "",
    ),
    "an update": ("h = torch.zeros(3, 4)\nh += torch.ones(3, 5)", "`h += torch.ones(3, 5)` cannot broadcast `h` of 3 x 4 with", ""),
    "a comparison": (
        "(model(x).argmax(1) == torch.zeros(3)).float().mean()",
        "`model(x).argmax(1)` of 2 (from `model.fc`) with `torch.zeros(3)` of 3",
        "",
    ),
    "a method in Python": ("model(x).unflatten(1, (2, 3))", "splits a dimension of 5 into 2 x 3 = 6", ""),
    "parts of a comprehension": (
        "torch.cat([one.flatten(1) for one in [x, x[:, :2]]])",
        "is 8, and 12 would fit",
        "torch.cat([one.flatten(1) for one in [x, x[:, :2]]], dim=-1)",
    ),
    "values of a mapping": (
        "parts = {'a': x, 'b': x[:, :2]}\ntorch.cat(list(parts.values()))",
        "of 2 x 2 x 4: dimension 1 of the tensor is 2, and 3 would fit",
        "torch.cat(list(parts.values()), dim=1)",
    ),
    "samples of a batch": (
        "for batch in torch.utils.data.DataLoader([torch.zeros(3, 8 + at % 2) for at in range(4)], batch_size=2):\n    pass",
        "samples of a batch must have one shape, and these have 3 x 8, 3 x 9",
        "collate_fn=lambda batch: torch.stack([F.pad(x, (0, max(y.shape[-1] for y in batch) - x.shape[-1])) for x in batch])",
    ),
    "rows of two widths": (
        "out = model(x)\n((out - torch.randn(2, 6)) ** 2).mean()",
        "5 and 6 in the last dimension",
        "model.fc = nn.Linear(12, 6)",
    ),
}

LOSSES = {
    "scores and labels of a sequence": (
        "F.cross_entropy(words, targets)",
        "`cross_entropy` of scores 2 x 7 x 5 expects a target of 2 x 5 (classes are dimension 1), gets 2 x 7",
        "F.cross_entropy(words.transpose(-2, -1), targets)",
    ),
    "labels in int32": (
        "for _ in range(2):\n    loss = criterion(model(x), y.int())\n    loss.backward()",
        "`y.int()` is int32",
        "criterion(model(x), y.int().long())",
    ),
    "labels with a column": (
        "criterion(model(x), y[:, None])",
        "expects a target of 2 (classes are dimension 1), gets 2 x 1",
        "criterion(model(x), y[:, None].squeeze(-1))",
    ),
    "too few labels": ("criterion(model(x), y[:1])", "expects a target of 2 (classes are dimension 1), gets 1", ""),
    "a class too many": (
        "criterion(model(x), torch.tensor([0, 7]))",
        "`cross_entropy` has scores of 5 classes (0 to 4), and `torch.tensor([0, 7])` holds class 7",
        "model.fc = nn.Linear(12, 8)",
    ),
    "a regression's width": (
        "F.mse_loss(model(x), torch.randn(2, 3))",
        "`mse_loss` compares `model(x)` of 2 x 5 from `model.fc` with `torch.randn(2, 3)` of 2 x 3",
        "model.fc = nn.Linear(12, 3)",
    ),
    "whole binary labels": (
        "bce(model(x)[:, 0], y)",
        "expects a target of float32, gets int64",
        "bce(model(x)[:, 0], y.float())",
    ),
    "whole binary labels without a column": (
        "bce(model(x)[:, :1], y)",
        "compares `model(x)[:, :1]` of 2 x 1 from `model.fc` with `y",
        "bce(model(x)[:, :1], y.unsqueeze(-1).float())",
    ),
}


@pytest.mark.parametrize(
    ("cell", "words", "fix"), [*EXPRESSIONS.values(), *OTHERS.values(), *LOSSES.values()], ids=[*EXPRESSIONS, *OTHERS, *LOSSES]
)
def test_it_is_explained_and_repaired(shell: InteractiveShell, cell: str, words: str, fix: str) -> None:
    failure = after(shell, cell).failure
    assert failure is not None
    assert words in failure.explanation
    assert [one.code for one in failure.fixes if one.verified][:1] == ([fix] if fix else [])
    assert failure.location.source in cell


def test_no_data_runs_again_and_nothing_is_left(shell: InteractiveShell) -> None:
    after(shell, "import torch\ntorch.manual_seed(0)\ntorch.stack([model(x), x])")
    assert shell.user_ns["model"].calls == 1
    state = shell.user_ns["torch"].get_rng_state()
    shell.run_cell("torch.manual_seed(0)")
    assert shell.user_ns["torch"].equal(state, shell.user_ns["torch"].get_rng_state())


def test_functions_of_the_user_are_not_called_again(shell: InteractiveShell) -> None:
    report = after(shell, "torch.stack([logged(model(x)), x])")
    assert shell.user_ns["calls"] == [1]
    assert report.failure is None
    assert report.verdict.startswith("cannot explain the last error: RuntimeError: stack expects each tensor to be equal size")


@pytest.mark.parametrize("cell", ["torch.stack([asked[0], asked[1]])", "torch.stack([asked.first, y])"])
def test_objects_of_the_user_are_not_asked_again(shell: InteractiveShell, cell: str) -> None:
    report = after(shell, f"{cell}\n")
    asked = shell.user_ns["calls"]
    assert len(asked) == len(set(asked))
    assert report.failure is None


def test_another_view_of_one_tensor_is_no_verified_fix(shell: InteractiveShell) -> None:
    failure = after(shell, "x.view(-1, model(x).shape[1])").failure
    assert "24 elements, not divisible by 5" in failure.explanation
    assert not [one for one in failure.fixes if one.verified]
    assert "x.view(-1, model(x).shape[1])" not in [one.code for one in failure.fixes]


def test_after_an_error_that_it_cannot_explain_it_still_watches_the_cell(shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        shell.run_cell("1 / 0")
        shell.run_cell("%shapes -o post\nmodel(x)")
    report = shell.user_ns["post"]
    assert [row.path for row in report.rows] == ["", "fc"]
    assert report.last_error == ""
    assert "cannot explain" not in report.verdict
