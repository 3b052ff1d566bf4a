"""What the user calls parameters, models and optimizers, and where they are made."""

from __future__ import annotations

import ast
import linecache
import sys
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.autograd.errors.raised import named_members
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.call_sites import tree_of
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdebug_magics.report import Location

__all__ = ["assigned_at", "cell_files", "is_written_by_user", "names_of_tensors", "variable_of"]


def names_of_tensors(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Names as in `named_parameters()`, else the variables'."""
    wanted = {id(one): one for one in tensors}
    found = {id(held): name for name, held in reversed(list(named_members())) if id(held) in wanted}
    for name, value in ((one.name, one.value) for one in user_names(sys._getframe())):
        if id(value) in wanted:
            found.setdefault(id(value), name)
    return tuple(found[key] for key in wanted if key in found)


def variable_of(value: object) -> str | None:
    """The variable that holds the very object, in the user's running frames or the notebook; no ``self``."""
    names = (one.name.partition(" in ")[0] for one in user_names(sys._getframe()) if one.value is value)
    return next((name for name in names if name != "self"), None)


def assigned_at(name: str | None, files: Iterable[str], *, call: str = "") -> Location | None:
    """The last assignment to a variable in these files, the first of them first."""
    if name is None:
        return None
    for file in dict.fromkeys((*files, *reversed(cell_files()))):
        tree = tree_of(file)
        lines = [
            node.lineno
            for node in (ast.walk(tree) if tree is not None else ())
            if isinstance(node, ast.Assign) and any(ast.unparse(one) == name for one in node.targets) and call in ast.unparse(node.value)
        ]
        if lines:
            return location(file, max(lines), "<module>")
    return None


def cell_files() -> list[str]:
    """The names under which IPython has compiled cells, the oldest first."""
    return [one for one in linecache.cache if "ipykernel" in one or one.startswith("<ipython")]


def is_written_by_user(module: torch.nn.Module) -> bool:
    """Whether its class is the user's own, or only holds others (`Sequential`)."""
    code = getattr(type(module).forward, "__code__", None)
    return isinstance(module, torch.nn.Sequential) or (code is not None and is_user_code(code))
