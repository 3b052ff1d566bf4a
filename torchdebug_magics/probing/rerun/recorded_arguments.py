"""The model calls of a replay are given what the calls of the bad step were given."""

from __future__ import annotations

import sys
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchdebug_magics.probing.rerun.attempt import agree, badly_alike, same_bits
from torchdebug_magics.probing.rerun.frame_positions import caller, places, same_call

if TYPE_CHECKING:
    from torchdebug_magics.probing.rerun.observer import Observer
    from torchdebug_magics.probing.rerun.step import Entry

__all__ = ["Feed"]


class Feed:
    """Knows the recorded calls by their place: code that makes an argument may call the same model, and that is another call."""

    def __init__(self, entries: list[Entry], code: CodeType | None, observer: Observer) -> None:
        self._entries = entries
        self._code = code
        self._observer = observer
        self._next = 0

    @property
    def has_begun(self) -> bool:
        """Whether the first model call of the step is over, or the step has none."""
        return self._next > 0 or not self._entries

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """What the call was given in the bad step, with the random state that it began with; None for a call that is none of these."""
        here = () if self._code is None else places(caller(sys._getframe(1)), self._code)
        for number in range(self._next, len(self._entries)):
            entry = self._entries[number]
            if type(entry.module) is type(module) and same_call(entry.place, here):
                self._next = number + 1
                # A model that the step makes is another one in the replay, which makes it anew with all that it is given.
                return self._given(entry, args, kwargs) if entry.module is module else None
        return None

    def _given(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not entry.recorded:
            return None
        entry.random.put_back()
        with _disable_current_modes():  # what we ask must not stand in the trace
            return _merged((args, kwargs), (entry.args, entry.kwargs), self._observer)


def _merged(evaluated: tuple[Any, Any], recorded: tuple[Any, Any], observer: Observer) -> tuple[Any, Any]:
    """The recorded arguments, but for tensors inside the graph, and those that were made again with the same bits.

    The first must belong to the graph of the replay; of the others the replay knows how they were made. It also knows that of a tensor
    which is bad in the same elements, and differs in its good ones: they hang on random numbers from before the step.
    """
    new, shape = tree_flatten(evaluated)
    old, old_shape = tree_flatten(recorded)
    if shape != old_shape:
        return recorded
    merged = []
    for now, then in zip(new, old, strict=True):
        taken = then
        if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor) and now is not then:
            comparable = now.requires_grad == then.requires_grad
            if then.grad_fn is not None or (comparable and agree(now, then, same_bits, unknown=False)):
                taken = now
            elif comparable and agree(now, then, badly_alike, unknown=False):
                observer.stands_for(then, now)
        merged.append(taken)
    together: tuple[Any, Any] = tree_unflatten(merged, shape)
    return together
