"""What a replay is to reach, what it saw, and whether it reached the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch

from torchdebug_magics.probing.rerun.observer import Observer
from torchdebug_magics.probing.tensors import is_bad

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from torchdebug_magics.probing.alone.unsent_collectives import Exchange

__all__ = ["Attempt", "CannotReplay", "ObserverT", "Replayed", "agree", "badly_alike", "no_less_bad", "same_bits", "same_kinds"]

ObserverT = TypeVar("ObserverT", bound=Observer)
Alike: TypeAlias = "Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], bool]"


class CannotReplay(Exception):  # noqa: N818 - not an error: a reason
    """Why a step's statements cannot be run again, in words for the report."""


@dataclass
class Attempt:
    """What a replay is to reach: a sink call, known by its place in the step."""

    original: tuple[torch.Tensor, ...]
    """The loss (or what was differentiated) of the bad step."""
    number: int
    """Which backward call since the step began, 1-based."""
    leaves: dict[int, torch.Tensor]
    """Leaf tensors whose gradients are put aside."""
    until_update: bool = False
    """Whether to go on to the optimizer's step, for what happens to gradients after backward()."""


@dataclass
class Replayed(Generic[ObserverT]):
    """What a replay reached."""

    observer: ObserverT
    """What looked at it."""
    losses: tuple[torch.Tensor, ...] = ()
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the id of the leaf, written as text, or the place in a result of ``autograd.grad``."""
    reproduced: bool | None = None
    problem: str = ""
    outputs: tuple[torch.Tensor, ...] = ()
    names: dict[str, Any] = field(default_factory=dict)
    """The variables of the replayed statements, to name tensors by."""
    finished: bool = False
    """Whether it came as far as it was to come."""
    exchanges: tuple[Exchange, ...] = ()
    """What the step exchanges with other ranks, and its replay did not."""
    averaging: tuple[DistributedDataParallel, ...] = ()
    """The models whose gradients a step averages over ranks, and its replay did not."""


def same_bits(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit, one NaN being as good as another."""
    return _equal(left, right, _bits)


def same_kinds(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Whether the same elements are NaN, infinite and minus infinite."""
    return _equal(left, right, _kinds)


def badly_alike(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """As `same_kinds`, and some of them are."""
    return same_kinds(left, right) and any(map(is_bad, left))


def no_less_bad(now: tuple[torch.Tensor, ...], then: tuple[torch.Tensor, ...]) -> bool:
    """Whether all that was bad then is bad now: with a mode on the stack some derivatives multiply by 0 where they select without one."""
    kinds = zip(now, then, strict=True)
    return all(one.shape == other.shape and not bool((_kinds(other).any(0) & ~_kinds(one).any(0)).any()) for one, other in kinds)


def agree(now: object, then: object, alike: Alike, *, unknown: bool) -> bool:
    """Whether two tensors are `alike`; `unknown` of kinds that cannot be compared, and of what is no tensor."""
    if not isinstance(now, torch.Tensor) or not isinstance(then, torch.Tensor):
        return unknown
    try:
        return now.device == then.device and alike((now,), (then,))
    except (RuntimeError, NotImplementedError, TypeError):
        return unknown


def _equal(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...], seen: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        one.shape == other.shape and one.dtype is other.dtype and bool(torch.equal(seen(one), seen(other)))
        for one, other in zip(left, right, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = _real(tensor)
    return torch.cat([plain.nan_to_num(0.0, posinf=0.0, neginf=0.0)[None], _kinds(tensor).to(plain.dtype)])


def _kinds(tensor: torch.Tensor) -> torch.Tensor:
    plain = _real(tensor)
    return torch.stack([torch.isnan(plain), torch.isposinf(plain), torch.isneginf(plain)])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain
