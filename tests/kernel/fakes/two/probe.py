"""Its session."""

from __future__ import annotations

from tests.kernel.fakes import FakeProbe
from torchdebug_magics.instrument import CellContext


def watch(_: CellContext, **options: object) -> FakeProbe:
    return FakeProbe("two", **options)
