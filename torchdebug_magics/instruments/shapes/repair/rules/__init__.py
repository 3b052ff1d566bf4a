"""What may be wrong, one rule a family of ops; the first that recognises a failure speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.repair.rules import (
    added,
    attention,
    broadcasting,
    convolution,
    dimensions,
    einsums,
    features,
    geometry,
    indexing,
    inputs,
    joins,
    kinds,
    libraries,
    losses,
    norms,
    products,
    python,
    recurrent,
    results,
    scaled_attention,
    sound,
    subscripts,
    tables,
    views,
    written,
)
from torchdebug_magics.instruments.shapes.repair.rules.parts import Diagnosis, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.shapes.repair.facts import Facts

__all__ = ["Diagnosis", "diagnosis"]

_RULES: tuple[Callable[[Facts], Diagnosis | None], ...] = (
    python.scripted,
    kinds.device,
    tables.embedding,
    losses.loss,
    results.tuples,
    results.unpacked,
    recurrent.recurrent,
    attention.attention,
    scaled_attention.scaled,
    features.bilinear,
    features.distances,
    sound.spectrum,
    sound.ctc,
    features.linear,
    convolution.convolution,
    convolution.pooling,
    geometry.negative,
    geometry.shuffle,
    geometry.grid,
    norms.norm,
    kinds.dtype,
    written.written,
    added.added,
    einsums.einsum,
    products.matmul,
    joins.join,
    views.view,
    dimensions.expand,
    subscripts.subscript,
    indexing.index,
    dimensions.dimension,
    broadcasting.broadcast,
    python.unpacking,
    python.arguments,
    libraries.picture,
    libraries.absent,
)


def diagnosis(facts: Facts) -> Diagnosis:
    """What is wrong; the error's own words where no rule knows."""
    for rule in _RULES:
        # A rule that stumbles over operands that it did not think of must not cost the user the report; it is one line of it.
        found = facts.guard.run(f"the rule {rule.__module__.rpartition('.')[2]}.{rule.__name__}", rule, facts)
        if found is not None:
            return inputs.beside(facts, found)
    return Diagnosis(_own_words(facts))


def _own_words(facts: Facts) -> str:
    if facts.op is not None:
        given = ", ".join(shown(one) for one in facts.operands[:4]) if not any(sign.isdigit() for sign in facts.text) else ""
        said = f"{facts.text}{f' (it gets {given})' if given else ''}"
        return f"{facts.who}: {said}" if facts.path else f"`{facts.op.strip('_')}`: {said}"
    return f"{facts.who}: {facts.text}" if facts.path else facts.text
