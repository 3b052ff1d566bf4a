"""--against, where the code was edited in between: what changed, in the user's terms."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint
from torchdebug_magics.instruments.deterministic.prints.against import compared

if TYPE_CHECKING:
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
X = torch.linspace(-1, 1, 48).reshape(12, 4)
Y = X.sum(1, keepdim=True)
"""
TRAIN = """
torch.manual_seed(0)
scale = 2.0
data = TensorDataset(X, Y)
loader = DataLoader(data, batch_size=4, shuffle=True)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    for x, y in loader:
        x = x - 0.5
        loss = scale * F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


@pytest.fixture
def against(shell: InteractiveShell) -> Any:
    shell.run_cell(SETUP).raise_error()

    def run(before: str, after: str) -> Any:
        shell.user_ns.pop("r", None)
        shell.run_cell(f"%%deterministic -q -o ref\n{textwrap.dedent(before).strip()}", store_history=True).raise_error()
        shell.run_cell(f"%%deterministic -q --against ref -o r\n{textwrap.dedent(after).strip()}", store_history=True).raise_error()
        held = shell.user_ns["ref"].fingerprint
        assert Fingerprint.from_dict(json.loads(json.dumps(held.to_dict()))) == held
        return shell.user_ns["r"]

    return run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("for epoch", "# two epochs\n\nfor epoch"),
        ("opt.zero_grad()", "opt.zero_grad()  # clean"),
        ("loss = scale", "loss=scale"),
        ("loss.backward()", "print(loss.item(), net[0].weight.norm())\n        loss.backward()"),
        ("F.mse_loss(net(x), y)", "nn.MSELoss()(net(x), y)"),
        ("epoch", "number"),
        ("range(2)", "range(3)"),
        ("range(2)", "range(1)"),
        ("loader = DataLoader(data", "other = DataLoader(data, batch_size=2, shuffle=True)\nloader = DataLoader(data"),
        ("net = nn.S", "unused = nn.Linear(4, 4)\ntorch.manual_seed(0)\nnet = nn.S"),
        ("data = TensorDataset(X, Y)", "print(X.mean())\ndata = TensorDataset(X, Y)"),
    ],
)
def test_an_edit_that_changes_no_number_is_no_difference(against: Any, old: str, new: str) -> None:
    report = against(TRAIN, TRAIN.replace(old, new))
    assert report.verified is True, report.verdict


@pytest.mark.parametrize(
    ("old", "new", "source", "said", "fix"),
    [
        ("scale = 2.0", "scale = 3.0", "scale = 3.0", "was `scale = 2.0`", ""),
        ("batch_size=4", "batch_size=6", "loader = DataLoader(data, batch_size=6, shuffle=True)", "batch_size=4", ""),
        ("nn.ReLU()", "nn.Tanh()", "nn.Tanh()", "nn.ReLU()", ""),
        ("lr=0.1", "lr=0.2", "lr=0.2", "lr=0.1", ""),
        ("        x = x - 0.5\n", "", "F.mse_loss", "`x = x - 0.5` was removed", ""),
        ("loss = scale", "y = y * 2\n        loss = scale", "y = y * 2", "line is new", ""),
        ("net = nn.S", "aux = nn.Linear(4, 4)\nnet = nn.S", "aux = nn.Linear(4, 4)", "`aux` draws random numbers", "torch.manual_seed"),
        (
            "        opt.step()\n",
            "        opt.step()\n    for x, y in DataLoader(data, batch_size=6):\n        pass\n",
            "for x, y in DataLoader(data, batch_size=6):",
            "draws a seed",
            "give `loader` its own generator",
        ),
        (
            "loader = DataLoader(data, batch_size=4, shuffle=True)",
            "loader = DataLoader(data, batch_size=4)",
            "data, batch_size=4)",
            "shuffle=True",
            "",
        ),
    ],
)
def test_an_edit_is_named(against: Any, old: str, new: str, source: str, said: str, fix: str) -> None:
    report = against(TRAIN, TRAIN.replace(old, new))
    found = report.divergence
    assert report.verified is False
    assert source in found.location.source, report.verdict
    assert said in found.explanation, report.verdict
    assert fix in found.fix, report.verdict


def test_layers_that_are_made_in_another_order_get_other_random_numbers(against: Any) -> None:
    code = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 2, 3)
            self.fc = nn.Linear(4, 3)
        def forward(self, x):
            return self.conv(x.unsqueeze(1)).sum() + self.fc(x).sum()
    torch.manual_seed(0)
    out = Net()(X)
    """
    conv, fc = "        self.conv = nn.Conv1d(1, 2, 3)\n", "        self.fc = nn.Linear(4, 3)\n"
    found = against(code, code.replace("    " + conv, "").replace("    " + fc, "    " + fc + "    " + conv)).divergence
    assert "`fc` is created before `conv`: the random numbers go to different layers" in found.explanation
    assert (found.cause, found.location.source) == ("unseeded_generator", "self.fc = nn.Linear(4, 3)")


