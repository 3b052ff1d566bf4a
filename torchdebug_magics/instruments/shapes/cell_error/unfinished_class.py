"""A class of the user's that lacks what torch calls, and an instance that was made with what it should have been called with."""

from __future__ import annotations

import ast
import difflib
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, FunctionType

import torch

from torchdebug_magics.instruments.shapes.cell_error.changes import GIVEN_TENSORS, instance_called
from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.source.call_sites import function_node, value_of
from torchdebug_magics.probing.source.edited_source import Source, cells, same
from torchdebug_magics.probing.source.syntax import called, dotted, exchanged, method, nodes, own_nodes, statement_at, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.report import Edit, Location

_ALIKE = 0.75
"""Likeness of two names of which one is the other, mistyped."""
_TOO_MANY = re.compile(r"(\w+)\.(\w+)\(\) takes (\d+) positional arguments? but (\d+) (?:was|were) given")
_SUPER = "super().__init__()"


def unfinished_class(error: BaseException) -> Failure | None:
    """Why torch cannot use a class, or an object, as it was asked to; None where that is not why it raised."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return None
    return _lacking(error, frames) or _returning_nothing(error, frames) or _made_with_tensor(error, frames)


def _lacking(error: BaseException, frames: list[tuple[FrameType, int]]) -> Failure | None:
    """A method, the call of another one, or a parameter that the class has not."""
    owner, message = frames[-1][0].f_locals.get("self"), str(error)
    if 'is missing the required "forward"' in message and owner is not None and not type(owner).__module__.startswith("torch."):
        return _without_forward(error, type(owner))
    if "before Module.__init__() call" in message and owner is not None:
        codes = [frame.f_code for frame, _ in frames]
        kinds = [kind for kind in type(owner).__mro__ if getattr(vars(kind).get("__init__"), "__code__", None) in codes]
        kind = kinds[-1] if kinds else type(owner)  # a class that it is derived from may be the one
        return _of_class(error, kind, f"`{kind.__name__}.__init__` does not call `{_SUPER}` first", _with_super)
    if isinstance(error, TypeError) and "has no len()" in message:
        sets = (value for frame, _ in frames for value in frame.f_locals.values() if isinstance(value, torch.utils.data.Dataset))
        kinds = [kind for kind in map(type, sets) if not hasattr(kind, "__len__") and f"'{kind.__name__}'" in message]
        sentence = f"`{kinds[-1].__name__}` has no `__len__`, which a DataLoader asks" if kinds else ""
        return _of_class(error, kinds[-1], sentence, _with_len) if kinds else None
    if isinstance(error, TypeError) and (match := _TOO_MANY.search(message)) is not None and int(match[4]) == int(match[3]) + 1:
        return _without_self(error, match[1], match[2])
    return None


def _without_self(error: BaseException, kind: str, method_name: str) -> Failure | None:
    """A method whose first parameter is not the instance."""
    for source in cells():
        for node in (node for node in nodes(ast.ClassDef, source.tree) if node.name == kind):
            function = next((each for each in nodes(ast.FunctionDef, node) if each.name == method_name), None)
            first = function.args.args[0].arg if function is not None and function.args.args else ""
            if function is None or first in {"self", "cls"} or function.decorator_list:
                return None
            lines = source.text(node, whole=True).split("\n")
            at = function.lineno - node.lineno
            lines[at] = lines[at].replace(f"{method_name}({first}", f"{method_name}(self{', ' if first else ''}{first}", 1)
            edit = source.replacing(node, "\n".join(lines), source.text(node, whole=True))
            where = location(source.where.file, function.lineno, kind)
            return _failure(error, f"`{kind}.{method_name}` has no parameter `self`, which Python passes first", where, (edit,))
    return None


def _returning_nothing(error: BaseException, frames: list[tuple[FrameType, int]]) -> Failure | None:
    kind = _returns_nothing(frames) if isinstance(error, (AttributeError, TypeError)) else None
    return None if kind is None else _of_class(error, kind, f"`{kind.__name__}.forward` returns nothing: it has no `return`", _with_return)


def _returns_nothing(frames: list[tuple[FrameType, int]]) -> type | None:
    """The class of a module that the failing line calls and whose `forward` has no `return`."""
    own = [(frame, line) for frame, line in frames if is_user_code(frame.f_code)]
    if not own:
        return None
    frame, line = own[-1]
    statement = statement_at(tree_of(frame.f_code.co_filename), line)
    read = {node.id for node in nodes(ast.Name, statement) if value_of(node, frame) is None}
    tree = function_node(frame.f_code)
    made = [node.value for node in nodes(ast.Assign, tree) if read & set(map(dotted, node.targets))]
    for call in nodes(ast.Call, statement, *made):
        module = value_of(call.func, frame)
        forward = getattr(type(module), "forward", None) if isinstance(module, torch.nn.Module) else None
        if isinstance(forward, FunctionType) and is_user_code(forward.__code__):
            returns = [node for node in own_nodes(function_node(forward.__code__)) if isinstance(node, (ast.Return, ast.Yield, ast.Raise))]
            if not returns:
                return type(module)
    return None


def _with_return(source: Source, node: ast.ClassDef) -> tuple[str, ast.stmt] | None:
    function = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "forward"), None)
    last = function.body[-1] if function is not None else None
    is_computed = isinstance(last, ast.Assign) or (
        isinstance(last, ast.Expr) and dotted(getattr(last.value, "func", None)).startswith("self.")
    )
    if function is None or not isinstance(last, (ast.Assign, ast.Expr)) or not is_computed or last.lineno == function.lineno:
        return None
    lines = source.text(node, whole=True).split("\n")
    indent = " " * (last.col_offset - node.col_offset)
    if isinstance(last, ast.Expr):
        lines[last.lineno - node.lineno] = f"{indent}return {lines[last.lineno - node.lineno].strip()}"
    else:
        lines.insert((last.end_lineno or 0) - node.lineno + 1, f"{indent}return {ast.unparse(last.targets[0])}")
    return "\n".join(lines), function


def _made_with_tensor(error: BaseException, frames: list[tuple[FrameType, int]]) -> Failure | None:
    """A module in the place of its output: ``nn.ReLU(x)``, of which the tensor has become an option."""
    frame, line = next(((frame, line) for frame, line in reversed(frames) if is_user_code(frame.f_code)), (None, 0))
    if frame is None or not isinstance(error, (AttributeError, TypeError)):
        return None
    names = nodes(ast.Name, statement_at(tree_of(frame.f_code.co_filename), line))
    read = (value for name in names if isinstance(value := value_of(name, frame), torch.nn.Module))
    modules = [module for module in read if type(module).__module__.startswith("torch.nn.modules.")]
    made = [module for module in modules if any(isinstance(value, torch.Tensor) for value in vars(module).values())]
    for module in made:
        kind = type(module).__name__
        for source in cells():
            for call in nodes(ast.Call, source.tree):
                statement = statement_at(source.tree, call.lineno)
                if called(call) == kind and call.args and statement is not None and not isinstance(call.func, ast.Call):
                    new = instance_called(call)
                    text = ast.unparse(exchanged(statement, lambda node, call=call, new=new: new if same(node, call) else None))  # type: ignore[misc]
                    where = location(source.where.file, statement.lineno, frame.f_code.co_name)
                    return _failure(error, GIVEN_TENSORS.format(ast.unparse(call.func)), where, (source.replacing(statement, text),))
    return None


def _without_forward(error: BaseException, kind: type) -> Failure:
    methods = [name for name, value in vars(kind).items() if callable(value)]
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, FunctionType)]
    has_inner = any("forward" in code.co_varnames for code in codes)
    alike = next(iter(difflib.get_close_matches("forward", methods, 1, _ALIKE)), "")

    def renamed(source: Source, node: ast.ClassDef) -> tuple[str, ast.stmt] | None:
        functions = [function for function in nodes(ast.FunctionDef, node) if function.name in {alike, "forward"}]
        texts = nodes(ast.Constant, *functions)
        if len(functions) != 1 or any(text.lineno != text.end_lineno for text in texts):  # of which each blank counts
            return None
        lines = source.text(node, whole=True).split("\n")
        function, first = functions[0], functions[0].lineno - node.lineno
        if function.name == "forward":  # it stands inside another function
            for line in range(first, (function.end_lineno or 0) - node.lineno + 1):
                lines[line] = lines[line].removeprefix(" " * (function.col_offset - node.body[0].col_offset))
        lines[first] = lines[first].replace(f"def {function.name}(", "def forward(")
        return "\n".join(lines), function

    reason = f": `{alike}` is mistyped" if alike else ": `def forward` stands inside of another method" if has_inner else ""
    return _of_class(error, kind, f"`{kind.__name__}` has no method `forward`{reason}", renamed)


def _with_super(source: Source, node: ast.ClassDef) -> tuple[str, ast.stmt] | None:
    function = next((function for function in node.body if isinstance(function, ast.FunctionDef) and function.name == "__init__"), None)
    body = function.body if function is not None else []
    body = body[1:] if body and ast.get_docstring(function) is not None else body  # type: ignore[arg-type]  # there is a body
    if function is None or not body or body[0].lineno == function.lineno:
        return None
    calls = ((statement, getattr(statement, "value", None)) for statement in body)
    late = [statement for statement, call in calls if method(call) == "__init__" and "super" in ast.unparse(statement)]
    lines = source.text(node, whole=True).split("\n")
    for statement in late:
        del lines[statement.lineno - node.lineno : (statement.end_lineno or 0) - node.lineno + 1]
    called_first = ast.unparse(late[0]) if late else _SUPER
    lines.insert(body[0].lineno - node.lineno, " " * (body[0].col_offset - node.col_offset) + called_first)
    return "\n".join(lines), function


def _with_len(source: Source, node: ast.ClassDef) -> tuple[str, ast.stmt] | None:
    getting = next((function for function in node.body if isinstance(function, ast.FunctionDef) and function.name == "__getitem__"), None)
    index = getting.args.args[1].arg if getting is not None and len(getting.args.args) > 1 else ""
    parts = [part for part in nodes(ast.Subscript, getting) if isinstance(part.slice, ast.Name) and part.slice.id == index]
    attributes = sorted({dotted(part.value) for part in parts if dotted(part.value).startswith("self.")})
    if len(attributes) != 1:
        return None
    indent = " " * (node.body[0].col_offset - node.col_offset)
    own = f"{indent}def __len__(self):\n{indent}{indent}return len({attributes[0]})"
    return f"{source.text(node, whole=True)}\n\n{own}", node


def _of_class(
    error: BaseException, kind: type, sentence: str, change: Callable[[Source, ast.ClassDef], tuple[str, ast.stmt] | None]
) -> Failure:
    """At the statement of a class that is to be changed, with its new text as an edit."""
    for source in cells():
        for node in nodes(ast.ClassDef, source.tree):
            changed = change(source, node) if node.name == kind.__name__ else None
            if changed is not None:
                new, at = changed
                edit = source.replacing(node, new, source.text(node, whole=True))
                where = location(source.where.file, at.lineno, kind.__name__)
                return _failure(error, sentence, where, (edit,))
    return refusal(error, sentence)


def _failure(error: BaseException, sentence: str, where: Location | None, edits: tuple[Edit, ...]) -> Failure:
    old, new = edits[0].old.split("\n"), edits[0].new.split("\n")
    code = "\n".join(line.strip() for line in new if line.strip() and line not in old)
    failure = refusal(error, sentence, fixes=[Fix(code=code, verified=False)])
    return replace(failure, location=where, underlined=None, edits=edits, fix_state="compiles")
