"""``%shapes``: the table of a model's forward, or what is wrong with the call that ended the previous cell."""

from __future__ import annotations

from typing import Any

from torchdebug_magics.instrument import CellContext, Examined
from torchdebug_magics.instruments.shapes.forward_table import examine_model
from torchdebug_magics.instruments.shapes.postmortem import after_error
from torchdebug_magics.instruments.shapes.report import ShapesReport


def examine(context: CellContext, *values: Any, **options: Any) -> Examined | ShapesReport | None:
    """The report on ``model(*inputs, **keywords)``; without values, on the previous cell's error, if it is one of shapes."""
    if values or context.keywords:
        return examine_model(*values or (None,), keywords=context.keywords, **options)
    return None if context.last_error is None else after_error(context.last_error, **options)
