"""A class of the user's that lacks what torch calls, and an instance that was made with what it should have been called with."""

from __future__ import annotations

import ast
import difflib
import re
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType

import torch

from torchdebug_magics.fixes import dedented
from torchdebug_magics.instruments.shapes.cell_error.call_changes import instance_called
from torchdebug_magics.instruments.shapes.cell_error.changes import GIVEN_TENSORS
from torchdebug_magics.instruments.shapes.explain import edited
from torchdebug_magics.instruments.shapes.report import Failure
from torchdebug_magics.probing.source.call_sites import function_node, value_of
from torchdebug_magics.probing.source.edited_source import Source, calls, cells, exchanging
from torchdebug_magics.probing.source.syntax import called, dotted, method, nodes, own_nodes, statement_at, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code
from torchdebug_magics.report import Edit

_ALIKE = 0.75
"""Likeness of two names of which one is the other, mistyped."""
_TOO_MANY = re.compile(r"(\w+)\.(\w+)\(\) takes (\d+) positional arguments? but (\d+) (?:was|were) given")
_SUPER = "super().__init__()"


def unfinished_class(error: BaseException) -> Failure | None:
    """Why torch cannot use a class, or an object, as it was asked to; None where that is not why it raised."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    if frames and (lacking := _lacking(error, frames)) is not None:
        return lacking
    if not frames or not isinstance(error, (AttributeError, TypeError)):
        return None
    if (kind := _returns_nothing(frames)) is not None:
        return _of_class(error, kind.__name__, f"`{kind.__name__}.forward` returns nothing: it has no `return`", _with_return)
    return _made_with_tensor(error, frames)


def _lacking(error: BaseException, frames: list[tuple[FrameType, int]]) -> Failure | None:
    """A method, the call of another one, or a parameter that the class has not."""
    owner, message = frames[-1][0].f_locals.get("self"), str(error)
    if 'is missing the required "forward"' in message and owner is not None and not type(owner).__module__.startswith("torch."):
        return _without_forward(error, type(owner))
    if "before Module.__init__() call" in message and owner is not None:
        codes = [frame.f_code for frame, _ in frames]
        kinds = [kind for kind in type(owner).__mro__ if getattr(vars(kind).get("__init__"), "__code__", None) in codes]
        kind = kinds[-1] if kinds else type(owner)  # a class that it is derived from may be the one
        return _of_class(error, kind.__name__, f"`{kind.__name__}.__init__` does not call `{_SUPER}` first", _with_super)
    if isinstance(error, TypeError) and "has no len()" in message:
        sets = (value for frame, _ in frames for value in frame.f_locals.values() if isinstance(value, torch.utils.data.Dataset))
        kinds = [kind for kind in map(type, sets) if not hasattr(kind, "__len__") and f"'{kind.__name__}'" in message]
        sentence = f"`{kinds[-1].__name__}` has no `__len__`, which a DataLoader asks" if kinds else ""
        return _of_class(error, kinds[-1].__name__, sentence, _with_len) if kinds else None
    if isinstance(error, TypeError) and (match := _TOO_MANY.search(message)) is not None and int(match[4]) == int(match[3]) + 1:
        return _without_self(error, match[1], match[2])
    return None


def _without_self(error: BaseException, kind: str, name: str) -> Failure | None:
    """A method whose first parameter is not the instance."""

    def with_self(source: Source, node: ast.ClassDef) -> Iterator[Edit]:
        function = _method(node, name)
        first = function.args.args[0].arg if function is not None and function.args.args else ""
        if function is not None and first not in {"self", "cls"} and not function.decorator_list:
            yield _renamed(source, function, f"{name}({first}", f"{name}(self{', ' if first else ''}{first}")

    failure = _of_class(error, kind, f"`{kind}.{name}` has no parameter `self`, which Python passes first", with_self)
    return failure if failure.edits else None


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


def _with_return(source: Source, node: ast.ClassDef) -> Iterator[Edit]:
    function = _method(node, "forward")
    match function.body[-1] if function is not None else None:
        case ast.Assign([target]) as last if last.lineno != getattr(function, "lineno", 0):
            yield source.after(last, f"return {ast.unparse(target)}")
        case ast.Expr(ast.Call(func)) as last if dotted(func).startswith("self.") and last.lineno != getattr(function, "lineno", 0):
            yield source.replacing(last, f"return {source.text(last)}")


def _made_with_tensor(error: BaseException, frames: list[tuple[FrameType, int]]) -> Failure | None:
    """A module in the place of its output: ``nn.ReLU(x)``, of which the tensor has become an option."""
    frame, line = next(((frame, line) for frame, line in reversed(frames) if is_user_code(frame.f_code)), (None, 0))
    if frame is None:
        return None
    names = nodes(ast.Name, statement_at(tree_of(frame.f_code.co_filename), line))
    read = (value for name in names if isinstance(value := value_of(name, frame), torch.nn.Module))
    modules = [module for module in read if type(module).__module__.startswith("torch.nn.modules.")]
    made = [module for module in modules if any(isinstance(value, torch.Tensor) for value in vars(module).values())]
    for where, call in calls("") if made else ():
        if called(call) in {type(module).__name__ for module in made} and call.args and not isinstance(call.func, ast.Call):
            edits = exchanging(where, call, instance_called(call))
            return edited(error, GIVEN_TENSORS.format(ast.unparse(call.func)), edits)
    return None


def _without_forward(error: BaseException, kind: type) -> Failure:
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, FunctionType)]
    has_inner = any("forward" in code.co_varnames for code in codes)
    alike = next(iter(difflib.get_close_matches("forward", [name for name, value in vars(kind).items() if callable(value)], 1, _ALIKE)), "")

    def with_forward(source: Source, node: ast.ClassDef) -> Iterator[Edit]:
        functions = [function for function in nodes(ast.FunctionDef, node) if function.name in {alike, "forward"}]
        texts = nodes(ast.Constant, *functions)
        if len(functions) != 1 or any(text.lineno != text.end_lineno for text in texts):  # of which each blank counts
            return
        function = functions[0]
        if function.name != "forward":
            yield _renamed(source, function, f"def {function.name}(", "def forward(")
            return
        lines = source.lines[function.lineno - 1 : function.end_lineno]  # of a function inside another one
        inside, outside = ["\n".join(dedented(line, column) for line in lines) for column in (node.body[0].col_offset, function.col_offset)]
        yield source.replacing(function, outside, inside)

    reason = f": `{alike}` is mistyped" if alike else ": `def forward` stands inside of another method" if has_inner else ""
    return _of_class(error, kind.__name__, f"`{kind.__name__}` has no method `forward`{reason}", with_forward)


def _with_super(source: Source, node: ast.ClassDef) -> Iterator[Edit]:
    function = _method(node, "__init__")
    body = [] if function is None else function.body[1:] if ast.get_docstring(function) is not None else function.body
    if function is not None and body and body[0].lineno != function.lineno:
        calls_of_it = ((statement, getattr(statement, "value", None)) for statement in body)
        late = [statement for statement, call in calls_of_it if method(call) == "__init__" and "super" in ast.unparse(statement)]
        yield source.before(body[0], ast.unparse(late[0]) if late else _SUPER)
        yield from (source.replacing(statement, "") for statement in late)


def _with_len(source: Source, node: ast.ClassDef) -> Iterator[Edit]:
    getting = _method(node, "__getitem__")
    index = getting.args.args[1].arg if getting is not None and len(getting.args.args) > 1 else ""
    parts = [part for part in nodes(ast.Subscript, getting) if isinstance(part.slice, ast.Name) and part.slice.id == index]
    attributes = {dotted(part.value) for part in parts if dotted(part.value).startswith("self.")}
    if len(attributes) == 1:
        indent, whole = " " * (node.body[0].col_offset - node.col_offset), source.text(node, whole=True)
        own = f"{indent}def __len__(self):\n{indent}{indent}return len({attributes.pop()})"
        yield source.replacing(node, f"{whole}\n\n{own}", whole)


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _renamed(source: Source, function: ast.FunctionDef, old: str, new: str) -> Edit:
    """In the line of its name."""
    line = source.lines[function.lineno - 1].strip()
    return source.replacing(function, line.replace(old, new, 1), line)


def _of_class(error: BaseException, kind: str, sentence: str, change: Callable[[Source, ast.ClassDef], Iterator[Edit]]) -> Failure:
    """With the edits of the class of that name; none where the change does not know any."""
    classes = ((source, node) for source in cells() for node in nodes(ast.ClassDef, source.tree) if node.name == kind)
    edits = next(filter(None, (tuple(change(source, node)) for source, node in classes)), ())
    return edited(error, sentence, edits)
