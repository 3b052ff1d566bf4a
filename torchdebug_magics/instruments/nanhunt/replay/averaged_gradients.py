"""Gradients that are bad after an averaging over ranks, while those of this rank, replayed alone, are finite."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.nanhunt.averaging import Averaging
from torchdebug_magics.instruments.nanhunt.finding import kind_word, marked
from torchdebug_magics.instruments.nanhunt.replay.bad_step import Inquiry, Outcome, StepReplay
from torchdebug_magics.instruments.nanhunt.report import Finding
from torchdebug_magics.probing.contents import memory_of
from torchdebug_magics.probing.rerun.attempt import CannotReplay
from torchdebug_magics.probing.tensors import is_bad, largest
from torchdebug_magics.probing.this_rank import rank, world_size
from torchdebug_magics.probing.where import excerpt, locate, user_frame

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from torchdebug_magics.probing.rerun.step_rerun import StepRerun
    from torchdebug_magics.report import Location

__all__ = ["averaged"]


@dataclass(frozen=True)
class _Given:
    """What this rank has put into the averaging of one gradient."""

    dtype: torch.dtype
    peak: float
    location: Location | None


def averaged(inquiry: Inquiry, replayed: StepReplay, rerun: StepRerun[Any]) -> Outcome | None:
    """The finding; None where the bad gradients are this rank's own, or nothing says that they were averaged."""
    if world_size() == 1 or inquiry.only_adds or not replayed.finished or replayed.problem or not replayed.reproduced:
        return None
    own = replayed.gradients
    if any(map(is_bad, (*inquiry.tensors, *own.values()))):
        return None
    bad = [leaf for leaf in inquiry.leaves.values() if leaf.grad is not None and is_bad(leaf.grad)]
    for leaf in bad:
        given = _by_wrapper(leaf, replayed, inquiry, rerun) or _by_hand(own.get(str(id(leaf))), replayed)
        if given is not None and leaf.grad is not None:
            rows, bad_gradient = replayed.observer.layer_rows(), leaf.grad.detach()
            return Outcome(
                _finding(leaf, bad_gradient, given, inquiry), {"gradient": bad_gradient}, rows, reproduced=True, way="statements"
            )
    return None


def _by_wrapper(leaf: torch.Tensor, replayed: StepReplay, inquiry: Inquiry, rerun: StepRerun[Any]) -> _Given | None:
    for wrapper in replayed.averaging:
        parameters = [one for one in wrapper.parameters() if one.requires_grad]
        if wrapper.require_backward_grad_sync and any(one is leaf for one in parameters):
            frame = user_frame(inquiry.chain[0].frame) if inquiry.chain else None
            gradients = [replayed.gradients[key] for one in parameters if (key := str(id(one))) in replayed.gradients]
            dtype = _reduced_as(wrapper, [one for one in gradients if one.dtype is leaf.dtype], rerun) or leaf.dtype
            return _Given(dtype, largest(gradients), None if frame is None else locate(frame))
    return None


def _by_hand(gradient: torch.Tensor | None, replayed: StepReplay) -> _Given | None:
    """The collective that was given this gradient or, where the gradients were joined first, the only line that sent as much."""
    if gradient is None:
        return None
    there = memory_of(gradient)
    large = [one for one in replayed.exchanges if one.dtype.is_floating_point and one.element_count >= gradient.numel()]
    same = [one for one in large if there in one.memory]
    if not same and len({one.location for one in large}) == 1:
        same = large
    return _Given(same[-1].dtype, same[-1].peak, same[-1].location) if same else None


class _Bucket:
    """Stands for a `dist.GradBucket`, which cannot be made from Python."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self._flat = torch.cat([one.flatten() for one in gradients])

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._flat = tensor


def _reduced_as(wrapper: DistributedDataParallel, gradients: list[torch.Tensor], rerun: StepRerun[Any]) -> torch.dtype | None:
    """What a communication hook of the user's sums in: it is asked alone, with copies of these gradients."""
    hooks = getattr(wrapper, "_comm_hooks", None)
    if not hooks or not gradients:
        return None
    hook, state = hooks[-1]
    try:
        asked = rerun.call(partial(_call, hook, state, _Bucket(gradients)), [wrapper, state])
    except CannotReplay:
        return None
    return next((one.dtype for one in asked.exchanges if one.dtype.is_floating_point), None)


def _call(hook: Any, state: object, bucket: _Bucket) -> None:
    with torch.no_grad():
        hook(state, bucket)


def _finding(leaf: torch.Tensor, gradient: torch.Tensor, given: _Given, inquiry: Inquiry) -> Finding:
    names = (name for root in inquiry.context.roots for name, one in root.named_parameters() if one is leaf)
    name, kind = next(names, "an input"), kind_word(gradient)
    averaging = Averaging(
        dtype=str(given.dtype).removeprefix("torch."),
        local_peak=given.peak,
        limit=torch.finfo(given.dtype).max,
        world_size=world_size(),
        tensor=name,
        rank=rank() or 0,
    )
    finding = Finding(
        kind=kind,
        phase="backward",
        op=None,
        module=None,
        call=None,
        location=given.location,
        step=inquiry.context.step,
        backward=inquiry.context.backward,
        diagnosis="averaged_from_other_ranks",
        explanation=averaging.explanation("NaN" if kind == "nan" else "inf"),
        fix=averaging.fix(),
        sink=f"gradient of {name}",
        sink_kind=kind,
        weights="weights untouched",
        excerpt=excerpt(given.location) if given.location is not None else (),
        averaging=averaging,
    )
    return marked(finding, gradient)
