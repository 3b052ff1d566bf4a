"""Edits of the user's calls: of the failing op written otherwise, of a module around the failing one, of what goes in and comes out."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, Change, Edit, OpEdit, at_tensor
from torchdebug_magics.instruments.shapes.repair.size_history import steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["in_outer_call", "rewritten", "wrapped"]


def rewritten(
    facts: Facts, write: Callable[[ast.Call], ast.expr | str], run: Callable[[Any, Any, Any], Any], *, rank: int, why: str = ""
) -> list[Edit]:
    """The user's own call of the failing op, written otherwise; none where the op is not called there, or nothing is written."""
    call = facts.written_call
    new = write(call) if call is not None else ""
    code = new if isinstance(new, str) else ast.unparse(new)
    if facts.site is None or facts.op is None or not code:
        return []
    return [Edit(code, why, rank, ops=(OpEdit(facts.site, facts.op, run),))]


def in_outer_call(facts: Facts, operand: Operand, change: Change, *, rank: int = 10, why: str = "") -> list[Edit]:
    """The same tensor, changed in the user's call of a module around the failing one."""
    key = next((key for key, one in facts.outer if one.tensor is operand.tensor or _is_made_of(operand, one)), None)
    site = facts.site
    call = site.expression if site is not None else None
    if key is None or site is None or not isinstance(call, ast.Call) or any(isinstance(one, ast.Starred) for one in call.args):
        return []
    node = call.args[key] if isinstance(key, int) else next((one.value for one in call.keywords if one.arg == key), None)

    def changed(args: Any, kwargs: Any) -> tuple[Any, Any]:
        if isinstance(key, int):
            return (*args[:key], change.apply(args[key]), *args[key + 1 :]), kwargs
        return args, {**kwargs, key: change.apply(kwargs[key])}

    return [] if node is None else [Edit(site.changed(node, change.text), why, rank, calls=(CallEdit(facts.outer_path, site, changed),))]


def _is_made_of(operand: Operand, one: Operand) -> bool:
    return one.made is not None and any(step is one.made and step.shape == operand.sizes for step in steps(operand.made))


def wrapped(facts: Facts, change: Change, back: Change, *, rank: int = 10, why: str = "") -> list[Edit]:
    """The user's call of the failing module with its first tensor changed, and its output changed back."""
    site = facts.site
    if site is None or facts.path is None or not facts.direct or not facts.calls_module or not facts.given:
        return []
    node = site.operand_node(0, facts.given[0].tensor, direct=True)
    if node is None:
        return []
    call = CallEdit(facts.path, site, lambda args, kwargs: at_tensor(0, change.apply, args, kwargs), back.apply)
    return [Edit(back.text(site.changed(node, change.text)), why, rank, calls=(call,))]
