"""``%%torchdebug``: of several findings the cause leads, nothing is said of a healthy training, and the run is left as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import torchdebug_magics
from tests.unit.instruments.watch.cells import FAULTS, HEALTHY, SETUP, TWO
from torchdebug_magics.html.page import Facts
from torchdebug_magics.instrument import SCRIPT
from torchdebug_magics.instruments.watch import INSTRUMENT
from torchdebug_magics.instruments.watch.probe import WatchProbe

if TYPE_CHECKING:
    from tests.doors import Door

WATCHED = {"nanhunt", "autograd", "gradwatch", "memtrace", "hangwatch"}


def marked(body: str) -> int | None:
    return next((number for number, line in enumerate(body.splitlines(), 2) if "# here" in line), None)


@pytest.mark.parametrize("name", [*FAULTS, *TWO])
def test_the_cause_leads(observe: Door, name: str) -> None:
    cell = {**FAULTS, **TWO}[name]
    observed = observe("watch", cell.body, namespace=observe.plain(SETUP))
    report = observed.report
    assert report.instrument == cell.instrument, report.verdict
    assert (observed.error is not None) == cell.raises
    if (line := marked(cell.body)) is not None:
        assert report.location.line == line
    for magic in cell.also:
        assert any(said.startswith(f"{magic}: ") for said in report.consequences), report.consequences
    assert report.found
    assert report.finding == report.reports[report.instrument].main_finding()
    assert (report.verdict, report.fix) == (report.reports[report.instrument].verdict, report.reports[report.instrument].fix)
    rows = [row for block in INSTRUMENT.page(report).blocks if isinstance(block, Facts) for row in block.rows]
    assert tuple(said for name, said in rows if name == "also") == report.consequences


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_training_and_it_is_left_as_it_is(observe: Door, name: str) -> None:
    results = []
    for is_watched in (False, True):
        names = dict(observe.plain(SETUP))
        if is_watched:
            observed = observe("watch", HEALTHY[name], namespace=names)
            report, names = observed.report, observed.namespace
        else:
            exec(HEALTHY[name], names)
        results.append([*names["model"].state_dict().values(), torch.get_rng_state()])
    assert (report.found, report.status, report.consequences, report.problems) == (False, "good", (), ()), report.verdict
    assert set(report.watched) <= WATCHED
    assert {"nanhunt", "memtrace", "hangwatch"} <= set(report.watched)
    assert all(torch.equal(plain_value, value) for plain_value, value in zip(*results, strict=True))


def test_a_cell_that_computes_nothing_is_not_called_fine() -> None:
    with torchdebug_magics.watch() as session:
        pass
    assert session.report.status == "info"
    assert session.report.verdict.startswith("Nothing to watch")


def test_an_instrument_that_cannot_begin_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = WatchProbe(SCRIPT, guard=None)

    def refuse(*_: object) -> None:
        msg = "no room"
        raise RuntimeError(msg)

    monkeypatch.setattr(type(probe._sessions["gradwatch"]._probe), "attach", refuse)
    with torchdebug_magics.watch() as session:
        torch.ones(2, requires_grad=True).sum().backward()
    assert session.report.problems == ("%%gradwatch could not begin: RuntimeError: no room",)
    assert "nanhunt" in session.report.watched


def test_the_guard_is_that_of_memtrace() -> None:
    with pytest.raises(torchdebug_magics.TorchDebugError, match="guard"):
        torchdebug_magics.watch(guard="nonsense")
