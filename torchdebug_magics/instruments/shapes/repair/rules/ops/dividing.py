"""Sizes that do not divide, such as a width by its heads."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.shapes.cell_error.side_effects import number_named
from torchdebug_magics.instruments.shapes.repair.edit import Edit, as_typed

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts

__all__ = ["leaves_rest", "other_heads"]


def other_heads(facts: Facts, size: int, into: tuple[int, ...]) -> list[Edit]:
    """Both numbers belong to a module of the user's: so many heads that they divide the size, the nearest first."""
    call = facts.written_call
    if facts.site is None or call is None:
        return []
    path = next((path for path, one in facts.modules.items() if one is facts.site.names.get("self")), "")
    own: dict[str, Any] = vars(facts.modules[path]) if path in facts.modules else {}
    nodes = [node for one in call.args for node in (one.elts if isinstance(one, (ast.Tuple, ast.List)) else [one])]
    named = [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr in own]
    numbers = [own[name] for name in named]
    if len(set(named)) != 2 or len(named) != 2 or not all(type(one) is int and one in into for one in numbers):
        return []
    heads, others = numbers[0], math.prod(into) // math.prod(numbers)  # such as the three of query, key and value
    if size % others:
        return []
    size //= others
    fits = sorted((many for many in range(2, size) if not size % many), key=lambda many: (abs(many - heads), -many))
    edits = []
    for rank, many in enumerate(fits[:2]):
        new = dict(zip(named, (many, size // many), strict=True))
        code = "\n".join(f"{as_typed(path)}.{name} = {number}" for name, number in new.items())
        edits.append(Edit(code, f"{many} divides {size}, and {heads} does not", 10 + rank, attributes={path: new}))
    return edits


def leaves_rest(facts: Facts) -> str:
    """``c // self.heads`` among the sizes, which leaves a rest."""
    call = facts.written_call
    if facts.site is None or call is None:
        return ""
    for part in (part for one in call.args for part in ast.walk(one)):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.FloorDiv):
            size, by = (number_named(one, facts.site.names) for one in (part.left, part.right))
            if size is not None and by and size < by:
                return f"`{ast.unparse(part)}` is {size} // {by}, which is 0"
            if size is not None and by and size % by:
                fits = [max(one for one in range(1, by) if not size % one), min(one for one in range(by, size + 1) if not size % one)]
                return f"`{ast.unparse(part)}` is {size} // {by}, with a remainder of {size % by}; {fits[0]} and {fits[1]} divide {size}"
    return ""
