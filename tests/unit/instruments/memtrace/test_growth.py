"""Growth in what no plant can say: by the counter alone, in a script, under another magic, and growth that has no variable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchdebug_magics
from tests.doors import MagicDoor
from tests.plants import all_plants
from tests.plants.memtrace.loops import SETUP
from tests.plants.plant import mismatches
from tests.plants.running import observe

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tests.plants.plant import Plant

PLANTS = {plant.name: plant for plant in all_plants("memtrace")}
HEALTHY = [name for name, plant in PLANTS.items() if plant.healthy and not plant.options]


def trace(shell: InteractiveShell, code: str) -> Any:
    shell.run_cell(SETUP)
    seen = MagicDoor(shell)("memtrace", code)
    assert seen.error is None
    assert seen.report.problems == ()
    return seen.report


def light(shell: InteractiveShell, plant: Plant) -> Any:
    return observe(plant, MagicDoor(shell), light=True).report


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm_by_the_counter_alone(shell: InteractiveShell, name: str) -> None:
    report = light(shell, PLANTS[name])
    assert (report.growth, report.graph_growth, report.problems) == (None, None, ())


@pytest.mark.parametrize(
    "name",
    [
        "a-list-of-losses-evaluation",
        "a-dict-by-step",
        "hidden-state-with-its-history",
        "inside-a-function",
        "a-view-of-a-large-tensor",
    ],
)
def test_a_leak_by_the_counter_alone(shell: InteractiveShell, name: str) -> None:
    plant = PLANTS[name]
    growth, bounds = light(shell, plant).growth, plant.expect["growth.bytes_per_iteration"]
    assert growth.holder.startswith(plant.expect["growth.holder"].text.partition("[")[0])
    assert bounds.low <= growth.bytes_per_iteration <= 2 * bounds.high


@pytest.mark.parametrize("name", ["a-list-of-dicts", "arrays-in-an-attribute"])
def test_python_objects_by_the_counter_alone(shell: InteractiveShell, name: str) -> None:
    assert mismatches(PLANTS[name], light(shell, PLANTS[name])) == {}


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


def test_a_line_under_time_is_shown(shell: InteractiveShell) -> None:
    growth = trace(shell, "%%time\nkept = []\nfor a, b in batches():\n    learn(a, b)\n    kept.append(net(a))").growth
    assert growth.location.source == "kept.append(net(a))"


def test_what_no_variable_leads_to_is_not_called_no_growth(shell: InteractiveShell) -> None:
    code = """import ctypes
for a, b in batches(12):
    learn(a, b)
    hidden = torch.randn(64, 64)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(hidden.untyped_storage()))
    hidden = None
"""
    report = trace(shell, code)
    assert report.growth is not None or report.unnamed_bytes >= 12 * 64 * 64 * 4


def test_a_cycle_or_two_are_no_finding(shell: InteractiveShell) -> None:
    report = trace(shell, PLANTS["a-method-in-an-attribute"].cell.replace("range(12)", "range(2)"))
    assert report.kept_by_cycles is None
    assert sum(cycle.freed_bytes for cycle in report.cycles) > 0
