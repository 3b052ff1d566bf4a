"""A name that was given to something else than what is called by it: ``loss = loss(output, target)``, or a variable called ``max``."""

from __future__ import annotations

import ast
import builtins
import traceback
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.explain import edited, refusal
from torchdebug_magics.instruments.shapes.report import Failure
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.edited_source import Source, cells, exchanging
from torchdebug_magics.probing.source.syntax import (
    SIMPLE,
    bound_names,
    called,
    copied,
    exchanged,
    expression,
    loops_around,
    nodes,
    own_nodes,
    read_names,
    root_of,
    statement_at,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.report import Edit

_OWN = frozenset(vars(builtins))
_IN_PLACE = frozenset({
    "load_state_dict", "append", "extend", "insert", "sort", "reverse", "update", "add", "clear", "backward", "step", "zero_grad",
    "add_module",
})  # fmt: skip
"""Methods that change their object, and return nothing of it."""


def rebound_name(error: BaseException) -> Failure | None:
    """Which variable no longer holds what the line calls, and what gave it the other value; None where that is not why it raised."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    if not frames or not isinstance(error, (AttributeError, TypeError)):
        return None
    if (result := _result_of_own_method(error, *frames[-1])) is not None or isinstance(error, AttributeError):
        return result
    if "object is not callable" in str(error):
        return _called(error, *frames[-1])
    return next(filter(None, (_instead_of_class(error, frame, line) for frame, line in reversed(frames))), None)


def _result_of_own_method(error: BaseException, frame: FrameType, line: int) -> Failure | None:
    """A variable that holds what a method of its own returned, which changes the object: ``model = model.load_state_dict(state)``."""
    names = {**frame.f_globals, **frame.f_locals}
    for name in sorted(read_names(statement) if (statement := statement_at(tree_of(frame.f_code.co_filename), line)) is not None else ()):
        kind = type(names[name]).__name__ if name in names else ""
        made = next(_made(frame, line, name), None) if kind in {"NoneType", "_IncompatibleKeys"} and f"'{kind}'" in str(error) else None
        if made is not None and root_of(getattr(made[1].value, "func", made[1])) == name and _changes_the_object(called(made[1].value)):
            source, assignment = made
            what = "None" if kind == "NoneType" else f"a {kind}"
            sentence = f"`{name}` holds what `{called(assignment.value)}()` returned, {what}"
            return edited(error, sentence, (source.replacing(assignment, source.text(assignment.value)),))
    return None


def _changes_the_object(method: str) -> bool:
    """Whether a method returns nothing, be it torch's, a list's or the user's own."""
    own = [node for cell in cells() for node in nodes(ast.FunctionDef, cell.tree) if node.name == method]
    returned = (node.value for function in own for node in nodes(ast.Return, function))
    return method in _IN_PLACE or (bool(own) and not any(value is not None for value in returned))


def _called(error: TypeError, frame: FrameType, line: int) -> Failure | None:
    """What is called is a variable whose value cannot be."""
    statement = statement_at(tree_of(frame.f_code.co_filename), line)
    names = {**frame.f_globals, **frame.f_locals}
    for call in nodes(ast.Call, statement):
        if not isinstance(call.func, ast.Name) or callable(names.get(call.func.id)) or names.get(call.func.id) is None:
            continue
        name, kind = call.func.id, type(names[call.func.id]).__name__
        if name in _OWN:
            failure = refusal(error, f"`{name}` is of type {kind} here, and no longer Python's own function")
            is_global = name not in frame.f_code.co_varnames
            return replace(failure, fix="give the variable another name" + (f", and run `del {name}` once" if is_global else ""))
        if not _held_a_callable(frame, line, name):
            return None
        sentence = f"`{name}` is a {kind} here: the result took its name"
        return edited(error, sentence, _renamed(frame, line, name)) if statement is not None and name in bound_names(statement) else None
    return None


def _held_a_callable(frame: FrameType, line: int, name: str) -> bool:
    """Whether the variable was given an object of a class, or a name, before; an argument, where a loop has come round."""
    made = next(_made(frame, line, name), None)
    if made is None:
        return bool(loops_around(tree_of(frame.f_code.co_filename), line))
    value = made[1].value
    return isinstance(value, (ast.Name, ast.Attribute, ast.Lambda)) or called(value)[:1].isupper()


def _instead_of_class(error: TypeError, frame: FrameType, line: int) -> Failure | None:
    """A line of a loop passes a class on, and gives the object that it gets the same name."""
    statement = statement_at(tree_of(frame.f_code.co_filename), line)
    if not isinstance(statement, ast.Assign):
        return None
    names = {**frame.f_globals, **frame.f_locals}
    for name in sorted(read_names(statement.value) & bound_names(statement)):
        made = next(_made(frame, line, name), None)
        calls = any(isinstance(call.func, ast.Name) and call.func.id == name for call in nodes(ast.Call, statement.value))
        if (
            made is None
            and calls
            and isinstance(names.get(name), torch.nn.Module)
            and loops_around(tree_of(frame.f_code.co_filename), line)
        ):
            sentence = f"`{name}` is a {type(names[name]).__name__} here: the result took its name"
            return edited(error, sentence, _renamed(frame, line, name))
        first = names.get(made[1].value.id) if made is not None and isinstance(made[1].value, ast.Name) else None
        if isinstance(first, type) and not isinstance(names.get(name), type):
            sentence = f"`{name}` is a {type(names[name]).__name__} here, and no longer the class {first.__name__}"
            return edited(error, sentence, _renamed(frame, line, name))
    return None


def _made(frame: FrameType, line: int, name: str) -> Iterator[tuple[Source, ast.Assign]]:
    """The assignments that gave the name its first value, the latest first: before the loop around a line, in its function or the cells."""
    file, function = frame.f_code.co_filename, function_node(frame.f_code)
    tree = tree_of(file)
    if tree is None:
        return
    loops = loops_around(tree, line)
    first = loops[0].lineno if loops else line
    own: Any = tree if function is None or frame.f_code.co_name == "<module>" else function
    before = [node for node in own_nodes(own) if isinstance(node, ast.Assign) and node.lineno < first and _binds(node, name)]
    here = Source(location(file, line, frame.f_code.co_name), tree)
    yield from ((here, node) for node in reversed(before))
    if own is tree:
        others = (cell for cell in cells() if cell.where.file != file)
        yield from (
            (cell, node) for cell in others for node in reversed(cell.tree.body) if isinstance(node, ast.Assign) and _binds(node, name)
        )


def _binds(node: ast.Assign, name: str) -> bool:
    return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name


def _renamed(frame: FrameType, line: int, name: str) -> tuple[Edit, ...]:
    """What is called, or passed on, by another name where it is made, and in the line that raised."""
    file = frame.f_code.co_filename
    made, tree = next(_made(frame, line, name), None), tree_of(file)
    statement = statement_at(tree, line)
    if tree is None or not isinstance(statement, ast.Assign):
        return ()
    if made is None:
        return _with_other_result(frame, Source(location(file, line, frame.f_code.co_name), tree), statement, name)
    source, first = made
    is_class = isinstance(first.value, ast.Name)
    new = "criterion" if "loss" in name.lower() else f"{name}_class" if is_class else f"{name}_function"
    taken = {*frame.f_globals, *frame.f_locals, *frame.f_code.co_varnames}
    new = next(each for each in (new, f"{new}_", f"the_{new}") if each not in taken)
    value = exchanged(copied(statement.value), lambda node: ast.Name(new) if isinstance(node, ast.Name) and node.id == name else None)
    where = location(file, line, frame.f_code.co_name)
    renamed = source.replacing(first, source.text(first).replace(name, new, 1))
    changed = exchanging(where, statement.value, value)
    below = [node for node in own_nodes(function_node(frame.f_code) or tree) if isinstance(node, SIMPLE) and node.lineno > line]
    calls = [(node, call) for node in below for call in nodes(ast.Call, node) if isinstance(call.func, ast.Name) and call.func.id == name]
    later = [
        edit
        for node, call in calls
        for edit in exchanging(location(file, node.lineno, frame.f_code.co_name), call, ast.Call(ast.Name(new), call.args, call.keywords))
    ]
    return (*changed, *later, renamed) if changed else ()


def _with_other_result(frame: FrameType, source: Source, statement: ast.Assign, name: str) -> tuple[Edit, ...]:
    """The result of a line that calls an argument of its function, by another name there and below."""
    function, new = function_node(frame.f_code), f"{name}_value"
    is_argument = name in frame.f_code.co_varnames[: frame.f_code.co_argcount]
    if function is None or not is_argument or new in frame.f_code.co_varnames or not _binds(statement, name):
        return ()
    below = [node for node in own_nodes(function) if isinstance(node, SIMPLE) and node.lineno > statement.lineno]
    readers = [node for node in below if name in read_names(node)]
    if any(name in bound_names(node) for node in below):
        return ()
    target = source.text(statement).replace(name, new, 1)
    rest = (source.replacing(node, source.exchanged_text(node, expression(name), expression(new))) for node in readers)
    return (source.replacing(statement, target), *rest)
