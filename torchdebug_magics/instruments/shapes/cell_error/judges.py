"""Networks that judge what another network made, such as a perceptual loss: what they compare is to fit, and their weights stay."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from torchdebug_magics.probing.dry_runs.leaves import named_tensors
from torchdebug_magics.probing.modules import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMPARES", "comparing", "is_judge", "judge_of"]

COMPARES = "binary_cross_entropy"
"""An op that compares two tensors, and broadcasts neither."""
_PICTURES = 3
"""Dimensions that a batch of pictures, or of waves, has at least."""
_NAMES = ("loss", "criterion", "perceptual", "lpips", "style", "vgg")
_JUDGES: set[int] = set()
"""The ids of those that compare now."""


def is_judge(module: torch.nn.Module | None) -> bool:
    """Whether it compares what it is given."""
    return id(module) in _JUDGES


def judge_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call asks a network how far two pictures are apart: one that is not trained, or is called a loss."""
    if isinstance(model, torch.jit.ScriptModule) or unwrapped(model) is not model:
        return False
    pair = _pair(args, kwargs)
    trained = any(one.requires_grad for one in model.parameters())
    return len(pair) > 1 and (not trained or any(name in type(model).__name__.lower() for name in _NAMES))


def _pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    given = (tensor for _, tensor in named_tensors((args, kwargs)))
    return [one for one in given if one.dim() >= _PICTURES and one.is_floating_point()][:2]


@contextmanager
def comparing(judge: torch.nn.Module) -> Iterator[None]:
    """Inside, a call of the network begins with what it is for: its two pictures are compared, as by a loss of torch's."""
    own, inner = judge.__dict__, judge.forward
    had = own.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        one, other = _pair(args, kwargs)
        if one.shape != other.shape:
            getattr(functional, COMPARES)(one, other)
        return inner(*args, **kwargs)

    own["forward"] = forward
    _JUDGES.add(id(judge))
    try:
        yield
    finally:
        _JUDGES.discard(id(judge))
        own.pop("forward") if had is None else own.update(forward=had)
