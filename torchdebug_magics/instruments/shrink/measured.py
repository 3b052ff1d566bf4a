"""What a model takes: parameters and bytes, each tensor once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shrink.report import Costs, StackRow
from torchdebug_magics.probing.dry_runs.leaves import is_lazy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from torchdebug_magics.instruments.shrink.stacks import Stack

__all__ = ["costs_of", "rows_of"]


def costs_of(model: nn.Module) -> Costs:
    """Of parameters and buffers; those that have no shape yet count nothing."""
    parameters = [one for one in model.parameters() if not is_lazy(one)]
    buffers = [one for one in model.buffers() if not is_lazy(one)]
    return Costs(
        parameters=sum(one.numel() for one in parameters),
        bytes=sum(one.numel() * one.element_size() for one in (*parameters, *buffers)),
    )


def rows_of(kept: Mapping[Stack, tuple[int, ...]]) -> tuple[StackRow, ...]:
    """As the report has them."""
    return tuple(
        StackRow(
            path=stack.path or "the model",
            type=type(stack.layers[0]).__name__,
            layers_before=len(stack.layers),
            kept=left,
            kinds=len(set(stack.kinds)),
        )
        for stack, left in kept.items()
    )
