"""Stacks of repeated layers: where they are, and which of their layers stand for all."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchdebug_magics.instruments.shrink.layer_settings import per_layer_kinds, settings_of
from torchdebug_magics.probing.dry_runs.leaves import is_lazy

__all__ = ["Stack", "stacks_in"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class Stack:
    """A container of layers that follow each other."""

    path: str
    container: nn.Module
    owners: tuple[nn.Module, ...]
    """The modules that it is in, the outermost first."""
    layers: tuple[nn.Module, ...]
    kinds: tuple[object, ...]
    """What is equal for layers that can stand for each other."""

    @property
    def is_of_blocks(self) -> bool:
        """Whether its layers are more than one plain layer of torch's."""
        return all(map(_is_block, self.layers))

    @property
    def firsts(self) -> list[int]:
        """The first layer of each kind."""
        return sorted({kind: place for place, kind in reversed(list(enumerate(self.kinds)))}.values())

    def choices(self, amount: int) -> list[tuple[int, ...]]:
        """Which layers to keep, the fewest first: one of each kind; or all up to the last new kind, where numbers matter to the model."""
        firsts = self.firsts
        others = [place for place in range(len(self.layers)) if place not in firsts]
        chosen = tuple(sorted(firsts + others[: max(0, amount - len(firsts))]))
        prefix = tuple(range(max(amount, firsts[-1] + 1)))
        return [one for one in dict.fromkeys((chosen, prefix)) if len(one) < len(self.layers)]


def stacks_in(model: nn.Module, amount: int | None, not_stacks: AbstractSet[int]) -> list[Stack]:
    """The outermost containers with layers to spare, or all where `amount` is None; what has one of these ids is none.

    Plain layers, as in a projection of equal ones, count only where there are no blocks.
    """
    of_blocks = any(stack.is_of_blocks for stack in _outermost("", model, (), None, not_stacks))
    found = [stack for stack in _outermost("", model, (), amount, not_stacks) if stack.is_of_blocks == of_blocks]
    groups: dict[tuple[int, int], list[Stack]] = defaultdict(list)
    for stack in found:
        groups[id(stack.owners[-1]) if stack.owners else 0, len(stack.layers)].append(stack)
    for group in groups.values():  # lists of one module that are gone through side by side are cut alike
        together = tuple(zip(*(stack.kinds for stack in group), strict=True))
        for stack in group:
            stack.kinds = together
    return found


def _outermost(
    path: str, module: nn.Module, owners: tuple[nn.Module, ...], amount: int | None, not_stacks: AbstractSet[int]
) -> Iterator[Stack]:
    if isinstance(module, torch.jit.ScriptModule):
        return
    stack = _stack(path, module, owners) if id(module) not in not_stacks else None
    if stack is not None and (amount is None or stack.choices(amount)):
        yield stack
        return
    seen: set[int] = set()
    for name, child in module.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            yield from _outermost(f"{path}.{name}".lstrip("."), child, (*owners, module), amount, not_stacks)


def _stack(path: str, module: nn.Module, owners: tuple[nn.Module, ...]) -> Stack | None:
    layers = tuple(child for child in module._modules.values() if child is not None)
    if not isinstance(module, _CONTAINERS) or len(layers) < 2 or len(layers) < len(module._modules):  # noqa: PLR2004 - one repeats nothing
        return None
    if any(next(layer.parameters(), None) is None for layer in layers):
        return None
    if len({type(layer) for layer in layers}) > 1 and not all(map(_is_block, layers)):
        return None
    types = per_layer_kinds(settings_of(owners), len(layers), path)
    kinds = tuple((types[place], _signature(layer)) for place, layer in enumerate(layers))
    return Stack(path, module, owners, layers, kinds)


def _is_block(layer: nn.Module) -> bool:
    """Whether it is more than one plain layer of torch's."""
    return bool(layer._modules) or not type(layer).__module__.startswith("torch.nn")


def _signature(layer: nn.Module) -> object:
    """What its parts are, the shapes of their parameters, and the words and switches that they are set to."""
    return tuple((path, type(part), _shapes(part), _switches(part)) for path, part in layer.named_modules())


def _shapes(part: nn.Module) -> tuple[Any, ...]:
    tensors = {**part._parameters, **part._buffers}
    return tuple((name, None if one is None or is_lazy(one) else (one.shape, one.dtype)) for name, one in tensors.items())


def _switches(part: nn.Module) -> tuple[Any, ...]:
    """Without numbers in words: a layer may know its own name."""
    own = ((name, value) for name, value in vars(part).items() if name != "training")
    return tuple((name, re.sub(r"\d+", "", value) if type(value) is str else value) for name, value in own if type(value) in {str, bool})
