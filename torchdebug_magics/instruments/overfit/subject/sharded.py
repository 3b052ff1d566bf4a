"""Models that several ranks hold together cannot be overfitted: ranks that take different numbers of steps wait for each other for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.probing.shards import is_shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["refuse_sharded"]


def refuse_sharded(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a `TorchDebugError` where one is a DTensor."""
    if any(map(is_shard, tensors)):
        msg = "the model is sharded over ranks: overfit it before `fully_shard`, `parallelize_module` or `distribute_tensor`"
        raise TorchDebugError(msg)
