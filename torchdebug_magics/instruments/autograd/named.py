"""What the user calls parameters, models and optimizers, and where they are made."""

from __future__ import annotations

import ast
import gc
import linecache
from collections.abc import Iterable, Iterator

import torch

from torchdebug_magics.instruments.autograd.errors.raised import statement_at
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.code_owner import is_user_code
from torchdebug_magics.probing.syntax import tree_of
from torchdebug_magics.probing.where import location
from torchdebug_magics.report import Location


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


def made_at(optimizer: torch.optim.Optimizer, name: str, files: Iterable[str]) -> Location | None:
    """The line that makes an optimizer, in the code that ran or else in earlier cells: the last for its name, or the only one."""
    kind, called = type(optimizer).__name__, name.rpartition(".")[2]
    names = {called, *_held_as(optimizer)}
    of_run = list(dict.fromkeys(files))
    for searched in of_run, list(reversed(cell_files())):
        makers = [(file, line, statement) for file in searched for line, statement in _calls_of(kind, file)]
        of_name = [one for one in makers if any(_is_called(target, *names) for target in getattr(one[2], "targets", ()))]
        if len(makers) == 1 or of_name:
            file, line, _ = max((one for one in of_name if one[0] == of_name[0][0]), key=lambda one: one[1]) if of_name else makers[0]
            return location(file, line, "<module>")
    return assigned_at(called, of_run)


def _calls_of(kind: str, file: str) -> Iterator[tuple[int, ast.stmt]]:
    """(line, statement) of the calls of a class in a file."""
    for statement in ast.walk(tree_of(file) or ast.Module([], [])):
        if isinstance(statement, ast.stmt) and not hasattr(statement, "body"):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == kind:
                    yield node.lineno, statement


def stepped_name(where: Location | None) -> str | None:
    """What the line that calls ``step()`` calls the optimizer: ``self.opt`` of ``self.opt.step()`` and of ``scaler.step(self.opt)``."""
    for node in ast.walk(statement_at(where) or ast.Pass()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            called = node.args[0] if node.args and "scaler" in ast.unparse(node.func.value).lower() else node.func.value
            return ast.unparse(called) if isinstance(called, (ast.Name, ast.Attribute)) else None
    return None


def attribute_line(owner: torch.nn.Module, attribute: str) -> Location | None:
    """The line in the ``__init__`` of its class that assigns ``self.attribute``."""
    code = getattr(type(owner).__init__, "__code__", None)
    node = function_node(code) if code is not None and is_user_code(code) else None
    lines = [
        one.lineno
        for one in (ast.walk(node) if node is not None else ())
        if isinstance(one, ast.Assign) and any(ast.unparse(target) == f"self.{attribute}" for target in one.targets)
    ]
    return location(code.co_filename, lines[0], code.co_name) if lines and code is not None else None


def _held_as(value: object) -> set[str]:
    """The variables and attributes that hold an object."""
    spaces = (one if isinstance(one, dict) else getattr(one, "__dict__", None) for one in gc.get_referrers(value))
    return {
        key for space in spaces if isinstance(space, dict) for key, held in list(space.items()) if held is value and isinstance(key, str)
    }


def _is_called(target: ast.expr, *names: str) -> bool:
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return any(ast.unparse(one).rpartition(".")[2] in names for one in parts)


def cell_files() -> list[str]:
    """The names under which IPython has compiled cells, the oldest first."""
    return [one for one in linecache.cache if "ipykernel" in one or one.startswith("<ipython")]


def is_written_by_user(module: torch.nn.Module) -> bool:
    """Whether its class is the user's own, or only holds others (`Sequential`)."""
    code = getattr(type(module).forward, "__code__", None)
    return isinstance(module, torch.nn.Sequential) or (code is not None and is_user_code(code))
