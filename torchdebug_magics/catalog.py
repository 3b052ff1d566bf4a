"""The list of instruments: the name of a function -> the module whose ``INSTRUMENT`` is its row."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchdebug_magics.ranks.report import RanksReport

if TYPE_CHECKING:
    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.report import Report


_NAMES = (
    "watch", "nanhunt", "shapes", "memtrace", "memgauge", "memmark", "memclean", "deterministic", "hangwatch", "autograd", "gradwatch",
    "shrink", "stepzero", "overfit",
)  # fmt: skip
INSTRUMENTS = {name: f"{__package__}.instruments.{name}" for name in _NAMES}
"""By the name of the function, which is that of its package; a magic may have another."""


def instrument(name: str) -> Instrument:
    """The row of that name; raises KeyError if there is none."""
    row: Instrument = importlib.import_module(INSTRUMENTS[name]).INSTRUMENT
    return row


def instrument_of(report: Report) -> Instrument | None:
    """The row of a report: that in whose package the report's class is defined, or None."""
    if isinstance(report, RanksReport):
        return next(row for row in instruments() if row.name == report.instrument)
    home = type(report).__module__
    name = next((name for name, module in INSTRUMENTS.items() if home == module or home.startswith(f"{module}.")), None)
    return None if name is None else instrument(name)


def instruments() -> Iterator[Instrument]:
    """Every row, in the order of the list."""
    return (instrument(name) for name in INSTRUMENTS)