def test_a_run_that_goes_on_says_what_it_lacks(against: Any) -> None:
    going_on = TRAIN.replace("net = ", "saved = {}\nnet = ").replace(
        "for epoch in range(2):", "for epoch in range(4):\n    torch.manual_seed(epoch)"
    )
    going_on += (
        "    if epoch == 1:\n        import copy\n        saved = copy.deepcopy({'net': net.state_dict(), 'opt': opt.state_dict()})\n"
    )
    resumed = TRAIN.replace(
        "for epoch in range(2):", "net.load_state_dict(saved['net'])\nfor epoch in range(2, 4):\n    torch.manual_seed(epoch)"
    )
    found = against(going_on, resumed).divergence
    assert "`opt` is new and lacks `momentum_buffer`" in found.explanation
    assert "opt.load_state_dict" in found.fix
    assert found.location.source == "opt.step()"
    whole = resumed.replace("for epoch", "opt.load_state_dict(saved['opt'])\nfor epoch")
    assert against(going_on, whole).verified is True
    # The rate of the schedule that the checkpoint lacks.
    slower = "    if epoch == 1:\n        for group in opt.param_groups:\n            group['lr'] = 0.01\n"
    found = against(
        going_on.replace("    if epoch == 1:", slower + "    if epoch == 1:"),
        whole.replace("range(2, 4):", "range(2, 4):\n    opt.param_groups[0]['lr'] = 0.1"),
    ).divergence
    assert ("`lr` of `opt` was 0.01 in the earlier run and is 0.1 now" in found.explanation, "scheduler" in found.fix) == (True, True)


def test_only_what_both_runs_have_is_called_the_same(against: Any) -> None:
    report = against("a = torch.arange(4.) * 2", "a = torch.arange(4.) * 2\nb = a.sum() + a.cumsum(0)")
    assert (report.verified, report.ops_count) == (True, 2)
    report = against("a = torch.arange(4.) * 2", "z = torch.full((3,), 7.).exp()")
    assert report.verified is False
    assert against("a = 1", "z = torch.full((3,), 7.).exp()").verified is False


TRAINED = """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
torch.manual_seed(1)
for epoch in range(4):
    for x, y in loader:
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch == 1:
        torch.save((net.state_dict(), torch.get_rng_state()), "two.pt")
"""
RESUMED = TRAINED.replace(
    "for epoch in range(4):",
    "weights, drawn = torch.load('two.pt')\nnet.load_state_dict(weights)\ntorch.set_rng_state(drawn)\nfor epoch in range(2, 4):",
)


def test_a_file_of_an_older_version_is_compared_as_far_as_it_goes(against: Any, shell: InteractiveShell) -> None:
    against(TRAIN, TRAIN)
    held = {name: value for name, value in shell.user_ns["ref"].fingerprint.to_dict().items() if name not in {"flow", "updates", "code"}}
    old = Fingerprint.from_dict(held)
    assert compared(old, shell.user_ns["r"].fingerprint, rtol=None) is None
    found = compared(old, against(TRAIN, TRAIN.replace("x - 0.5", "x - 0.4")).fingerprint, rtol=None)
    assert found is not None
    assert found.location is not None
    assert (found.op, found.location.source) == ("aten.sub.Tensor", "x = x - 0.4")


def test_a_seed_that_was_edited_is_behind_other_data(against: Any) -> None:
    code = "import numpy as np\nnp.random.seed(0)\nx = torch.from_numpy(np.random.rand(3))\ny = x * 2"
    found = against(code, code.replace("seed(0)", "seed(1)")).divergence
    assert (found.location.source, found.explanation) == ("np.random.seed(1)", "this line was `np.random.seed(0)`")


@pytest.mark.parametrize(
    ("old", "new", "said", "fix"),
    [
        ("", "", "", ""),
        ("    if epoch == 1", "    net.eval()\n    print(F.mse_loss(net(X), Y))\n    net.train()\n    if epoch == 1", "", ""),
        ("range(2, 4)", "range(2, 6)", "", ""),
        (
            "torch.set_rng_state(drawn)",
            "torch.manual_seed(1)",
            "draws the numbers that the earlier run drew much earlier",
            "torch.set_rng_state",
        ),
        ("torch.set_rng_state(drawn)", "torch.set_rng_state(drawn)\nnet.eval()", "less often than in the earlier run", "`train()`"),
        ("    if epoch == 1", "    print(F.mse_loss(net(X), Y))\n    if epoch == 1", "which the earlier run did not", "`eval()`"),
    ],
)
def test_a_run_that_goes_on(against: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str, fix: str) -> None:
    monkeypatch.chdir(tmp_path)
    report = against(TRAINED, RESUMED.replace(old, new) if old else RESUMED)
    assert report.verified is not bool(said), report.verdict
    if said:
        assert said in report.divergence.explanation, report.verdict
        assert fix in report.divergence.fix, report.verdict


def test_the_same_numbers_in_another_order_are_no_fault_of_the_op(against: Any, shell: InteractiveShell) -> None:
    code = "stacked = torch.stack([torch.full((2,), float(i)) for i in order.pop()])\nsum_ = torch.linspace(0, 1, 3) @ stacked"
    shell.user_ns["order"] = [[0, 2, 1], [0, 1, 2]]
    found = against(code, code).divergence
    assert ("arrive in a different order" in found.explanation, found.cause) == (True, "control_flow")
