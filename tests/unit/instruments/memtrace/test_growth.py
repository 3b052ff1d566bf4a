"""What goes on growing, and what does not: the line, the variable that keeps it, how much, and what to write there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchdebug_magics
from tests.doors import MagicDoor
from tests.unit.instruments.memtrace.loops import CLEAN, GRAPHS, HERE, LEAKING, SETUP, WITHOUT_MODEL, Graph, Leak

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.corpus


def trace(shell: InteractiveShell, code: str, **options: object) -> Any:
    shell.run_cell(SETUP)
    seen = MagicDoor(shell)("memtrace", code, **options)
    assert seen.error is None or str(seen.error) == "enough"
    assert seen.report.problems == ()
    return seen.report


@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm(shell: InteractiveShell, name: str) -> None:
    report = trace(shell, CLEAN[name])
    assert (report.growth, report.graph_growth) == (None, None)


@pytest.mark.parametrize("name", LEAKING)
def test_a_leak(shell: InteractiveShell, name: str) -> None:
    code, wanted = LEAKING[name]
    growth = trace(shell, code).growth
    assert isinstance(wanted, Leak)
    assert growth is not None
    assert wanted.holder == "*" or growth.holder.startswith(wanted.holder)
    assert wanted.least <= growth.bytes_per_iteration <= wanted.most
    assert wanted.fix in growth.fix
    lines = [number for number, line in enumerate(code.splitlines(), 2) if line.endswith(HERE)]
    assert not lines or growth.location.line == lines[0]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_grows(shell: InteractiveShell, name: str) -> None:
    code, wanted = GRAPHS[name]
    report = trace(shell, code)
    assert isinstance(wanted, Graph)
    assert report.growth is None
    assert report.graph_growth.holder == wanted.holder
    assert report.graph_growth.nodes_per_iteration >= 1
    assert wanted.fix in report.graph_growth.fix


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_a_loop_that_calls_no_model_is_one_all_the_same(shell: InteractiveShell, name: str) -> None:
    code, wanted = WITHOUT_MODEL[name]
    report = trace(shell, code)
    assert report.steps_count == 12
    assert report.graph_growth is None
    assert (report.growth is None) is (wanted is None)
    if isinstance(wanted, Leak):
        assert report.growth.holder.startswith(wanted.holder)
        assert wanted.least <= report.growth.bytes_per_iteration <= wanted.most
        assert wanted.fix in report.growth.fix


@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm_by_the_counter_alone(shell: InteractiveShell, name: str) -> None:
    report = trace(shell, CLEAN[name], light=True)
    assert (report.growth, report.graph_growth) == (None, None)


BY_COUNTER = (
    "a list of losses, evaluation",
    "a dict by step",
    "hidden state with its history",
    "inside a function",
    "a view of a large tensor",
)


@pytest.mark.parametrize("name", BY_COUNTER)
def test_a_leak_by_the_counter_alone(shell: InteractiveShell, name: str) -> None:
    code, wanted = LEAKING[name]
    growth = trace(shell, code, light=True).growth
    assert isinstance(wanted, Leak)
    assert growth.holder.startswith(wanted.holder.partition("[")[0])
    assert wanted.least <= growth.bytes_per_iteration <= 2 * wanted.most


def test_what_the_counter_alone_does_not_name_is_not_said(shell: InteractiveShell) -> None:
    # The heap grows by memory that is not torch's.
    report = trace(shell, "rows = []\nfor a, b in batches():\n    learn(a, b)\n    rows.append(bytearray(1 << 18))", light=True)
    assert report.growth is None


def test_two_that_grow_are_both_named(shell: InteractiveShell) -> None:
    growth = trace(shell, LEAKING["two at once"][0]).growth
    assert (growth.holder, growth.others) == ("features[0]", ("outs",))


@pytest.mark.parametrize("kept", ["net(a)", "net(a).detach()"])
def test_what_a_loop_was_for_is_told_as_such(shell: InteractiveShell, kept: str) -> None:
    report = trace(shell, f"preds = []\nwith torch.no_grad():\n    for a, b in batches(20):\n        preds.append({kept})\n")
    assert (report.growth, report.collects) == (None, "preds")
    assert report.verdict.endswith("more than before the cell, most of it in `preds`; only `preds` grows over 20 steps")


def test_where_nothing_grows_nothing_is_collected(shell: InteractiveShell) -> None:
    report = trace(shell, "for a, b in batches(20):\n    preds = net(a).detach()\n")
    assert report.collects == ""
    assert report.verdict.endswith("no growth over 20 steps")


def test_two_models_with_parts_of_one_name_at_one_line() -> None:
    judge, artist = nn.Linear(64, 1), nn.Linear(8, 64)
    log: list[torch.Tensor] = []
    with torchdebug_magics.memtrace() as session:
        for _ in range(8):
            score = judge(artist(torch.randn(32, 8))).mean()
            score.backward(retain_graph=True)
            log.append(score)
    growth = session.report.growth
    assert growth is not None
    assert growth.location is not None
    assert "artist" in growth.location.source
    assert growth.bytes_per_iteration >= 32 * 64 * 4
    assert len(log) == growth.iterations_count


def test_models_that_are_called_one_by_one_are_one_step(shell: InteractiveShell) -> None:
    code = """teacher, layers = nn.Linear(64, 10), nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
for a, b in batches():
    with torch.no_grad():
        wanted = teacher(a)
    for layer in layers:
        a = layer(a)
    F.mse_loss(net(a), wanted).backward()
    opt.step()
"""
    assert trace(shell, code).steps_count == 12


def test_what_grows_beside_it_is_no_variable_with_one_value(shell: InteractiveShell) -> None:
    code = """first, second = [], []
for a, b in batches():
    learn(a, b)
    first.append(net(a).detach()); second.append(b)
"""
    assert trace(shell, code).growth.others == ("second",)


def test_a_line_under_time_is_shown(shell: InteractiveShell) -> None:
    growth = trace(shell, "%%time\nkept = []\nfor a, b in batches():\n    learn(a, b)\n    kept.append(net(a))").growth
    assert growth.location.source == "kept.append(net(a))"
