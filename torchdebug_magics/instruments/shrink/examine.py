"""``%shrink model``: cut, prove, report; or take it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.shrink.cutting import Asked, shrink_model
from torchdebug_magics.instruments.shrink.model_edits import edits_of
from torchdebug_magics.instruments.shrink.report import ShrinkReport
from torchdebug_magics.instruments.shrink.stacks import costs_of
from torchdebug_magics.probing.modules import unwrapped


def examine(
    context: CellContext,
    model: nn.Module,
    *args: Any,
    layers: int = 2,
    skip_attention: bool = False,
    undo: bool = False,
    device: str = "",
) -> ShrinkReport:
    """Shrink a live model in place, proven by a forward; with `undo`, restore all layers.

    Raises `TorchDebugError` where the first value is no module, `layers` is less than one, or there is nothing to undo.
    """
    if not isinstance(model, nn.Module):
        msg = f"the first argument must be a torch.nn.Module, not {type(model).__name__}: write `%shrink model`"
        raise TorchDebugError(msg)
    if layers < 1:
        msg = f"--layers must be at least 1, not {layers}"
        raise TorchDebugError(msg)
    model = unwrapped(model)
    if undo:
        return _restored(model)
    return shrink_model(model, Asked(args, dict(context.keywords), layers, skip_attention, device))


def _restored(model: nn.Module) -> ShrinkReport:
    edits = edits_of(model)
    if not edits:
        msg = "this model was not shrunk: there is nothing to undo"
        raise TorchDebugError(msg)
    before, stacks, modes = costs_of(model), edits.stacks, {module: module.training for module in model.modules()}
    edits.undo()
    for part in (part for module in modes for part in module.children() if part not in modes):
        part.train(model.training)  # `model.eval()` has not met it meanwhile
    edits.stacks = ()
    return ShrinkReport(stacks=stacks, before=before, after=costs_of(model), undone=True, restored=True, reason="--undo")


@contextmanager
def shrunk(model: nn.Module, *args: Any, layers: int = 2, skip_attention: bool = False, **inputs: Any) -> Iterator[ShrinkReport]:
    """Keep `layers` layers in each stack of the model inside the block; all layers are restored at its end, also after an error.

    `args` and `inputs` go to the forward that proves it, as in a call. Raises `TorchDebugError` where the model cannot be shrunk.
    """
    edits = edits_of(model)
    mark = len(edits)
    try:
        report = examine(CellContext(keywords=inputs), model, *args, layers=layers, skip_attention=skip_attention)
        if report.undone:
            msg = f"the model cannot be shrunk: {report.reason}"
            raise TorchDebugError(msg)
        yield report
    finally:
        edits.undo(mark)
