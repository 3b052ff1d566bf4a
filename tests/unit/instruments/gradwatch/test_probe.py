"""A watched body through both doors: empty, with an error, nested, with the probe failing; files, and a session over several cells."""

from __future__ import annotations

import csv
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from torchdebug_magics import TorchDebugError
from torchdebug_magics.instruments.gradwatch.probe import GradProbe
from torchdebug_magics.instruments.gradwatch.report import GradReport

if TYPE_CHECKING:
    from pathlib import Path

    from tests.doors import Observe

LOOP = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(16, 4)
for step in range(6):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
"""


def test_an_empty_body(observe: Observe) -> None:
    report = observe("gradwatch", "").report
    assert (report.found, report.finding, report.findings, report.problems, report.steps_count) == (False, None, (), (), 0)
    assert report.verdict == "No optimizer step in this cell: nothing to watch"


def test_what_a_plain_loop_gives(observe: Observe) -> None:
    report = observe("gradwatch", LOOP).report
    assert (report.steps_count, report.backward_count, report.modules) == (6, 6, ("0", "2"))
    assert {name: len(values) for name, values in report.norms.items()} == {"0": 6, "2": 6}
    assert all(0 < value < 1 for value in report.ratios["0"])
    assert report.verdict.startswith("Gradients and updates look healthy: 6 steps of 2 modules, loss ")


def test_an_error_inside_is_the_users_and_the_report_is_there(observe: Observe) -> None:
    observed = observe("gradwatch", LOOP + "\n1 / 0")
    assert isinstance(observed.error, ZeroDivisionError)
    assert (observed.report.found, observed.report.raised, observed.report.steps_count) == (False, "ZeroDivisionError", 6)
    assert "until ZeroDivisionError" in observed.report.verdict


@pytest.mark.parametrize("part", ["autograd_calls", "clipped_gradients", "loader_batches", "optimizer_steps"])
def test_failing_while_attaching_leaves_nothing(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"torchdebug_magics.probing.hooks.Hooks.{part}", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), torchdebug_magics.gradwatch():
        pytest.fail("the body must not run")


@pytest.mark.parametrize("other", ["gradwatch()", "nanhunt()", "autograd()", "memtrace()", "deterministic(seed=3)"])
def test_nested_in_itself_and_in_another(observe: Observe, other: str) -> None:
    body = f"import torchdebug_magics\nwith torchdebug_magics.{other} as inner:\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
    observed = observe("gradwatch", body)
    assert observed.error is None
    assert (observed.report.found, observed.report.steps_count, observed.report.problems) == (False, 6, ())


@pytest.mark.parametrize(
    "line", ["net[0].weight.register_hook(lambda gradient: 1 / 0)", "optimizer.register_step_pre_hook(lambda *_: 1 / 0)"]
)
def test_a_hook_of_the_users_that_raises(observe: Observe, line: str) -> None:
    observed = observe("gradwatch", LOOP.replace("x = torch", f"{line}\nx = torch"))
    assert isinstance(observed.error, ZeroDivisionError)
    assert (observed.report.found, observed.report.problems) == (False, ())


def test_a_failure_of_ours_is_a_line_of_the_report(observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdebug_magics.instruments.gradwatch.measuring.StepMeter.gradients", lambda *_: 1 / 0)
    observed = observe("gradwatch", LOOP)
    assert observed.error is None
    assert observed.report.problems == ("the look before an update failed: ZeroDivisionError: division by zero",)


def test_a_model_in_a_function_with_its_own_names(observe: Observe) -> None:
    body = "def train():\n" + "".join(f"    {line}\n" for line in LOOP.splitlines()) + "train()\n"
    assert observe("gradwatch", body).report.modules == ("0", "2")


def test_several_models_bear_the_names_of_their_variables(observe: Observe) -> None:
    body = """
