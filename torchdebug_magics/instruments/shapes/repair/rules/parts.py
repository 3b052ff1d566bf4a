"""What every rule is made of: words for tensors, and the edits that several share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.history import came_from, maker, product
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.shapes.repair.facts import Facts, Operand

__all__ = ["Diagnosis", "gets", "interpolated", "named", "producer_edits", "reordered", "short_dtype", "shown", "turned"]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What one rule says of a failure."""

    sentence: str
    edits: tuple[Edit, ...] = ()
    culprit: Operand | None = None
    """The operand whose history is told."""
    fit: tuple[int, int] | None = None
    """(what came, what was wanted) of a size that grows with the input's."""


def shown(operand: Operand) -> str:
    """``x (2 x 3)`` with the name in code."""
    return f"`{operand.name}` of {shape(operand.sizes)}" if operand.name else shape(operand.sizes)


def named(operand: Operand, otherwise: str = "its input") -> str:
    """The name in code, or a word for it."""
    return f"`{operand.name}`" if operand.name else otherwise


def short_dtype(operand: Operand) -> str:
    """``float32``."""
    return str(operand.tensor.dtype).removeprefix("torch.")


def gets(operand: Operand, size: int) -> str:
    """``576 = 16 x 6 x 6 from `conv2` ``."""
    parts = product(operand.made, size)
    source = came_from(operand.made)
    return f"{size}{f' = {parts}' if parts else ''}{f' {source}' if source else ''}"


def turned(facts: Facts, at: int, order: tuple[int, ...], *, rank: int = 5, why: str = "") -> list[Edit]:
    """The operand with its dimensions in another order."""
    moved = [dim for dim, old in enumerate(order) if dim != old]
    if len(moved) == 2:
        a, b = moved
        many = len(order)
        pair = (a - many, b - many) if b == many - 1 and a == many - 2 and many > 2 else (a, b)
        return on_operand(facts, at, method("transpose", *pair), rank=rank, why=why)
    return on_operand(facts, at, method("permute", *order), rank=rank, why=why)


def reordered(facts: Facts, at: int, dim: int, size: int, *, rank: int = 5) -> list[Edit]:
    """Each dimension but the first that has the wanted size, moved to where it is wanted."""
    operand = facts.operands[at]
    many = len(operand.sizes)
    dim %= many
    edits: list[Edit] = []
    for now in _places(operand.sizes, size):
        if now == dim:
            continue
        rest = [one for one in range(many) if one != now]
        rest.insert(dim, now)
        why = f"{shape(operand.sizes)} becomes {shape([operand.sizes[one] for one in rest])}"
        edits += turned(facts, at, tuple(rest), rank=rank + (8 if now == 0 else 0), why=why)
    return edits


def _places(sizes: tuple[int, ...], size: int) -> Iterator[int]:
    return (dim for dim, one in reversed(list(enumerate(sizes))) if one == size)


_OUT = {
    nn.Linear: "out_features",
    nn.Bilinear: "out_features",
    nn.modules.conv._ConvNd: "out_channels",
    nn.Embedding: "embedding_dim",
    nn.EmbeddingBag: "embedding_dim",
    nn.RNNBase: "hidden_size",
    nn.RNNCellBase: "hidden_size",
}


def producer_edits(facts: Facts, operand: Operand, size: int, wanted: int, *, rank: int = 40) -> list[Edit]:
    """The module that decided this size, made to give the wanted one."""
    step = maker(operand.made)
    if step is None or step.module not in facts.modules or step.number == 0:
        return []
    module = facts.modules[step.module]
    name = next((name for kind, name in _OUT.items() if isinstance(module, kind)), None)
    if name is None or getattr(module, name, None) != size:
        return []
    return rebuilt_module(module, step.module, rank=rank, why=f"gives {wanted} instead of {size}", **{name: wanted})


def interpolated(other: str, sizes: tuple[int, ...]) -> Change:
    """As high and wide as another tensor, whose name is `other`."""
    return Change(
        lambda x: f"F.interpolate({x}, size={f'{other}.shape[2:]' if other else sizes[2:]})",
        lambda tensor: functional.interpolate(tensor, size=sizes[2:]),
    )


def orders(many: int) -> Iterator[tuple[int, ...]]:
    """All orders of so many dimensions, those that move the fewest first."""
    everything = itertools.permutations(range(many))
    return iter(sorted(everything, key=lambda order: sum(at != dim for at, dim in enumerate(order))))
