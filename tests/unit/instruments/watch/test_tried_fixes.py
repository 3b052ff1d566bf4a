"""Fixes of a silent fault are tried by ``%%torchdebug``: what helps is verified, what does not is no edit, and nothing of a trial stays."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import pytest
import torch

from torchdebug_magics.fixes import fixed_source
from torchdebug_magics.probing.state import training_again

if TYPE_CHECKING:
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(256, 6); y = x.sum(1, keepdim=True)
"""
MODEL = """\
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = {optimizer}
"""
LOOP = """\
for epoch in range(8):
    for at in range(0, 256, 32):
        loss = F.mse_loss(net(x[at:at + 32]), y[at:at + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def watched(shell: InteractiveShell, *cells: str, above: str = "%%torchdebug -o w") -> Any:
    *before, last = cells
    for cell in ("%load_ext torchdebug_magics", *before, f"{above}\n{last}"):
        shell.run_cell(cell, store_history=True)
    return shell.user_ns.get("w")


def repaired_loss(shell: InteractiveShell, report: Any, *cells: str) -> float:
    """The last loss of the cells with the edits of the report and without its magic, in a new kernel's names."""
    number = shell.execution_count - len(cells)
    new = {place - number: text for place, text in fixed_source(report).items() if isinstance(place, int)}
    for place, cell in enumerate(cells):
        shell.run_cell(new.get(place, cell).removeprefix("%%torchdebug -o w\n"))
    return float(shell.user_ns["loss"])


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [
        ("torch.optim.SGD(net.parameters(), 1e-7)", "low"),
        ("torch.optim.Adam(net.parameters(), lr=3.0)", "high"),
    ],
)
def test_a_learning_rate_is_blamed_where_another_one_lets_the_training_learn(shell: InteractiveShell, optimizer: str, word: str) -> None:
    cells = (SETUP, MODEL.format(optimizer=optimizer), LOOP)
    report = watched(shell, *cells)
    assert report.instrument == "gradwatch", report.verdict
    assert f"is too {word}" in report.verdict
    assert (report.fix_state, report.location.source) == ("verified", f"optimizer = {optimizer}")
    assert repaired_loss(shell, report, *cells) < 1.5


UNSCALED = """\
import torch
from torch import nn
torch.manual_seed(0)
x = torch.arange(30., 51.)[:, None]; y = x ** 2 / 64 - 5 * x / 4 + 25
net = nn.Sequential(nn.Linear(1, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
"""
SAW_TOOTH = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.rand(64, 7); y = (x[:, 0] + x[:, 2] > x[:, 3] + x[:, 5]).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(7, 60), nn.ReLU(), nn.Linear(60, 100), nn.ReLU(), nn.Linear(100, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=1.5e-3)
"""
FAR = """\
import torch
from torch import nn
torch.manual_seed(1)
y = torch.arange(300.)[:, None] % 2
x = torch.randn(300, 2) * 9 + torch.tensor([[80., 85.]]) + 24 * y
net = nn.Sequential(nn.Linear(2, 10), nn.Sigmoid(), nn.Linear(10, 1), nn.Sigmoid())
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
"""
STEPS = """\
for step in range(300):
    loss = nn.functional.binary_cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FIT = """\
def train(x, y, steps):
    for step in range(steps):
        inputs = x.clone()
        loss = (net(inputs) - y).abs().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss
loss = train(x, y, 100)
"""
EPOCHS = """\
for epoch in range(40):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("cells", "blamed", "most"),
    [
        ((UNSCALED, FIT), "the inputs are not standardized", 3.0),
        ((SAW_TOOTH, EPOCHS), "with `SGD`", 0.2),
        ((FAR, STEPS), "the inputs are not standardized", 0.3),
    ],
    ids=["inputs of another scale", "a rate too low for the noise of batches", "inputs far from 0"],
)
def test_a_loss_that_stops_where_another_setting_goes_on_is_no_success(
    shell: InteractiveShell, cells: tuple[str, ...], blamed: str, most: float
) -> None:
    report = watched(shell, *cells)
    assert (report.instrument, report.finding.kind, report.status) == ("gradwatch", "stalled", "warn"), report.verdict
    assert blamed in report.verdict
    assert report.fix_state == "verified"
    assert repaired_loss(shell, report, *cells) < most


PLATEAUS = {
    "the noise of the targets": """\
