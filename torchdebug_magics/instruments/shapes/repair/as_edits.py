"""A repair as edits of the user's code: at the place of the op, in the call of a module, or where a module is made."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TypeAlias

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Repair
from torchdebug_magics.instruments.shapes.repair.source import Caller, EditSite
from torchdebug_magics.probing.source.call_sites import attribute_assignment
from torchdebug_magics.probing.source.edited_source import Source, exchanging, made_as, same, with_variables
from torchdebug_magics.probing.source.syntax import exchanged, names_in, parsed, tree_of
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit, Location

_Change: TypeAlias = tuple[Location, ast.expr, ast.expr]
"""(line, expression there, what stands in its place)."""


def as_edits(
    codes: Mapping[Repair, str], modules: Mapping[str, torch.nn.Module], caller: Caller | None, failing: EditSite | None
) -> tuple[Edit, ...]:
    """One for each line; none where a repair has no place of its own in the source.

    `codes` is what to type for each; `failing` is what raised, in whose file variables are looked up first.
    """
    changes: list[_Change] = []
    file = "" if failing is None else failing.code.co_filename
    for repair, code in codes.items():
        if len(codes) == 1 and failing is not None and (edit := _before_it(repair, code, failing)) is not None:
            return (edit,)
        site = _site(repair, caller)
        new = _made(repair, code, modules, file) if repair.modules else [] if site is None else _at(site, code)
        if not new:
            return ()
        changes += new
    edits: list[Edit] = []
    for place in dict.fromkeys((where.file, where.line) for where, _, _ in changes):
        here = [change for change in changes if (change[0].file, change[0].line) == place]
        edits += _of_a_line(here)
    return tuple(edits)


def _before_it(repair: Repair, code: str, failing: EditSite) -> Edit | None:
    """A value that is changed before the statement that raised, under the name that it has there: ``x = x.flatten(1)``."""
    tree, whole = parsed(code), tree_of(failing.code.co_filename)
    match tree.body if tree is not None else []:
        case [ast.Assign([ast.Name(name)], value)] if name in failing.names and not repair.modules and whole is not None:
            places = {site for site in (*(op.site for op in repair.ops), *(call.site for call in repair.calls)) if site is not None}
            is_here = all((site.code, site.line) == (failing.code, failing.line) for site in places)
            source = Source(location(failing.code.co_filename, failing.line, failing.code.co_name), whole)
            if (
                source.statement is not None
                and (repair.inputs or name in names_in(value))
                and is_here
                and not (repair.inputs and repair.ops)
            ):
                return source.before(source.statement, code)
    return None


def _of_a_line(changes: list[_Change]) -> tuple[Edit, ...]:
    where, old, new = changes[0]
    if isinstance(old, ast.Call) and all(same(old, each) for _, each, _ in changes):
        for _, _, other in changes[1:]:
            new = _both_changed(old, new, other)
        changes = [(where, old, new)]
    if len(changes) == 1:
        return exchanging(where, old, new)
    tree = tree_of(where.file)
    source = None if tree is None else Source(where, tree)
    if source is None or source.statement is None or not source.is_alone(source.statement):
        return ()
    text = ast.unparse(exchanged(source.statement, lambda node: next((each for _, part, each in changes if same(node, part)), None)))
    return (source.replacing(source.statement, text),)


def _both_changed(old: ast.Call, first: ast.expr, second: ast.expr) -> ast.expr:
    """A call with the arguments that either of two changes of it has changed."""
    if not isinstance(first, ast.Call) or not isinstance(second, ast.Call) or len(first.args) != len(second.args):
        return first
    arguments = [mine if same(other, was) else other for was, mine, other in zip(old.args, first.args, second.args, strict=False)]
    return ast.Call(first.func, arguments, first.keywords)


def _site(repair: Repair, caller: Caller | None) -> EditSite | None:
    """The expression that the code of a repair stands for."""
    if len(repair.ops) == 1 and not (repair.calls or repair.inputs or repair.parameters or repair.attributes):
        return repair.ops[0].site
    if len(repair.calls) == 1 and not (repair.ops or repair.inputs or repair.parameters or repair.attributes):
        return repair.calls[0].site
    return caller.site if caller is not None and repair.inputs and not repair.ops else None


def _at(site: EditSite, code: str) -> list[_Change]:
    tree, old = parsed(code), site.expression
    is_call = isinstance(old, ast.expr) and tree is not None and len(tree.body) == 1
    new = tree.body[0].value if is_call and tree is not None and isinstance(tree.body[0], ast.Expr) else None
    if not isinstance(old, ast.expr) or new is None or (isinstance(old, ast.Call) and not _is_alike(old, new)):
        return []
    return [(location(site.code.co_filename, site.line, site.code.co_name), old, new)]


def _is_alike(old: ast.Call, new: ast.expr) -> bool:
    """Whether the code is to stand for the call: the same call with other arguments, or a method of what that is called on."""
    if isinstance(new, ast.Call) and ast.unparse(new.func) == ast.unparse(old.func):
        return True
    return isinstance(old.func, ast.Attribute) and ast.unparse(new).startswith(ast.unparse(old.func.value))


def _made(repair: Repair, code: str, modules: Mapping[str, torch.nn.Module], file: str) -> list[_Change]:
    """Where the modules are made, in the ``__init__`` of their owner or for a variable."""
    changes: list[_Change] = []
    lines = code.splitlines()
    if len(lines) != len(repair.modules) or repair.ops or repair.calls:
        return []
    for line, path in zip(lines, repair.modules, strict=True):
        holder, _, name = path.rpartition(".")
        tree, module, owner = parsed(line), modules.get(path), modules.get(holder)
        value = tree.body[0].value if tree is not None and isinstance(tree.body[0], ast.Assign) else None
        if not isinstance(value, ast.Call) or module is None:
            return []
        statement = None if owner is None or owner is module else attribute_assignment(type(owner).__init__, name)
        if owner is not None and statement is not None and isinstance(statement.value, ast.Call):
            init = type(owner).__init__.__code__
            place: Location | None = location(init.co_filename, statement.lineno, "__init__")
            old = statement.value
        else:
            made = made_as(file, name, type(module).__name__)
            place, old = made[0] if len(made) == 1 and not holder else (None, value)
        changes += [] if place is None else [(place, old, with_variables(old, value))]
    return changes if len(changes) == len(lines) else []
