"""Each model as it was first called: with which modes, and with which parameters to train."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchdebug_magics.probing.names import variable_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp

__all__ = ["RootCall", "modal_parts"]

_WITH_MODES = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)


class RootCall(NamedTuple):
    """A model as it was called."""

    root: weakref.ref[torch.nn.Module]
    op: RecordedOp
    modes: tuple[str, ...]
    """Its BatchNorm and Dropout modules."""
    name: str
    parameters: frozenset[int]
    """The ids of those that require a gradient."""

    @classmethod
    def of(cls, root: torch.nn.Module, op: RecordedOp) -> RootCall:
        """As it is now."""
        trainable = frozenset(id(one) for one in root.parameters() if one.requires_grad)
        return cls(weakref.ref(root), op, modal_parts(root), variable_of(root) or type(root).__name__, trainable)


def modal_parts(root: torch.nn.Module) -> tuple[str, ...]:
    """The modules that compute something else in training mode than in evaluation mode: ``"drop (Dropout)"``."""
    kinds = ((path, one) for path, one in root.named_modules() if isinstance(one, _WITH_MODES) and getattr(one, "p", 1) > 0)
    return tuple(f"{path} ({type(one).__name__})" for path, one in kinds if getattr(one, "track_running_stats", True))
