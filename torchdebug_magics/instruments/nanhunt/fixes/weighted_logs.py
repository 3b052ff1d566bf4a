"""``p * log(q)`` is NaN where both are 0, and ``xlogy(p, q)`` is 0 there, as the formula means it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.nanhunt.fixes.call_operands import argument_of_call

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
    from torchdebug_magics.instruments.nanhunt.fixes.source_edits import Expression

__all__ = ["as_xlogy"]


def as_xlogy(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """The user's text with the product of a number and a logarithm as the one function."""
    argument = argument_of_call(expression, "log")
    if evidence.plain_name != "log" or argument is None:
        return
    for node in ast.walk(ast.parse(expression.text)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        sides = [one for one in (node.left, node.right) if ast.dump(one, include_attributes=True) != _dumped(expression)]
        if len(sides) == 1:
            yield expression.with_node(node, f"torch.xlogy({expression.code(sides[0])}, {expression.code(argument)})")


def _dumped(expression: Expression) -> str:
    return ast.dump(expression.node, include_attributes=True)
