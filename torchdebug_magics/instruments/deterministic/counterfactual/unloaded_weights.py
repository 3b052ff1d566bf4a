"""Weights that stay as they were drawn although the cell loads some: a seed would only hide that."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchdebug_magics.instruments.deterministic.report import Dependence
    from torchdebug_magics.instruments.deterministic.twice.body import Body

__all__ = ["unloaded"]

_MOST_NAMED = 3


def unloaded(found: Dependence, differing: Mapping[str, type], body: Body) -> Dependence | None:
    """The line that was to load them; `differing` is what another seed changes, by name, with the type of the variable it is in.

    None where the cell loads nothing into a model whose weights differ.
    """
    for call, is_dropped in _calls(body):
        if not isinstance(call.func, ast.Attribute):
            continue
        model, method = ast.unparse(call.func.value), call.func.attr
        left = [name for name in differing if name.startswith(f"{model}.")]
        if not left:
            continue
        names = ", ".join(f"`{name}`" for name in left[:_MOST_NAMED]) + (f" and {len(left) - _MOST_NAMED} more" * (len(left) > _MOST_NAMED))
        what = f"{names} still hold their random initial weights, although this line loads weights"
        at = location(body.file, call.lineno, "<module>")
        if is_dropped and isinstance(inspect.getattr_static(differing[left[0]], method, None), classmethod):
            why = f"{what}: `{method}` returns a new model, which is discarded"
            return replace(found, op="", location=at, what=why, fix=f"assign the result: `{model} = {ast.unparse(call)}`")
        if method == "load_state_dict" and any(one.arg == "strict" and ast.unparse(one.value) == "False" for one in call.keywords):
            fix = "check the `missing_keys` that `load_state_dict` returns, and rename the saved keys; `strict=True` raises for them"
            return replace(found, op="", location=at, what=what, fix=fix)
    return None


def _calls(body: Body) -> Iterator[tuple[ast.Call, bool]]:
    """The calls in the cell's own lines, and whether nothing is done with what they return."""
    nodes = [node for statement in body.statements for node in ast.walk(statement)]
    dropped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return ((node, id(node) in dropped) for node in nodes if isinstance(node, ast.Call))
