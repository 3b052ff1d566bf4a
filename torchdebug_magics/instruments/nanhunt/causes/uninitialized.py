"""Parameters that were made of memory as it was, and never filled: read from the source of the class that makes them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torchdebug_magics.probing.source.statement_lists import parse
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from torchdebug_magics.report import Location

__all__ = ["made_uninitialized"]

_UNFILLED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "Tensor", "FloatTensor", "HalfTensor", "DoubleTensor"})


def made_uninitialized(tensor: torch.Tensor, roots: Iterable[torch.nn.Module]) -> Location | None:
    """The line that made it, where that line fills nothing in and no other line of its class does."""
    for root in roots:
        for module in root.modules():
            name = next((name for name, one in module._parameters.items() if one is tensor), None)
            init = getattr(type(module).__init__, "__code__", None)
            if name is not None and init is not None and is_user_code(init):
                tree = parse(init.co_filename)
                return None if tree is None else _line(tree, name, init.co_filename, init.co_firstlineno)
    return None


def _line(tree: ast.Module, name: str, file: str, first: int) -> Location | None:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.lineno == first]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and functions and functions[0] in node.body]
    if not classes:
        return None
    makers = [node for node in ast.walk(functions[0]) if isinstance(node, (ast.Assign, ast.AnnAssign)) and _binds(node, name)]
    mentions = [node for node in ast.walk(classes[0]) if isinstance(node, ast.Call) and _fills(node, name)]
    if len(makers) != 1 or mentions or not any(_is_unfilled(node) for node in ast.walk(makers[0])):
        return None
    return location(file, makers[0].lineno, "__init__")


def _binds(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(one, ast.Attribute) and one.attr == name for one in targets)


def _is_unfilled(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    return called in _UNFILLED and not any(isinstance(one, (ast.List, ast.Tuple)) for one in node.args[:1] if called.endswith("Tensor"))


def _fills(node: ast.Call, name: str) -> bool:
    """``nn.init.normal_(self.w)``, ``self.w.data.fill_(0)``, and ``self.parameters()``, which may be for anything."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if called in {"parameters", "named_parameters", "apply"}:
        return True
    writes = called.endswith("_") and not called.endswith("__")
    return writes and any(isinstance(one, ast.Attribute) and one.attr == name for one in ast.walk(node))
