"""What may be wrong, one rule a family of ops; the first that recognises a failure speaks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.repair.rules import (
    attention,
    broadcasting,
    convolution,
    features,
    indexing,
    inputs,
    joins,
    kinds,
    losses,
    norms,
    products,
    python,
    recurrent,
    tables,
    views,
)
from torchdebug_magics.instruments.shapes.repair.rules.parts import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.shapes.repair.facts import Facts

__all__ = ["Diagnosis", "diagnosis"]

_RULES: tuple[Callable[[Facts], Diagnosis | None], ...] = (
    kinds.device,
    tables.embedding,
    losses.loss,
    python.tuples,
    recurrent.recurrent,
    attention.attention,
    attention.scaled,
    features.bilinear,
    features.linear,
    convolution.convolution,
    convolution.pooling,
    norms.norm,
    kinds.dtype,
    products.einsum,
    products.matmul,
    joins.join,
    views.view,
    views.expand,
    indexing.index,
    views.dimension,
    broadcasting.broadcast,
    python.unpacking,
    python.arguments,
)


def diagnosis(facts: Facts) -> Diagnosis:
    """What is wrong; the error's own words where no rule knows."""
    for rule in _RULES:
        # A rule that stumbles over operands that it did not think of must not cost the user the report.
        with contextlib.suppress(Exception):
            if (found := rule(facts)) is not None:
                return inputs.beside(facts, found)
    return Diagnosis(_own_words(facts))


def _own_words(facts: Facts) -> str:
    if facts.op is not None:
        return f"{facts.who}: {facts.text}" if facts.path else f"`{facts.op.strip('_')}`: {facts.text}"
    return f"{facts.who}: {facts.text}" if facts.path else facts.text
