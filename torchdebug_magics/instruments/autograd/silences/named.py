"""What the user calls parameters, models and optimizers, and where they are made."""

from __future__ import annotations

import ast
import linecache
import sys
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.call_sites import tree_of
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchdebug_magics.report import Location

__all__ = ["assigned_at", "cell_files", "is_written_by_user", "made_at", "variable_of"]


def variable_of(value: object) -> str | None:
    """The variable that holds the very object, in the user's running frames or the notebook; no ``self``."""
    names = (one.name.partition(" in ")[0] for one in user_names(sys._getframe(1)) if one.value is value)
    return next((name for name in names if name != "self"), None)


def assigned_at(name: str | None, files: Iterable[str]) -> Location | None:
    """The last assignment to a variable in these files, the first of them first."""
    if name is None:
        return None
    for file in dict.fromkeys((*files, *reversed(cell_files()))):
        tree = tree_of(file)
        lines = [
            node.lineno
            for node in (ast.walk(tree) if tree is not None else ())
            if isinstance(node, ast.Assign) and any(_is_called(one, name) for one in node.targets)
        ]
        if lines:
            return location(file, max(lines), "<module>")
    return None


def made_at(optimizers: Sequence[torch.optim.Optimizer], name: str, files: Sequence[str]) -> Location | None:
    """The line that makes an optimizer: the only one that calls its class, or the last assignment to its name."""
    kinds = {type(one).__name__ for one in optimizers}
    calls = [
        (file, node.lineno)
        for file in dict.fromkeys(files)
        for node in ast.walk(tree_of(file) or ast.Module([], []))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in kinds
    ]
    return location(*calls[0], "<module>") if len(calls) == 1 else assigned_at(name, files)


def _is_called(target: ast.expr, name: str) -> bool:
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return any(ast.unparse(one).rpartition(".")[2] == name for one in parts)


def cell_files() -> list[str]:
    """The names under which IPython has compiled cells, the oldest first."""
    return [one for one in linecache.cache if "ipykernel" in one or one.startswith("<ipython")]


def is_written_by_user(module: torch.nn.Module) -> bool:
    """Whether its class is the user's own, or only holds others (`Sequential`)."""
    code = getattr(type(module).forward, "__code__", None)
    return isinstance(module, torch.nn.Sequential) or (code is not None and is_user_code(code))
