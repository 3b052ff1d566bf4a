"""What may be wrong, one rule a family of ops; the first that recognises a failure speaks."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts
from torchdebug_magics.instruments.shapes.repair.rules import (
    broadcasting,
    dtypes_and_devices,
    inputs_and_indices,
    losses,
    python,
    sizes,
    subscripts,
    views,
)
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, shown

__all__ = ["Diagnosis", "diagnosis"]
_RULES: tuple[Callable[[FailureFacts], Diagnosis | None], ...] = (
    dtypes_and_devices.device,
    subscripts.embedding,
    losses.loss,
    python.tuples,
    python.unpacked,
    inputs_and_indices.norm,
    sizes.pair,
    dtypes_and_devices.stored,
    dtypes_and_devices.dtype,
    dtypes_and_devices.written,
    views.view,
    subscripts.subscript,
    subscripts.index,
    broadcasting.broadcast,
    sizes.sized,
    sizes.scalars,
    python.unpacking,
)
_KNOWN: WeakKeyDictionary[FailureFacts, Diagnosis] = WeakKeyDictionary()


def diagnosis(facts: FailureFacts) -> Diagnosis:
    """What is wrong; the error's own words where no rule knows."""
    if facts not in _KNOWN:
        # A rule that stumbles over operands that it did not think of must not cost the user the report; it is one line of it.
        causes = (facts.guard.run(f"the rule {rule.__module__.rpartition('.')[2]}.{rule.__name__}", rule, facts) for rule in _RULES)
        cause = next(filter(None, causes), None)
        _KNOWN[facts] = Diagnosis(_own_words(facts)) if cause is None else inputs_and_indices.beside(facts, cause)
    return _KNOWN[facts]


def _own_words(facts: FailureFacts) -> str:
    if facts.op is not None:
        given = ", ".join(shown(operand) for operand in facts.operands[:4])
        said = f"{facts.text}{f' (it gets {given})' if given else ''}"
        return f"{facts.who}: {said}" if facts.path else f"`{facts.op.strip('_')}`: {said}"
    return f"{facts.who}: {facts.text}" if facts.path else facts.text
