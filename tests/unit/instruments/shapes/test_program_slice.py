"""A loss that does not fit: the lines that led to it run again, without data, and the module that made the wrong size is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """import torch, torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
class Auto(nn.Module):
    def __init__(self, wrap=lambda part: part):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4))
        self.up = wrap(nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1))
    def forward(self, x):
        return self.up(self.encode(x))
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.score = nn.Conv2d(1, 4, 4, 2, 1), nn.Conv2d(4, 1, 8)
    def forward(self, x):
        return self.score(self.down(x)).view(-1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 49, 3)
    def forward(self, x):
        return self.fc(self.conv(x).view(-1, 4 * 49))
class Trainer:
    def __init__(self, model):
        self.model, self.log = model, []
    def loss(self, out, x):
        return F.mse_loss(out, x)
    def noted(self, out, x):
        self.log.append(1)
        return F.mse_loss(out, x)
model, normed, critic, net, x = Auto(), Auto(weight_norm), Critic(), Net(), torch.rand(4, 1, 16, 16)
head, rows, labels = nn.Linear(8, 5), torch.rand(6, 8), torch.tensor([0, 1, 2, 3, 4, 0])
trainer, lstm, fc = Trainer(model), nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
def step(out, x):
    return ((out - x) ** 2).mean()
