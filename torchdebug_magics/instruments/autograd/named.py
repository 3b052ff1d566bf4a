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
from torchdebug_magics.probing.syntax import called, dotted, last_name, nodes, targets_of, tree_of
from torchdebug_magics.probing.where import location
from torchdebug_magics.report import Location


def assigned_at(name: str | None, files: Iterable[str]) -> Location | None:
    """The last assignment to a variable in these files, the first of them first."""
    if name is None:
        return None
    for file in dict.fromkeys((*files, *reversed(cell_files()))):
        lines = [node.lineno for node in nodes(ast.Assign, tree_of(file)) if name in map(last_name, targets_of(node))]
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
        of_name = [one for one in makers if any(last_name(target) in names for target in targets_of(one[2]))]
        if len(makers) == 1 or of_name:
            file, line, _ = max((one for one in of_name if one[0] == of_name[0][0]), key=lambda one: one[1]) if of_name else makers[0]
            return location(file, line, "<module>")
    return assigned_at(called, of_run)


def _calls_of(kind: str, file: str) -> Iterator[tuple[int, ast.stmt]]:
    """(line, statement) of the calls of a class in a file."""
    simple = (one for one in nodes(ast.stmt, tree_of(file)) if not hasattr(one, "body"))
    return ((node.lineno, statement) for statement in simple for node in nodes(ast.Call, statement) if called(node) == kind)


def stepped_name(where: Location | None) -> str | None:
    """What the line that calls ``step()`` calls the optimizer: ``self.opt`` of ``self.opt.step()`` and of ``scaler.step(self.opt)``."""
    for node in nodes(ast.Call, statement_at(where)):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            optimizer = node.args[0] if node.args and "scaler" in ast.unparse(node.func.value).lower() else node.func.value
            return ast.unparse(optimizer) if isinstance(optimizer, (ast.Name, ast.Attribute)) else None
    return None


def attribute_line(owner: torch.nn.Module, attribute: str) -> Location | None:
    """The line in the ``__init__`` of its class that assigns ``self.attribute``."""
    code = getattr(type(owner).__init__, "__code__", None)
    node = function_node(code) if code is not None and is_user_code(code) else None
    wanted = f"self.{attribute}"
    lines = [one.lineno for one in nodes(ast.Assign, node) if any(dotted(target) == wanted for target in one.targets)]
    return location(code.co_filename, lines[0], code.co_name) if lines and code is not None else None


def _held_as(value: object) -> set[str]:
    """The variables and attributes that hold an object."""
    spaces = (one if isinstance(one, dict) else getattr(one, "__dict__", None) for one in gc.get_referrers(value))
    return {
        key for space in spaces if isinstance(space, dict) for key, held in list(space.items()) if held is value and isinstance(key, str)
    }


def cell_files() -> list[str]:
    """The names under which IPython has compiled cells, the oldest first."""
    return [one for one in linecache.cache if "ipykernel" in one or one.startswith("<ipython")]


def is_written_by_user(module: torch.nn.Module) -> bool:
    """Whether its class is the user's own, or only holds others (`Sequential`)."""
    code = getattr(type(module).forward, "__code__", None)
    return isinstance(module, torch.nn.Sequential) or (code is not None and is_user_code(code))
