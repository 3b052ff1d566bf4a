"""Ops in place: into parameters that need a gradient, rows that share their memory, and what would have to grow."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, on_operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, named, told

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts

__all__ = ["written"]


def written(facts: Facts) -> Diagnosis | None:
    """What is written to, and why that cannot be."""
    if facts.op is None or not facts.operands:
        return None
    x = facts.operands[0]
    text = facts.written
    if "leaf Variable" in facts.text:
        where = f"the parameter {named(x, 'of the model')}" if x.owned else named(x, "a tensor")
        rest = "run it under `with torch.no_grad():`, or compute a new tensor"
        return Diagnosis(f"{text} writes in place into {where}, which requires a gradient: {rest}", (), x)
    if "single memory location" in facts.text:
        sentence = f"{text} writes into {told(x)}, an expanded tensor whose rows share memory: call `.clone()` first"
        return Diagnosis(sentence, tuple(_cloned(facts)), x)
    if "doesn't match the broadcast shape" in facts.text and len(facts.operands) > 1:
        return Diagnosis(f"{text} cannot broadcast {told(x)} to {shape(facts.operands[1].sizes)} in place", (), x)
    return None


def _cloned(facts: Facts) -> list[Edit]:
    """In ``m += x`` the name then stands for the copy."""
    if facts.site is None or not isinstance(facts.site.expression, ast.AugAssign):
        return []
    return on_operand(facts, 0, Change("{}.clone()".format, lambda one: one.clone()), rank=2, why="separate rows")
