"""An update that may go wrong: the parameters, the optimizer's state and its settings before it, to be put back when it has."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.nanhunt.replay.bad_step import Outcome
from torchdebug_magics.instruments.nanhunt.watch.update_checks import bad_parameter
from torchdebug_magics.probing.tensors import is_bad
from torchdebug_magics.probing.where import frames_above

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Context
    from torchdebug_magics.probing.buffers import Buffers

__all__ = ["Undo", "Undos"]

_MOST_BYTES = 1 << 28
"""Of one copy: what holds more than that is not worth the danger of running out of memory."""


class Undo:
    """One update that is about to begin."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, copies: bool) -> None:
        self.optimizer = optimizer
        self._containers: list[tuple[Any, Any]] = []
        tensors: dict[int, torch.Tensor] = {}
        for root in (optimizer.state, *optimizer.param_groups):
            self._collect(root, tensors)
        self._versions = [(one, _version(one)) for one in tensors.values()]
        self.has_copies = copies and sum(one.nbytes for one in tensors.values()) <= _MOST_BYTES
        self._copies = [(one, one.detach().clone()) for one in tensors.values()] if self.has_copies else []

        self.buffers: tuple[Buffers, ...] = ()
        """Of the models, as they were before the step; where closures make the gradients, before the first of them."""

    def _collect(self, value: Any, tensors: dict[int, torch.Tensor]) -> None:
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif isinstance(value, (MutableMapping, MutableSequence)):
            self._containers.append((value, copy.copy(value)))
            for one in value.values() if isinstance(value, MutableMapping) else value:
                self._collect(one, tensors)

    def is_running(self) -> bool:
        """Whether the call of `step` is not over: one that raised, or was interrupted, has no end that we hear of."""
        return any(
            frame.f_globals.get("__name__") == "torch.optim.optimizer" and frame.f_locals.get("self") is self.optimizer
            for frame in frames_above(sys._getframe(1))
        )

    def is_written(self) -> bool:
        """Whether anything was changed by now, such as by an update between two calls of a closure."""
        return any(_version(one) != before for one, before in self._versions)

    def before(self, value: Any) -> Any:
        """What a tensor or a container held before the update; None where there is no copy of it."""
        pairs = self._copies if isinstance(value, torch.Tensor) else self._containers if self.has_copies else ()
        return next((held for one, held in pairs if one is value), None)

    def _spoilt(self) -> torch.Tensor | None:
        """The first parameter that is bad now, and was not."""
        mine = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        return next((one for one, before in self._copies if id(one) in mine and is_bad(one) and not is_bad(before)), None)

    def told(self, outcome: Outcome, context: Context, name: Callable[[torch.Tensor], str]) -> Outcome:
        """What was found in a closure that this update calls: with what is true of the weights, and of a parameter that it has spoilt."""
        finding = outcome.finding
        if finding is None or not self.is_written():
            return outcome
        parameter = self._spoilt() if finding.phase in {"parameter", "optimizer"} else None
        if parameter is not None:
            outcome = Outcome(
                bad_parameter(self.optimizer, parameter, name(parameter), context, self.before), {"output": parameter.detach().clone()}
            )
        return self.weighed(outcome, "weights changed since the step began")

    def weighed(self, outcome: Outcome, otherwise: str) -> Outcome:
        """The outcome with what becomes of the weights: they are put back where there is a copy."""
        finding = outcome.finding
        if finding is None or finding.phase == "parameter":
            return outcome
        return replace(outcome, finding=replace(finding, weights="weights put back" if self.has_copies else otherwise))

    def put_back(self) -> None:
        """Everything as it was, in the tensors and containers that held it."""
        if not self.has_copies:
            return
        for buffers in self.buffers:
            buffers.put_back()
        with torch.no_grad():
            for tensor, before in self._copies:
                tensor.copy_(before)
        for container, before in self._containers:
            container.clear()
            container.update(before) if isinstance(container, MutableMapping) else container.extend(before)


class Undos:
    """The updates that are running now; one may call another."""

    def __init__(self) -> None:
        self._begun: list[Undo] = []

    def begin(self, optimizer: torch.optim.Optimizer, buffers: Sequence[Buffers], *, copies: bool) -> None:
        """An update of which a copy is worth while."""
        self._begun = [*(one for one in self._begun if one.is_running()), Undo(optimizer, copies=copies)]
        self.saw(buffers)

    def saw(self, buffers: Sequence[Buffers]) -> None:
        """The buffers at the start of the last step; those of the first one count, as each call of a closure is one."""
        undo = self.outermost()
        if undo is not None:
            undo.buffers = undo.buffers or tuple(buffers)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """It is over: nothing of it is kept."""
        place = next((place for place, one in enumerate(self._begun) if one.optimizer is optimizer), len(self._begun))
        del self._begun[place:]

    def outermost(self) -> Undo | None:
        """The one that holds how everything was before the step."""
        return next((one for one in self._begun if one.is_running()), None) if self._begun else None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