x = torch.randn(256, 3); y = 500 * (x.sum(1, keepdim=True) + torch.randn(256, 1))
net = nn.Linear(3, 1); optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
""",
    "a weight decay, which keeps few samples from being learned by heart": """\
x = torch.randn(40, 10).repeat(7, 1); y = (x[:, :1] + 0.7 * torch.randn(280, 1)).sign()
net = nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, weight_decay=0.08)
""",
    "inputs of another scale that are the targets, too": """\
x = torch.rand(256, 6) * 100; y = x
net = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6)); optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
""",
    "a dropout": """\
x = torch.randn(256, 6); y = x.sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
""",
}


@pytest.mark.parametrize("setup", PLATEAUS.values(), ids=PLATEAUS)
def test_a_loss_that_no_setting_brings_lower_is_well(shell: InteractiveShell, setup: str) -> None:
    report = watched(shell, f"import torch\nfrom torch import nn\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n{setup}", LOOP * 4)
    assert (report.instrument, report.status) == (None, "good"), report.verdict


BLOCK = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 32), nn.Dropout({p}), nn.Linear(32, 1)
    def forward(self, x):
        return {output}
torch.manual_seed(1)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
"""
PLAIN = "self.last(F.relu(self.first(x)))"


@pytest.mark.parametrize(
    ("cells", "blamed"),
    [
        ((SETUP, BLOCK.format(p=0.1, output=PLAIN), LOOP.replace("optimizer.step()", "optimizer.step()\n        decay.step()")), "decay"),
        ((SETUP, BLOCK.format(p=0.99, output=PLAIN.replace("F.relu(self.first(x))", "self.drop(self.first(x))")), LOOP), "self.drop"),
        ((SETUP, BLOCK.format(p=0.1, output=PLAIN), LOOP.replace("at + 32])\n", "at + 32]) / 1e5\n")), "/ 100000`"),
    ],
    ids=["schedule", "dropout", "loss"],
)
def test_what_keeps_a_training_from_learning_is_named(shell: InteractiveShell, cells: tuple[str, ...], blamed: str) -> None:
    decay = "decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)\n"
    cells = (cells[0], cells[1] + decay, cells[2])
    report = watched(shell, *cells)
    assert report.fix_state == "verified", report.verdict
    assert blamed in report.verdict
    assert repaired_loss(shell, report, *cells) < 2.5


BY_HAND = """\
import torch
torch.manual_seed(0)
x = 30 * torch.randn(100, 3); y = x @ torch.tensor([1.0, 2.0, 3.0])
w = torch.zeros(3, requires_grad=True)
rate = 0.01
def sgd(parameter, rate):
    with torch.no_grad():
        parameter -= rate * parameter.grad
        parameter.grad.zero_()
"""
STEPS_BY_HAND = """\
for _ in range(12):
    loss = ((x @ w - y) ** 2).mean()
    loss.backward()
    sgd(w, {})
"""


@pytest.mark.parametrize("rate", ["rate", "0.01"])
def test_a_rate_of_updates_by_hand_is_blamed_too(shell: InteractiveShell, rate: str) -> None:
    cells = (BY_HAND, STEPS_BY_HAND.format(rate))
    report = watched(shell, *cells)
    assert (report.instrument, report.fix_state) == ("gradwatch", "verified"), report.verdict
    assert "0.01 is too high" in report.verdict
    assert repaired_loss(shell, report, *cells) < 10_000


