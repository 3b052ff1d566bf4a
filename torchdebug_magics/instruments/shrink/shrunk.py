"""``with torchdebug_magics.shrunk(model):`` a model that is small inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.shrink.examine import examine
from torchdebug_magics.instruments.shrink.model_edits import edits_of

if TYPE_CHECKING:
    from torch import nn

    from torchdebug_magics.instruments.shrink.report import ShrinkReport

__all__ = ["shrunk"]


@contextmanager
def shrunk(model: nn.Module, *args: Any, layers: int = 2, skip_attention: bool = False, **inputs: Any) -> Iterator[ShrinkReport]:
    """Keep `layers` layers in each stack of the model inside the block; all layers are restored at its end, also after an error.

    `args` and `inputs` go to the forward that proves it, as in a call. Raises `TorchDebugError` where the model cannot be shrunk.
    """
    edits = edits_of(model)
    mark = len(edits)
    try:
        report = examine(model, *args, keywords=inputs, layers=layers, skip_attention=skip_attention)
        if report.undone:
            msg = f"the model cannot be shrunk: {report.reason}"
            raise TorchDebugError(msg)
        yield report
    finally:
        edits.undo(mark)
