"""Says why gradients under DistributedDataParallel differ between ranks, from the way in which a step uses the wrapper."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from torchdebug_magics.instruments.deterministic.replicas.replica import Replica

__all__ = ["WrapperUse"]


class WrapperUse:
    """Follows one wrapper from step to step, and sets the cause of its replica at the first step at which something is wrong."""

    def __init__(self, wrapper: DistributedDataParallel, replica: Replica) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._replica = replica
        self._averaged = WeakIdKeyDictionary({one: True for one in wrapper.parameters() if one.requires_grad})
        self._is_called = self._is_bypassed = self._is_synced = False

    def called(self, module: torch.nn.Module) -> None:
        """A model is called for training, not by another model."""
        wrapper = self._wrapper()
        if wrapper is module:
            self._is_called = True
            self._is_synced = self._is_synced or bool(wrapper.require_backward_grad_sync)
        elif wrapper is not None and module is wrapper.module:
            self._is_bypassed = True

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are as the optimizer gets them."""
        wrapper = self._wrapper()
        trained = {id(one) for group in optimizer.param_groups for one in group["params"] if one.grad is not None}
        own = [] if wrapper is None else [one for one in wrapper.parameters() if id(one) in trained]
        if own and self._replica.cause in {"", "averaged"}:
            self._replica.cause = self._cause(is_late=any(one not in self._averaged for one in own))
        if own:
            self._is_called = self._is_bypassed = self._is_synced = False

    def _cause(self, *, is_late: bool) -> str:
        if not self._is_called:
            return "bypassed" if self._is_bypassed else ""
        if not self._is_synced:
            return "unsynced"
        return "late" if is_late else "averaged"