NOISE = """\
X, Y = torch.randn(64, 8), torch.randn(64, 1)
torch.manual_seed(2)
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
for step in range(64):
    i = torch.randint(64, (1,))
    net.zero_grad()
    loss = F.mse_loss(net(X[i] + torch.randn_like(X[i])), Y[i])
    loss.backward()
    optimizer.step()
"""


def test_no_part_of_a_noisy_training_is_blamed(shell: InteractiveShell) -> None:
    report = watched(shell, SETUP, NOISE)
    assert "does not learn with" not in report.verdict


def test_updates_by_hand_that_diverge_are_not_fine(shell: InteractiveShell) -> None:
    """The rate is a default, which no edit reaches."""
    report = watched(shell, BY_HAND.replace("parameter, rate)", "parameter, rate=0.01)"), STEPS_BY_HAND.replace("(w, {})", "(w)"))
    assert "the loss rises" in report.verdict
    assert report.status == "warn"


def test_gradients_without_updates_are_no_training(shell: InteractiveShell) -> None:
    report = watched(shell, BY_HAND, STEPS_BY_HAND.replace("sgd(w, {})", "w.grad = None"))
    assert not report.found
    assert not report.doubts


def test_no_learning_rate_is_blamed_where_none_would_do(shell: InteractiveShell) -> None:
    noise = SETUP.replace("y = x.sum(1, keepdim=True)", "y = torch.randn(256, 1)")
    loop = LOOP.replace("net(x[at:at + 32])", "net(torch.randn(32, 6))")
    report = watched(shell, noise, MODEL.format(optimizer="torch.optim.SGD(net.parameters(), lr=1e-3)"), loop)
    assert "learning rate" not in report.verdict


def test_the_fix_of_a_silent_fault_is_verified_by_the_training_with_it(shell: InteractiveShell) -> None:
    model = MODEL.replace("nn.Linear(32, 1))", "nn.Linear(32, 1), nn.Sigmoid())").format(
        optimizer="torch.optim.SGD(net.parameters(), 0.01)"
    )
    report = watched(shell, SETUP.replace("keepdim=True)", "keepdim=True) * 3 + 20"), model, LOOP)
    assert (report.instrument, report.fix_state) == ("autograd", "verified"), report.verdict
    assert "Sigmoid" not in report.edits[0].new


def test_an_edit_after_which_all_is_found_again_is_not_offered(shell: InteractiveShell) -> None:
    model = MODEL.format(optimizer="torch.optim.SGD(net.parameters(), 0.01)") + "with torch.no_grad(): net[0].bias.fill_(-100)\n"
    report = watched(shell, SETUP, model, LOOP)
    assert report.instrument == "autograd", report.verdict
    assert (report.fix_state, report.edits) != ("compiles", ())
    assert report.fix_state == "verified" or report.edits == ()


SHOWS = """\
import matplotlib.pyplot as plt
log = open("log.txt", "a")
seen, steps = [], 0
for epoch in range(8):
    plt.figure()
    for at in range(0, 256, 32):
        loss = F.mse_loss(net(x[at:at + 32]) + 0 * torch.rand(1), y[at:at + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        steps += 1
        print("step", steps)
        display(steps)
        log.write(f"{steps}\\n"); log.flush()
after = 1
"""


