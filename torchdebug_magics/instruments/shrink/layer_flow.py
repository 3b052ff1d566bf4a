"""Whether the layers of a container feed each other. Those of a stack do; experts, heads and towers stand side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import StorageWeakRef

from torchdebug_magics.probing.dry_runs.leaves import memory_of, named_tensors
from torchdebug_magics.probing.hooks import Hooks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchdebug_magics.instruments.shrink.stacks import Stack

__all__ = ["LayerFlow"]


@dataclass
class _Counter:
    flops: int = 0


class LayerFlow:
    """Follows, op by op, which layer's results reach which other layer: every memory knows the layer that made it last."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self._stacks = stacks
        self._hooks = Hooks()
        self._place_of: dict[int, tuple[int, int]] = {}
        shared: set[int] = set()
        for number, stack in enumerate(stacks):
            for place, layer in enumerate(stack.layers):
                for part in layer.modules():
                    if self._place_of.setdefault(id(part), (number, place)) != (number, place):
                        shared.add(id(part))
        for part_id in shared:
            del self._place_of[part_id]
        self._running: list[tuple[int, int] | None] = []
        self._made_by: dict[int, tuple[StorageWeakRef, dict[int, int]]] = {}
        self._called: list[dict[int, _Counter]] = [{} for _ in stacks]
        self._fed: list[set[int]] = [set() for _ in stacks]

    def attach(self, stack: ExitStack) -> None:
        """Follow until the stack closes."""
        stack.callback(self._hooks.sweep)
        self._hooks.module_calls(stack, self._enter, self._leave)

    def ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One op."""
        inputs: dict[int, int] = {}
        for tensor in _tensors((args, kwargs)):
            inputs.update(self._makers(tensor))
        here = self._running[-1] if self._running else None
        if here is not None:
            number, place = here
            if inputs.get(number, place) != place:
                self._fed[number].add(place)
            inputs[number] = place
        if inputs:
            for tensor in _tensors(out):
                self._note(tensor, inputs)

    @property
    def current(self) -> _Counter | None:
        """Of the layer that runs."""
        here = self._running[-1] if self._running else None
        return None if here is None else self._called[here[0]][here[1]]

    @property
    def flops(self) -> dict[int, int]:
        """By the id of the layer."""
        called = (
            (stack.layers[place], counter)
            for stack, by_place in zip(self._stacks, self._called, strict=True)
            for place, counter in by_place.items()
        )
        return {id(layer): counter.flops for layer, counter in called}

    def not_chained(self) -> list[Stack]:
        """Those in which some layer that ran got nothing of another one's."""
        return [
            stack
            for stack, called, fed in zip(self._stacks, self._called, self._fed, strict=True)
            if len({id(layer) for layer in stack.layers}) > 1 and (len(called) < 2 or not set(list(called)[1:]) <= fed)  # noqa: PLR2004 - a chain has two ends
        ]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        place = self._place_of.get(id(module), self._running[-1] if self._running else None)
        if place is not None:
            self._called[place[0]].setdefault(place[1], _Counter())
        self._running.append(place)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()

    def _makers(self, tensor: torch.Tensor) -> dict[int, int]:
        memory = memory_of(tensor)
        return {} if memory is None else self._made_by.get(memory._cdata, (None, {}))[1]

    def _note(self, tensor: torch.Tensor, makers: dict[int, int]) -> None:
        if (memory := memory_of(tensor)) is not None:
            # Weak: nothing is held, and the address is not given to another memory meanwhile.
            self._made_by[memory._cdata] = StorageWeakRef(memory), makers


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in named_tensors(value))
