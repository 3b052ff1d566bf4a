"""A recorded body through both doors: empty, with an error, nested, with the probe failing; what is recorded, and when that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from torchdebug_magics.instruments.autograd import probe as probe_module
from torchdebug_magics.instruments.autograd.probe import AutogradProbe
from torchdebug_magics.instruments.autograd.report import LiveAutograd

if TYPE_CHECKING:
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

LATE = """\
    h = net[0](x).exp()
    if step == 4:
        h += 1
    loss = h.sum()
    loss.backward()"""


def test_an_empty_body(observe: Observe) -> None:
    report = observe("autograd", "").report
    assert (report.found, report.finding, report.findings, report.problems) == (False, None, (), ())
    assert report.verdict == "No backward() in this cell: nothing to check"


def test_an_error_inside_is_the_users_and_the_report_is_there(observe: Observe) -> None:
    observed = observe("autograd", "x = 1\n1 / 0")
    assert isinstance(observed.error, ZeroDivisionError)
    assert (observed.report.found, observed.report.raised) == (False, "ZeroDivisionError")


@pytest.mark.parametrize("part", ["Hooks.autograd_calls", "Hooks.optimizer_steps", "Hooks.zeroed_gradients"])
def test_failing_while_attaching_leaves_nothing(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"torchdebug_magics.probing.hooks.{part}", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), torchdebug_magics.autograd():
        pytest.fail("the body must not run")
    assert torch.ones(1, requires_grad=True).exp().sum().backward() is None


@pytest.mark.parametrize("other", ["autograd()", "nanhunt()", "memtrace()", "shapes()"])
def test_nested_in_itself_and_in_another(observe: Observe, other: str) -> None:
    body = f"import torchdebug_magics\nwith torchdebug_magics.{other} as inner:\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
    observed = observe("autograd", body)
    assert observed.error is None
    assert (observed.report.found, observed.report.steps_count, observed.report.problems) == (False, 6, ())


def test_a_hook_of_the_users_that_raises(observe: Observe) -> None:
    body = LOOP.replace("optimizer =", "net[0].weight.register_hook(lambda gradient: 1 / 0)\noptimizer =")
    observed = observe("autograd", body)
    assert isinstance(observed.error, ZeroDivisionError)
    assert not observed.report.found


def test_where_recording_costs_too_much_the_first_two_steps_are_recorded(observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_FREE_OPS", 0)
    report = observe("autograd", LOOP).report
    assert (report.recorded_count, report.backward_count, report.steps_count) == (2, 6, 6)
    assert report.verdict == "No autograd fault: 6 backward passes (2 recorded), 6 optimizer steps checked"


def test_a_long_loop_hides_nothing_that_its_first_steps_showed(observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_FREE_OPS", 0)
    body = LOOP.replace("range(6)", "range(400)").replace("x = torch", "net[2] = nn.Linear(8, 1)\nx = torch")
    report = observe("autograd", body).report
    assert (report.finding.kind, report.finding.parameters) == ("stale_optimizer", ("2.weight", "2.bias"))


def test_every_step_is_recorded_where_that_is_asked(observe: Observe) -> None:
    report = observe("autograd", LOOP, every_step=True).report
    assert (report.recorded_count, report.found) == (6, False)


def test_an_error_of_a_later_step_is_explained_in_full_with_every_step(observe: Observe) -> None:
    body = LOOP.replace(
        "    loss.backward()", "    h = net[0](x).exp()\n    if step == 4:\n        h += 1\n    loss = h.sum()\n    loss.backward()"
    )
    finding = observe("autograd", body, every_step=True).report.finding
    assert (finding.kind, finding.tensor, finding.location.source, finding.saved_at.source) == (
        "inplace", "h", "h += 1", "h = net[0](x).exp()",
    )  # fmt: skip


def test_an_error_of_a_step_that_was_not_recorded_is_read_from_the_text(observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_FREE_OPS", 0)
    body = LOOP.replace(
        "    loss.backward()", "    h = net[0](x).exp()\n    if step == 4:\n        h += 1\n    loss = h.sum()\n    loss.backward()"
    )
    finding = observe("autograd", body).report.finding
    assert (finding.kind, finding.tensor, finding.location.source) == ("inplace", "h", "h += 1")


def test_the_tape_is_bounded_under_every_step() -> None:
    probe = AutogradProbe(every_step=True)
    session: Any = torchdebug_magics.session.Session(probe)
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    sizes = []
    with session:
        for _ in range(20):
            optimizer.zero_grad()
            (weight * 2).exp().sum().backward()
            optimizer.step()
            sizes.append(len(probe._recorder.tape.ops))
    assert max(sizes[8:]) <= max(sizes[:8]) + 1


def test_a_snapshot_for_the_live_view() -> None:
    probe = AutogradProbe()
    with torchdebug_magics.session.Session(probe) as session:
        torch.ones(3, requires_grad=True).exp().sum().backward()
        assert session.live() == LiveAutograd(0, 1, is_recording=True)
    assert session.live() is None


def test_a_finding_of_the_cell_before_is_not_this_ones(observe: Observe) -> None:
    observe("autograd", "import torch\ntorch.ones(2).sum().backward()")
    assert not observe("autograd", "y = 1").report.found