def test_nothing_of_a_trial_is_left_or_shown(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = MODEL.format(optimizer="torch.optim.Adam(net.parameters(), lr=3.0)")
    ends = []
    for above in ("# plain", "%%torchdebug -q -o w"):
        (tmp_path / "log.txt").unlink(missing_ok=True)
        capsys.readouterr()
        report = watched(shell, SETUP, model, SHOWS, above=above)
        space = shell.user_ns
        space["log"].close()
        state = [*space["net"].state_dict().values(), *(value for part in space["optimizer"].state.values() for value in part.values())]
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        names = {name for name in space if not name.startswith("_")} - {"w"}
        log, figures = (tmp_path / "log.txt").read_text(), plt.get_fignums()
        plt.close("all")
        ends.append((names, space["seen"], space["steps"], log, printed, figures, torch.get_rng_state(), state))
    assert report.fix_state == "verified", report.verdict
    assert ends[0][:6] == ends[1][:6]
    assert torch.equal(ends[0][6], ends[1][6])
    assert all(map(torch.equal, ends[0][7], ends[1][7]))
    assert [part.grad is None for part in shell.user_ns["net"].parameters()] == [False] * 4


@pytest.mark.parametrize("above", ["%%torchdebug -o w\n%%time", "%%time\n%%torchdebug -o w"])
def test_another_cell_magic_is_no_reason_to_fail(shell: InteractiveShell, above: str) -> None:
    report = watched(shell, SETUP, MODEL.format(optimizer="torch.optim.SGD(net.parameters(), 1e-7)"), LOOP, above=above)
    assert report.problems == ()
    assert "does not fall" in report.verdict or "too low" in report.verdict


def test_what_cannot_be_undone_is_not_done_again(shell: InteractiveShell) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(200)
        shell.user_ns["address"] = server.getsockname()
        asks = LOOP.replace("        loss = ", "        import socket; socket.create_connection(address).close()\n        loss = ")
        report = watched(shell, SETUP, MODEL.format(optimizer="torch.optim.SGD(net.parameters(), 1e-7)"), asks)
        server.settimeout(0.2)
        count = 0
        while count < 200:
            try:
                server.accept()[0].close()
            except TimeoutError:
                break
            count += 1
    assert count == 64
    assert "too low" not in report.verdict


def test_an_interrupted_trial_leaves_the_report_and_the_training(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = SETUP, MODEL.format(optimizer="torch.optim.SGD(net.parameters(), 1e-7)"), LOOP
    watched(shell, *cells, above="# plain")
    before = {name: value.clone() for name, value in shell.user_ns["net"].state_dict().items()}
    original, runs = training_again.TrainingAgain.run, []

    def run(self: training_again.TrainingAgain, *arguments: Any) -> Any:
        runs.append(original(self, *arguments))
        if len(runs) == 2:
            raise KeyboardInterrupt
        return runs[-1]

    monkeypatch.setattr(training_again.TrainingAgain, "run", run)
    report = watched(shell, *cells)
    assert "the trial of the fix was interrupted" in report.problems
    assert "does not fall" in report.verdict
    after = shell.user_ns["net"].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(("before", "inside"), [("batches = iter([(x, y)] * 500)", "next(batches)"), ("", "F.never_heard_of = 1")])
def test_what_can_be_done_once_only_is_not_done_again(shell: InteractiveShell, before: str, inside: str) -> None:
    loop = LOOP.replace("        optimizer.zero_grad()", f"        {inside}\n        optimizer.zero_grad()")
    report = watched(shell, f"{SETUP}{before}\n", MODEL.format(optimizer="torch.optim.SGD(net.parameters(), 1e-7)"), loop)
    assert "too low" not in report.verdict, report.verdict
    assert "does not fall" in report.verdict


def test_a_model_that_was_trained_before_is_not_judged_by_a_fresh_one(shell: InteractiveShell) -> None:
    trained = MODEL.format(optimizer="torch.optim.Adam(net.parameters(), 1e-2)") + LOOP.replace("range(8)", "range(60)")
    tuned = "optimizer = torch.optim.Adam(net.parameters(), 1e-6)\n" + LOOP
    report = watched(shell, SETUP.replace("keepdim=True)", "keepdim=True) + torch.randn(256, 1)"), trained, tuned)
    assert "learning rate" not in report.verdict, report.verdict


def test_a_method_that_is_not_called_is_the_only_fault(shell: InteractiveShell) -> None:
    loop = LOOP.replace("loss.backward()", "loss.backward")
    report = watched(shell, SETUP, MODEL.format(optimizer="torch.optim.SGD(net.parameters(), lr=0.1)"), loop)
    assert [edit.new for edit in report.edits] == ["loss.backward()"]
    assert report.fix_state == "verified"
    assert report.consequences == ()  # no gradients are "zeroed between backward() and step()" where none were computed