import torch
from torch import nn
G, D = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1))
opt_g, opt_d = torch.optim.SGD(G.parameters(), lr=0.1), torch.optim.SGD(D.parameters(), lr=0.1)
for step in range(4):
    for opt in (opt_g, opt_d):
        G.zero_grad(), D.zero_grad()
        D(G(torch.randn(5, 2))).mean().backward()
        opt.step()
"""
    report = observe("gradwatch", body).report
    assert set(report.modules) == {"G", "D.0"}
    assert report.steps_count == 4


def test_a_tuple_of_optimizers_over_the_same_parameters_takes_a_step_each(observe: Observe) -> None:
    body = LOOP.replace("    optimizer.step()", "    optimizer.step()\n    torch.optim.SGD(net.parameters(), lr=0.01).step()")
    assert observe("gradwatch", body).report.steps_count == 12


def test_every_step_is_in_the_file(observe: Observe, tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    report = observe("gradwatch", LOOP, csv=str(file)).report
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [(row["step"], row["module"]) for row in rows] == [(str(step), name) for step in range(6) for name in ("0", "2")]
    assert float(rows[3]["grad_norm"]) == pytest.approx(report.norms["2"][1], rel=1e-4)
    assert set(rows[0]) == {"step", "module", "grad_norm", "update_ratio", "zero_share", "loss"}


def test_a_file_that_cannot_be_is_one_line_and_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(TorchDebugError, match="not a file in a folder that exists"):
        torchdebug_magics.gradwatch(csv=str(tmp_path / "no" / "steps.csv"))


def test_tensorboard_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest))
    with pytest.raises(TorchDebugError, match="pip install tensorboard"):
        torchdebug_magics.gradwatch(tensorboard="runs")


def test_a_live_snapshot_is_there_while_it_runs() -> None:
    probe = GradProbe()
    from contextlib import ExitStack

    names: dict[str, Any] = {}
    with ExitStack() as stack:
        probe.attach(stack)
        assert probe.live() == GradReport()
        exec(LOOP, names)
        seen = probe.live()
    assert (seen.steps_count, seen.backward_count, seen.modules, seen.learning_rate) == (6, 6, ("0", "2"), 0.1)
    assert len(seen.totals) == 5  # of the last step the numbers are on their way
    assert probe.report().steps_count == 6


def test_a_compiled_step_is_left_alone(observe: Observe) -> None:
    body = LOOP.replace("x = torch.randn", "net = torch.compile(net, backend='eager')\nx = torch.randn")
    report = observe("gradwatch", body).report
    assert (report.modules, report.steps_count, report.problems) == (("0", "2"), 6, ())


def test_an_update_in_another_thread_is_not_watched(observe: Observe) -> None:
    body = "import threading\ndef train():\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
    body += "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n"
    report = observe("gradwatch", body).report
    assert (report.steps_count, report.problems) == (0, ())


def test_parameters_that_are_no_plain_tensors_are_said_to_be_left_out() -> None:
    class Kind(torch.Tensor):
        pass

    weight = torch.randn(3).as_subclass(Kind).requires_grad_()  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([weight, plain := torch.zeros(2, requires_grad=True)], lr=0.1)
    with torchdebug_magics.gradwatch() as session:
        (weight.sum() + plain.sum()).backward()
        optimizer.step()
    assert session.report.problems == ("1 of 2 parameters are not measured: empty, on meta or no plain tensors",)


def test_batches_are_counted_by_loader_and_only_where_they_are_used(observe: Observe) -> None:
    body = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(80, 4)
y = x.sum(1, keepdim=True)
y[43] = 1e6
train, valid = DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(TensorDataset(x[:20], y[:20]), batch_size=4)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
for epoch in range(2):
    for a, b in train:
        optimizer.zero_grad()
        (net(a) - (b if epoch else b.clamp(max=9))).square().mean().backward()
        optimizer.step()
    for a, b in valid:
        net(a)
"""
    finding = observe("gradwatch", body).report.finding
    assert (finding.kind, finding.step) == ("exploding_spike", 30)
    assert "in step 30, batch 10 of epoch 1: " in finding.headline
