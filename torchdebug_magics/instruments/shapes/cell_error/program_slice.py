"""The program slice that led to a failing line: the statements from the models to the op, run again without data as one forward.

A loss that does not fit is the fault of whatever made one of its sides, lines or modules above it. The frame of the error still holds the
inputs of those lines; only statements whose inputs are unchanged, and that call nothing but modules and functions of torch's, are taken.
"""

from __future__ import annotations

import ast
import inspect
import traceback
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchdebug_magics.instruments.shapes.cell_error.side_effects import is_quiet, may_run
from torchdebug_magics.instruments.shapes.repair.source import site_of
from torchdebug_magics.probing.dry_runs.inputs import named_tensors
from torchdebug_magics.probing.source.syntax import (
    SIMPLE,
    backward_slice,
    bound_names,
    copied,
    lists_around,
    nodes,
    read_names,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code

_NAMES: WeakKeyDictionary[SourceLines, tuple[CodeType, dict[str, Any]]]


class SourceLines(torch.nn.Module):
    """Statements of the user's as a forward: the modules that they call are its parts, under the names that the user has for them."""

    def __init__(self, code: CodeType, names: dict[str, Any], parts: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        _NAMES[self] = code, names  # out of reach: what a run keeps and puts back are the parts and the inputs, not the whole notebook
        for path, part in parts.items():
            owner: torch.nn.Module = self
            *outer, name = path.split(".")
            for atom in outer:
                if atom not in owner._modules:
                    owner.add_module(atom, torch.nn.Module())
                owner = owner.get_submodule(atom)
            owner.add_module(name, part)

    def forward(self, **given: Any) -> None:
        """Run the statements, with these values for some of their names."""
        code, names = _NAMES[self]
        parts = {name: part for name, part in self._modules.items() if type(part) is not torch.nn.Module}
        exec(code, {**names, **parts, **given})  # noqa: S102 - the user's own statements, as they ran


_NAMES = WeakKeyDictionary()


def lines_to(error: BaseException) -> tuple[SourceLines, dict[str, Any]] | None:
    """The statements from the calls of models to the one that raised, and the tensors that they begin with, by the user's names.

    None where the failing expression depends on no model, or its statements cannot be run again.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    for at in reversed(range(len(frames))):
        frame, line = frames[at]
        names = {**frame.f_globals, **frame.f_locals}
        parts: dict[str, torch.nn.Module] = {}
        statements = _leading_to(frame.f_code.co_filename, line, names, parts)
        if statements and any(next(part.parameters(), None) is not None for part in parts.values()):
            return _made(frame, statements, names, parts)
        if at and not _may_rerun(frame):
            return None
    return None


def expression_of(error: BaseException) -> tuple[SourceLines, dict[str, Any]] | None:
    """The expression that raised, alone, and the tensors that it begins with; None where it cannot be run again."""
    site, depth = site_of(error)
    node = site.expression if site is not None else None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if site is None or site.statement is None or not isinstance(node, (ast.expr, ast.AugAssign)):
        return None
    stores = isinstance(getattr(node, "ctx", None), ast.Store)
    statement = site.statement if stores or isinstance(node, ast.AugAssign) else ast.copy_location(ast.Expr(node), site.statement)
    frame = frames[depth - 1]
    names, parts = {**frame.f_globals, **frame.f_locals}, dict[str, torch.nn.Module]()
    return _made(frame, [statement], names, parts) if may_run(statement, names, parts, in_place=True) else None


def _may_rerun(frame: FrameType) -> bool:
    """Whether the function that failed may be called once more: a method of a module, or one that leaves nothing behind."""
    own = next(iter(inspect.getargvalues(frame).locals.values()), None)
    return isinstance(own, torch.nn.Module) or is_quiet(frame.f_code, frame.f_globals)


def _made(
    frame: FrameType, statements: list[ast.stmt], names: dict[str, Any], parts: Mapping[str, torch.nn.Module]
) -> tuple[SourceLines, dict[str, Any]]:
    body = [
        ast.copy_location(ast.Expr(statement.value), statement)
        if isinstance(statement, ast.Return) and statement.value is not None
        else statement
        for statement in statements
    ]
    tree = ast.fix_missing_locations(ast.Module([copied(statement) for statement in body], []))
    read = sorted(read_names(*statements) & names.keys())
    given = {name: names[name] for name in read if next(named_tensors(names[name]), None) is not None}
    return SourceLines(compile(tree, frame.f_code.co_filename, "exec"), names, parts), given


def _leading_to(filename: str, line: int, names: Mapping[str, Any], parts: dict[str, torch.nn.Module]) -> list[ast.stmt]:
    """The statements from the models to that of a line, this one included; the modules that they call are added to `parts`.

    Only those that call a module, depend on one that does, or make what is overwritten later; whatever else is in the frame.
    """
    lists = lists_around(tree_of(filename), (line, -1, line, -1))
    before = [statement for body, place in reversed(lists) for statement in body[:place]]
    failing = lists[0][0][lists[0][1]] if lists else None
    if failing is None or not _is_simple(failing) or not may_run(failing, names, parts):
        return []

    def may_rerun(statement: ast.stmt) -> bool:
        makes_module = any(isinstance(names.get(name), torch.nn.Module) for name in bound_names(statement))
        return not makes_module and _is_simple(statement) and may_run(statement, names, {})

    kept: list[ast.stmt] = []
    live: set[str] = set()
    for statement in backward_slice(before, read_names(failing), may_rerun)[0]:
        called: dict[str, torch.nn.Module] = {}
        may_run(statement, names, called)
        stored = bound_names(statement)
        if called or live & read_names(statement) or stored & bound_names(*before[before.index(statement) + 1 :]):
            parts |= called
            live |= stored
            kept.append(statement)
    return [*kept, failing]


def _is_simple(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):
        return all(map(_is_simple, statement.body))
    plain = all(isinstance(node, (ast.Name, ast.Tuple, ast.List)) for node in nodes(ast.expr, *targets_of(statement)))
    return plain and isinstance(statement, SIMPLE)
