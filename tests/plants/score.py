"""A line a plant: ``python -m tests.plants.score [INSTRUMENT] [-k SUBSTRING] [--door function|magic]``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tests import doors
from tests.plants import all_plants
from tests.plants.plant import mismatches
from tests.plants.running import observe

if TYPE_CHECKING:
    from tests.plants.plant import Plant


def wrong(plant: Plant, door_name: str) -> dict[str, str]:
    """Each attribute of the report that is not as expected, or the crash."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if door_name == "function":
                return mismatches(plant, observe(plant, doors.FunctionDoor(Path(folder))).report)
            with doors.in_process_shell() as shell:
                return mismatches(plant, observe(plant, doors.MagicDoor(shell)).report)
        except Exception:
            return {"crash": traceback.format_exc()}


def main() -> int:
    """Print the score; the exit status is the number of plants that are not reported rightly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("instrument", nargs="?", default="", help="only plants of this instrument")
    parser.add_argument("-k", default="", help="only plants whose name holds this")
    parser.add_argument("--door", default="function", choices=doors.DOORS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    plants = [plant for plant in all_plants(options.instrument) if options.k in plant.name]
    plants = [plant for plant in plants if not plant.needs or importlib.util.find_spec(plant.needs)]
    missed = false_alarms = 0
    for plant in plants:
        differs = wrong(plant, options.door)
        missed += bool(differs) and not plant.healthy
        false_alarms += bool(differs) and plant.healthy
        print(f"{'FAIL' if differs else 'ok  '} {plant.id}", *(f"    {path}: {text}" for path, text in differs.items()), sep="\n")
    healthy = sum(plant.healthy for plant in plants)
    planted = len(plants) - healthy
    print(f"\nplanted: {planted - missed} of {planted} right; healthy: {healthy - false_alarms} of {healthy} right")
    return min(missed + false_alarms, 100)


if __name__ == "__main__":
    sys.exit(main())
