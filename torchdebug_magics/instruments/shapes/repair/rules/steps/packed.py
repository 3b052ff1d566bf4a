"""Packed sequences, which end where the longest one does when they are unpacked."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.repair.edit import Edit, OpEdit
from torchdebug_magics.instruments.shapes.repair.size_history import steps
from torchdebug_magics.instruments.shapes.repair.source import site_at

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["unpacked_to"]

_UNPACKS = "_pad_packed_sequence"


def unpacked_to(facts: Facts, one: Operand, other: Operand) -> list[Edit]:
    """The user's call that unpacks them, with as many steps as what they meet has."""
    step = next((step for step in steps(one.made) if step.op == _UNPACKS), None)
    if step is None or step.line is None or step.shape[:2] != one.sizes[:2] or len(other.sizes) < 2:
        return []
    wrong = [dim for dim in (0, 1) if one.sizes[dim] < other.sizes[dim]]
    site = site_at(*step.line)
    call = site.expression
    if len(wrong) != 1 or not isinstance(call, ast.Call) or any(one.arg == "total_length" for one in call.keywords):
        return []
    many = other.sizes[wrong[0]]
    name, dim = next(((name, at) for name, one in facts.inputs for at, size in enumerate(one.shape) if at and size == many), ("", 0))
    told = f"{name}.size({dim})" if name.isidentifier() else str(many)
    new = ast.Call(call.func, call.args, [*call.keywords, ast.keyword("total_length", ast.parse(told, mode="eval").body)])
    run = OpEdit(site, _UNPACKS, lambda func, args, _: func(*args[:-1], many))
    return [Edit(ast.unparse(new), "as long as before they were packed", 4, ops=(run,))]
