"""Tables that a model holds, such as masks and positions, made for fewer steps or for other widths than what meets them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Repair, as_typed
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import called_with, made_like, quietly, typed
from torchdebug_magics.instruments.shapes.repair.size_history import of_inputs, steps


def fitted(facts: FailureFacts, table: Operand, got: int, wanted: int, *, rank: int) -> list[Repair]:
    """The module that holds the table, made with the number that makes it as long, or as wide, as is wanted."""
    if of_inputs(table.made) or not got or not wanted or isinstance(table.tensor, torch.nn.Parameter):
        return []
    return [edit for path in _holders(table) for edit in _remade(facts, path, got, wanted, rank=rank)]


def _holders(table: Operand) -> Iterator[str]:
    """The paths of the modules whose table it may be."""
    yield from [table.name.rpartition(".")[0]] if table.owned else dict.fromkeys(step.module for step in steps(table.made))


def _remade(facts: FailureFacts, path: str, got: int, wanted: int, *, rank: int) -> list[Repair]:
    """A module with another number, so that what is `got` large is as large as `wanted`; its parameters stay as large as they are."""
    module = facts.modules.get(path)
    numbers = called_with(module) if module is not None and _sizes(module.buffers()) else None
    if module is None or numbers is None:
        return []
    kind, edits = type(module), []
    # The same number in all of its kind, such as in each block, is one mistake.
    parts = facts.modules.get("", module).named_modules()
    alike = [name for name, part in parts if type(part) is kind and _sizes(part.buffers()) == _sizes(module.buffers())]
    for name, value in numbers.items():
        new, rest = divmod(value * wanted, got) if type(value) is int else (0, 1)
        changed = {**numbers, name: new}
        make = functools.partial(made_like, kind, changed)
        made = quietly(functools.partial(make, module)) if not rest and new not in {0, value} else None
        if made is not None and _sizes(made.parameters()) == _sizes(module.parameters()):
            code = "\n".join(f"{as_typed(place)} = {typed(kind, changed)}" for place in alike)
            why = f"{name} of {new} instead of {value}"
            edits.append(Repair(code, why, rank + 2 * (value != got), modules=dict.fromkeys(alike, make)))
    return edits


def _sizes(tensors: Iterable[torch.Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]
