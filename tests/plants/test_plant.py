"""The format of plants: each matcher can fail, each marker is found, and each plant is whole."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plants import all_plants
from tests.plants.plant import FILLED, HERE, Plant, any_of, between, each, ends, has, mismatches, same_set, starts
from torchdebug_magics.report import Location

PLANT = Plant(
    name="a-sum",
    instrument="memtrace",
    setup="total = 0",
    cell="""
    for loss in losses:
        kept = loss  # <- saved
        total += loss  # <- here, saved
    """,
    expect={"growth.holder": "total", "growth.location": HERE},
    repair=(("+= loss", "+= loss.item()"), ("total = 0", "total = 0.0")),
)


def location(line: int, source: str) -> Location:
    return Location(cell=None, file="script.py", line=line, function="", source=source)


def report(**growth: Any) -> SimpleNamespace:
    return SimpleNamespace(problems=(), growth=SimpleNamespace(**growth) if growth else None)


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        (3, 3, 4),
        (None, None, 0),
        (any_of("frozen", starts("cut")), "cut_graph", "clipping"),
        (between(1, 2.5), 2.5, 3),
        (between(1, 2.5), 1, None),
        (has("a", re.compile(r"\d")), "a1", "a"),
        (has("a"), "bar", None),
        (starts("kept"), "kept[0]", "net.kept"),
        (ends(".kept"), "net.kept", "kept[0]"),
        (same_set(1, 2), (2, 1, 1), (1,)),
        (same_set(), (), None),
        (each(has("optimizer")), (), ("the model",)),
        (FILLED, "a fix", ""),
        (HERE, location(4, "total += loss  # <- here, saved"), location(3, "kept = loss  # <- saved")),
        (HERE, location(4, "total += loss  # <- here, saved"), location(4, "total = 0")),
        (HERE, location(4, "total += loss  # <- here, saved"), None),
    ],
    ids=repr,
)
def test_a_value_is_right_or_wrong(expected: Any, right: Any, wrong: Any) -> None:
    plant = Plant(name="one-value", instrument="memtrace", setup=PLANT.setup, cell=PLANT.cell, expect={"growth.value": expected})
    assert mismatches(plant, report(value=right)) == {}
    assert mismatches(plant, report(value=wrong)) == {"growth.value": f"{wrong!r}, not {expected!r}"}


def test_an_attribute_that_is_missing_is_said() -> None:
    assert mismatches(PLANT, report())["growth.holder"] == "there is no 'holder' in None, not 'total'"


def test_problems_are_expected_in_no_report() -> None:
    seen = report(holder="total", location=location(4, "total += loss  # <- here, saved"))
    assert mismatches(PLANT, seen) == {}
    seen.problems = ("no source",)
    assert mismatches(PLANT, seen) == {"problems": "('no source',), not ()"}


def test_lines_are_marked_by_name() -> None:
    assert {line for line, _ in PLANT.marked()} == {4}
    assert {line for line, _ in PLANT.marked("saved")} == {3, 4}


def test_a_repaired_plant_has_nothing_to_find() -> None:
    repaired = PLANT.repaired()
    assert (repaired.setup, "total += loss.item()  # <- here" in repaired.cell) == ("total = 0.0\n", True)
    assert (PLANT.healthy, repaired.healthy, repaired.expect) == (False, True, {"growth": None})


def test_a_repair_that_changes_nothing_is_refused() -> None:
    plant = Plant(name="a-sum", instrument="memtrace", cell="total = 0", expect={"growth": None}, repair=(("totals", ""),))
    with pytest.raises(ValueError, match="'totals' is in neither cell"):
        plant.repaired()


@pytest.mark.parametrize("instrument", sorted({plant.instrument for plant in all_plants()}))
def test_the_plants_of_an_instrument_are_whole(instrument: str) -> None:
    plants = all_plants(instrument)
    assert len({plant.name for plant in plants}) == len(plants)
    assert any(plant.healthy for plant in plants)
    for plant in plants:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", plant.name), plant
        assert not (plant.healthy and plant.repair), plant
        assert bool(plant.marked()) is (HERE in plant.expect.values()), plant
        compile(plant.setup, plant.id, "exec")
        compile(plant.repaired().cell, plant.id, "exec")
