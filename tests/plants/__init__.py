"""Planted faults as data: ``Plant`` (text and expectations) -> ``observe`` (function or magic) -> ``mismatches`` -> test or score.

Each subfolder is named for an instrument; each of its modules holds the plants of one theme in ``PLANTS``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.plants.plant import Plant

_FOLDER = Path(__file__).parent


@functools.cache
def all_plants(instrument: str = "") -> tuple[Plant, ...]:
    """Every plant, or those of one instrument: by instrument, then by module, then as they are written."""
    instruments = [name for _, name, is_package in pkgutil.iter_modules([str(_FOLDER)]) if is_package and instrument in {"", name}]
    modules = [f"{__name__}.{name}.{theme.name}" for name in instruments for theme in pkgutil.iter_modules([str(_FOLDER / name)])]
    return tuple(plant for module in modules for plant in getattr(importlib.import_module(module), "PLANTS", ()))
