"""Healthy programs of real kinds give no finding, and no program runs differently."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.autograd.healthy import HEALTHY
from tests.unit.instruments.autograd.healthy_batches import BATCHES
from tests.unit.instruments.autograd.healthy_traps import TRAPS

if TYPE_CHECKING:
    from tests.doors import Observe
    from tests.unit.instruments.autograd.healthy import Program


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("program", "observe"),
    [pytest.param(program, ("magic", "function")[number % 2], id=program.name) for number, program in enumerate(HEALTHY + TRAPS + BATCHES)],
    indirect=["observe"],
)
def test_nothing_is_found(program: Program, observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a process group changes for good
    observed = observe("autograd", program.body)
    assert observed.error is None
    assert [finding.sentence() for finding in observed.report.findings] == []
    assert not observed.report.found
    assert observed.report.finding is None
    assert observed.report.problems == ()


def test_each_has_a_name_of_its_own() -> None:
    names = [program.name for program in HEALTHY + TRAPS + BATCHES]
    assert len(set(names)) == len(names)
