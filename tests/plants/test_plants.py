"""Each plant through a door to its instrument: the report says what the plant expects, and what must never change has not."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests import doors
from tests.plants import all_plants
from tests.plants.plant import mismatches
from tests.plants.running import observe
from tests.plants.state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.plants.plant import Plant

STATES: dict[str, Callable[..., Any]] = {"overfit": state_of}
"""What an instrument must leave as it was, to the last bit."""


def _cure_is_proven(report: Any) -> bool:
    return not report.verified or (report.trials[-1].learns and len(report.cured_losses) == report.trials[-1].steps)


CONSISTENT: dict[str, Callable[[Any], bool]] = {"overfit": _cure_is_proven}
"""What parts of a report say of each other, whatever the plant."""
MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "overfit": (pytest.mark.keeps_rng, pytest.mark.filterwarnings("ignore")),
    "memtrace": (pytest.mark.waits,),  # growth beside tensors may hide in heap that earlier tests have freed: then it is repeated alone
}
HAS_HEALED = frozenset({"memtrace"})
"""Instruments that also see each plant with its repair; for the others plain runs confirm the repairs."""


def _deal(instrument: str) -> list[Any]:
    """Each plant through one of the doors, by turns: so half of the healthy ones, and half of the planted, come by each."""
    params = []
    for healthy in (True, False):
        plants = [plant for plant in all_plants(instrument) if plant.healthy is healthy]
        for plant, turn in zip(plants, itertools.cycle(doors.DOORS)):
            params.append(pytest.param(plant, plant.door or turn, id=plant.id, marks=MARKS.get(plant.instrument, ())))
    return params


INSTRUMENTS = sorted({plant.instrument for plant in all_plants()})
DEALT = [param for instrument in INSTRUMENTS for param in _deal(instrument)]
REPAIRED = [param for param in DEALT if param.values[0].repair and param.values[0].instrument in HAS_HEALED]


@pytest.fixture
def door(request: pytest.FixtureRequest, door_name: str, tmp_path: Path) -> doors.Door:
    return doors.FunctionDoor(tmp_path) if door_name == "function" else doors.MagicDoor(request.getfixturevalue("shell"))


@pytest.mark.parametrize(("plant", "door_name"), DEALT)
def test_the_report_is_true(plant: Plant, door: doors.Door) -> None:
    run = observe(plant, door, state=STATES.get(plant.instrument))
    assert run.error is None or type(run.error).__name__ == plant.raises
    assert mismatches(plant, run.report) == {}, run.report.verdict
    assert run.is_unchanged
    assert CONSISTENT.get(plant.instrument, lambda _: True)(run.report)


@pytest.mark.parametrize(("plant", "door_name"), REPAIRED)
def test_once_repaired_there_is_nothing_to_find(plant: Plant, door: doors.Door) -> None:
    run = observe(plant.repaired(), door)
    assert mismatches(plant.repaired(), run.report) == {}
