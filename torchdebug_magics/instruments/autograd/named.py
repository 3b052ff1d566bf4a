"""The models that are alive, and where the user's code makes optimizers and modules."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator

import torch

from torchdebug_magics.instruments.autograd.source import assigned_at, cell_files, statement_at, user_function
from torchdebug_magics.probing.modules import live_modules, parts_of, unwrapped
from torchdebug_magics.probing.syntax import called, dotted, last_name, nodes, targets_of, tree_of
from torchdebug_magics.probing.where import location
from torchdebug_magics.report import Location


def root_modules(modules: Iterable[torch.nn.Module] | None = None) -> list[torch.nn.Module]:
    """The modules that are no part of another one, of these or of all that are alive."""
    made = [one for one in (live_modules() if modules is None else modules) if "_modules" in getattr(one, "__dict__", ())]
    inner = parts_of(made)
    return [module for module in made if id(module) not in inner]


def named_members(roots: Iterable[torch.nn.Module] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of these models, or of all that are alive, by their names in `state_dict`."""
    for root in root_modules() if roots is None else roots:
        if unwrapped(root) is root:
            yield from root.named_parameters()
            yield from root.named_buffers()


def made_at(optimizer: torch.optim.Optimizer, name: str, files: Iterable[str]) -> Location | None:
    """The line that makes an optimizer, in the code that ran or else in earlier cells: the last for its name, or the only one."""
    kind, short = type(optimizer).__name__, name.rpartition(".")[2]
    names = {short, *held_as(optimizer)}
    of_run = list(dict.fromkeys(files))
    for searched in of_run, list(reversed(cell_files())):
        makers = [
            (file, node.lineno, statement)
            for file in searched
            for statement in nodes(ast.stmt, tree_of(file))
            if not hasattr(statement, "body")
            for node in nodes(ast.Call, statement)
            if called(node) == kind
        ]
        of_name = [one for one in makers if any(last_name(target) in names for target in targets_of(one[2]))]
        if len(makers) == 1 or of_name:
            file, line, _ = max((one for one in of_name if one[0] == of_name[0][0]), key=lambda one: one[1]) if of_name else makers[0]
            return location(file, line, "<module>")
    return assigned_at(short, of_run)


def held_as(value: object) -> list[str]:
    """The variables and attributes that hold an object."""
    spaces = (one if isinstance(one, dict) else getattr(one, "__dict__", None) for one in gc.get_referrers(value))
    names = (key for space in spaces if isinstance(space, dict) for key, held in list(space.items()) if held is value)
    return [name for name in names if isinstance(name, str)]


def stepped_name(where: Location | None) -> str | None:
    """What the line that calls ``step()`` calls the optimizer: ``self.opt`` of ``self.opt.step()`` and of ``scaler.step(self.opt)``."""
    for node in nodes(ast.Call, statement_at(where)):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            optimizer = node.args[0] if node.args and "scaler" in ast.unparse(node.func.value).lower() else node.func.value
            return ast.unparse(optimizer) if isinstance(optimizer, (ast.Name, ast.Attribute)) else None
    return None


def attribute_line(owner: torch.nn.Module, attribute: str) -> Location | None:
    """The line in the ``__init__`` of its class that assigns ``self.attribute``."""
    wanted, node = f"self.{attribute}", user_function(type(owner).__init__)
    lines = [one.lineno for one in nodes(ast.Assign, node) if any(dotted(target) == wanted for target in one.targets)]
    return location(type(owner).__init__.__code__.co_filename, lines[0], "__init__") if lines else None


def is_written_by_user(module: torch.nn.Module) -> bool:
    """Whether its class is the user's own, or only holds others (`Sequential`)."""
    return isinstance(module, torch.nn.Sequential) or user_function(type(module).forward) is not None
