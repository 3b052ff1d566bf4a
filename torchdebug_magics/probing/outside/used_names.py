"""What the code of a run uses: the strings in it and in its variables, and the variables that it names."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torchdebug_magics.probing.names import Named
from torchdebug_magics.probing.source.code_owner import is_user_code

__all__ = ["is_shareable", "strings_in", "used_by", "used_in"]

_KINDS = frozenset({str, bytes, CodeType, FunctionType, MethodType, dict, list, tuple})
_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), ModuleType, FunctionType, MethodType, BuiltinFunctionType, type)
_MOST_STRINGS, _MOST_PARTS = 5_000, 100


def used_by(*roots: Any) -> list[Named]:
    """The variables that code names, with their values.

    `roots` are functions, objects of the user's classes, code objects and statements, and the namespaces of the last two.
    """
    spaces = [root for root in roots if type(root) is dict]
    found: dict[str, Named] = {}
    todo: list[tuple[Any, Mapping[str, Any]]] = [(root, space) for root in roots if type(root) is not dict for space in spaces or [{}]]
    seen: set[tuple[int, int]] = set()
    while todo:
        root, space = todo.pop()
        if (id(root), id(space)) in seen:
            continue
        seen.add((id(root), id(space)))
        if not isinstance(root, (FunctionType, MethodType, CodeType, ast.AST)):
            methods = (value for kind in type(root).__mro__ for value in vars(kind).values() if type(value) is FunctionType)
            todo += [(method, method.__globals__) for method in methods if is_user_code(method.__code__)]
            continue
        for name, value in used_in(root, space):
            if name not in found or found[name].value is not value:
                found[name] = Named(name, value)
            inner = value.__func__ if type(value) is MethodType else value
            if type(inner) is FunctionType and is_user_code(inner.__code__):
                todo.append((inner, inner.__globals__))
    return list(found.values())


def used_in(root: Any, space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names of one piece of code that are bound in its namespace, or that a function closes over."""
    if type(root) is MethodType:
        yield "self", root.__self__
        root = root.__func__
    if type(root) is FunctionType:
        yield from zip(root.__code__.co_freevars, _cells(root), strict=False)
        root, space = root.__code__, root.__globals__
    names: Iterable[str] = ()
    if type(root) is CodeType:
        names = _names_of(root)
    elif isinstance(root, ast.AST):
        names = (node.id for node in ast.walk(root) if isinstance(node, ast.Name))
    yield from ((name, space[name]) for name in names if name in space)


def _names_of(code: CodeType) -> set[str]:
    inner = (_names_of(part) for part in code.co_consts if type(part) is CodeType)
    return set(code.co_names).union(*inner)


def is_shareable(value: object) -> bool:
    """Whether a change of the value is seen by all that have it."""
    return not isinstance(value, _IMMUTABLE) and type(value) not in {tuple, frozenset}


def strings_in(*roots: Any) -> Iterator[str]:
    """Strings and paths in variables, and constants of the user's code: of functions, methods, classes, code objects and statements."""
    seen: set[int] = set()
    todo = list(roots)
    count = 0
    while todo and count < _MOST_STRINGS:
        root = todo.pop()
        if id(root) in seen:
            continue
        seen.add(id(root))
        if isinstance(root, (str, bytes, os.PathLike)):
            count += 1
            yield os.fsdecode(root)
        else:
            todo += _parts_of(root)


def _parts_of(root: Any) -> list[Any]:
    """Where strings may be."""
    kind = type(root)
    parts: Iterable[Any] = ()
    if kind is dict:
        parts = [value for name, value in list(root.items())[:_MOST_STRINGS] if not (isinstance(name, str) and name.startswith("_"))]
    elif kind in {list, tuple}:
        parts = root[:_MOST_PARTS]
    elif kind is CodeType:
        parts = root.co_consts
    elif kind is MethodType:
        parts = (root.__func__, root.__self__)
    elif kind is FunctionType and is_user_code(root.__code__):
        parts = _parts_of_function(root)
    elif isinstance(root, ast.AST):
        parts = [node.value for node in ast.walk(root) if isinstance(node, ast.Constant)]
    elif isinstance(root, type) and _has_user_code(root):
        parts = vars(root).values()
    elif _has_user_code(kind):
        parts = (kind, *getattr(root, "__dict__", {}).values())
    return [part for part in parts if _is_of_interest(part)]


def _parts_of_function(function: FunctionType) -> list[Any]:
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [function.__code__, *defaults, *_cells(function), *named]


def _is_of_interest(value: Any) -> bool:
    kind = type(value)
    return kind in _KINDS or isinstance(value, (os.PathLike, type)) or _has_user_code(kind)


def _has_user_code(kind: type) -> bool:
    return any(type(value) is FunctionType and is_user_code(value.__code__) for value in vars(kind).values())


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
