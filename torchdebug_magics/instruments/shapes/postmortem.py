"""``%shapes`` after a cell that failed: from the error's own frames, nothing of the cell is run again."""

from __future__ import annotations

from torchdebug_magics.instruments.shapes.report import ShapesReport

__all__ = ["after_error"]


def after_error(error: BaseException, **options: object) -> ShapesReport | None:
    """None where no module was running and no op of torch's failed."""
    return None
