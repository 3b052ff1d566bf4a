"""Its look at values."""

from __future__ import annotations

from tests.kernel.fakes import log
from tests.kernel.fakes.one.report import FakeReport
from torchdebug_magics.instrument import CellContext


def examine(_: CellContext, *values: object, **options: object) -> FakeReport | None:
    if not values:
        return None
    log.append(f"examine {values!r} {options['label']!r}")
    return FakeReport(name="examined")