"""
UP = "up = nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1)"


def after(shell: InteractiveShell, cell: str) -> Any:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        assert not shell.run_cell(cell).success
        shell.run_cell("%shapes -o post")
    return shell.user_ns["post"]


FIXED = {
    "in a loop, after more lines": (
        "for batch in [x]:\n    z = model.encode(batch)\n    out = model.up(z)\n    out = torch.sigmoid(out)\n    nn.L1Loss()(out, batch)",
        f"model.{UP}",
    ),
    "under no_grad": ("with torch.no_grad():\n    out = model(x)\nF.mse_loss(out, x)", f"model.{UP}"),
    "in a function of the user's": ("step(model(x), x)", f"model.{UP}"),
    "a model that an object holds": (
        "def run(self, x):\n    out = self.model(x)\n    return F.mse_loss(out, x)\nrun(trainer, x)",
        f"self.model.{UP}",
    ),
    "a weight-normed part": ("F.mse_loss(normed(x), x)", "normed.up = weight_norm(" + UP.removeprefix("up = ") + ")"),
    "several numbers of each picture": (
        "F.binary_cross_entropy_with_logits(critic(F.pad(x, (4, 4, 4, 4))), torch.ones(4))",
        "critic.score = nn.Conv2d(4, 1, 12)",
    ),
    "class numbers for a regression's loss": (
        "criterion = nn.MSELoss()\ncriterion(head(rows), labels)",
        "criterion = nn.CrossEntropyLoss()",
    ),
    "features in the batch": ("F.cross_entropy(net(x), labels[:4] % 3)", "self.conv(x).flatten(1)\nnet.fc = nn.Linear(784, 3)"),
    "all steps for one target": (
        "out = lstm(rows[:, :, None])[0]\nnn.MSELoss()(fc(out), torch.rand(6, 1))",
        "nn.MSELoss()(fc(out)[:, -1], torch.rand(6, 1))",
    ),
    "scores of all words but the last": (
        "words = torch.randint(0, 5, (6, 8))\nlm = nn.Embedding(5, 5)\nF.cross_entropy(lm(words[:, :-1]).flatten(0, 1), words.view(-1))",
        "words[:, 1:].reshape(-1)",
    ),
    "the batch of one squeezed away": (
        "one = nn.Linear(8, 1)\nlast = rows[:1]\nout = one(last).squeeze()\nF.binary_cross_entropy_with_logits(out, torch.ones(1))",
        "one(last).squeeze(-1)",
    ),
    "a mask of another size": (
        "mask = torch.randint(0, 4, (4, 16, 16))\nF.cross_entropy(model.encode(x), mask)",
        "F.cross_entropy(F.interpolate(model.encode(x), size=mask.shape[1:], mode='bilinear'), mask)",
    ),
    "a difference before a loss": (
        "out = model(x)\n(out - x).abs().mean()",
        f"model.{UP}",
    ),
    "one-hot labels in one row": (
        "target = F.one_hot(labels, 5)\nF.cross_entropy(head(rows), target.view(-1))",
        "target.argmax(1)",
    ),
}


@pytest.mark.parametrize(("cell", "fix"), FIXED.values(), ids=FIXED)
def test_the_module_that_made_the_wrong_side_is_repaired(shell: InteractiveShell, cell: str, fix: str) -> None:
    report = after(shell, cell)
    assert [one.code for one in report.failure.fixes if one.verified][:1] == [fix]
    assert report.failure.module is None
    assert report.failure.location.source in cell + SETUP


UNTOLD = {
    "an input that is no more": "x = model.encode(x)\nx = x + 1\nout = model.up(x)\nx = torch.rand(4, 1, 16, 16)\nF.mse_loss(out, x)",
    "a line that leaves something behind": "made = []\nout = made.append(1) or model(x)\nF.mse_loss(out, x)",
    "an output that changed in a branch": "out = model(x)\nif True:\n    out = out * 2\nF.mse_loss(out, x)",
}


@pytest.mark.parametrize("cell", UNTOLD.values(), ids=UNTOLD)
def test_lines_that_cannot_be_run_again_are_not(shell: InteractiveShell, cell: str) -> None:
    report = after(shell, cell)
    assert "mse_loss" in report.failure.explanation
    assert not [one for one in report.failure.fixes if one.verified]
    assert shell.user_ns["trainer"].log in ([], [1])
    assert shell.user_ns.get("made", [1]) == [1]


def test_nothing_of_the_users_changes(shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        shell.run_cell("torch.manual_seed(0)\nout = model(x)\nF.mse_loss(F.dropout(out), x)")
        before = shell.ev(
            "(model.encode[1].running_mean.clone(), int(model.encode[1].num_batches_tracked), torch.get_rng_state(), x.clone())"
        )
        shell.run_cell("%shapes -o post")
    now = shell.ev("(model.encode[1].running_mean, int(model.encode[1].num_batches_tracked), torch.get_rng_state(), x)")
    assert before[1] == now[1] == 1
    assert all(bool((one == other).all()) for one, other in zip(before[::2], now[::2], strict=True))
    assert bool((before[3] == now[3]).all())
    assert shell.user_ns["post"].failure.fixes[0].verified


def test_a_range_of_sizes_is_whole(shell: InteractiveShell) -> None:
    far = "far = nn.Sequential(nn.Conv2d(1, 1, 3, stride=32), nn.Flatten(0))\nbig = torch.rand(4, 1, 70, 70)\n"
    report = after(shell, f"{far}F.mse_loss(far(big), torch.ones(4))")
    assert "input of 3 x 3 to 34 x 34" in [one.code for one in report.failure.fixes]


DTYPES = {
    "a kernel that only fakes have": ("F.log_softmax(labels.view(2, 3), dim=1)", "F.log_softmax(labels.view(2, 3).float(), dim=1)"),
    "a method": ("shares = labels.softmax(dim=0)", "labels.float().softmax(dim=0)"),
    "weights of a loss": (
        "criterion = nn.CrossEntropyLoss(weight=torch.ones(5, dtype=torch.float64))\ncriterion(head(rows), labels)",
        "criterion(head(rows).double(), labels)",
    ),
}


@pytest.mark.parametrize("case", DTYPES.values(), ids=DTYPES)
def test_a_dtype_that_only_real_tensors_refuse(case: tuple[str, str], shell: InteractiveShell) -> None:
    cell, code = case
    post = after(shell, cell)
    assert post.failure.fixes[0].code == code
    assert post.failure.fixes[0].verified
