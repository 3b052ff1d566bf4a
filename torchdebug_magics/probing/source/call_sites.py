"""The expression that a frame evaluates now, and the objects that its names stand for; nothing of the user's is called."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, TypeGuard

from torchdebug_magics.probing.source.syntax import FUNCTIONS, called, dotted, expressions, first_line, nodes, tree_of
from torchdebug_magics.probing.source.user_code import is_in_comprehension, is_module_code, local_values, location, owner
from torchdebug_magics.report import Location

MISSING: Any = object()
"""Stands for a value that cannot be had without running code."""
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}
_OPENS = frozenset({"BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL", "CALL"})
_TRACER_TAKES = 3
_TRACERS = frozenset({"bdb", "pdb", "trace", "profile", "cProfile", "doctest"})
_MODES = frozenset({"__torch_dispatch__", "__torch_function__"})
_OWN_LOCALS = frozenset({"locals", "vars", "eval", "exec", "dir"})
_WITHIN = 12
"""Code units before, in which what a `with` enters ends."""
_CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict"})
_PLAIN_GETTERS = (types.ModuleType, type)


def names_of(frame: FrameType) -> dict[str, Any]:
    """The local variables, read from another thread; of a cell or module the global ones. Empty where a look could disturb the frame.

    Before Python 3.13 a function has one dict for its locals. It is left alone where the function itself may have it, and while a trace
    or profile function could run, after which the variables are written back from it.
    """
    if is_module_code(frame.f_code):
        return frame.f_globals
    if sys.version_info < (3, 13) and (_has_own_locals(frame.f_code) or not _is_undisturbed(frame)):
        return {}
    return {} if frame.f_trace is not None or is_in_comprehension(frame) else local_values(frame)


@functools.lru_cache(1024)
def _has_own_locals(code: CodeType) -> bool:
    """Whether the function may read its locals as a dict; ``model.eval()`` is a method, and does not."""
    if _OWN_LOCALS.isdisjoint(code.co_names):
        return False
    return any(step.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and step.argval in _OWN_LOCALS for step in dis.get_instructions(code))


def line_of(frame: FrameType) -> int:
    """The line at which a frame is; of a jump that has none, the line before it."""
    if frame.f_lineno:
        return frame.f_lineno
    before = [line for start, _, line in frame.f_code.co_lines() if start <= frame.f_lasti and line]
    return before[-1] if before else frame.f_code.co_firstlineno


def node_at(frame: FrameType) -> ast.expr | None:
    """The call, or other expression, in whose evaluation the frame is."""
    tree = tree_of(frame.f_code.co_filename)
    positions, at = _positions(frame.f_code), frame.f_lasti // 2
    if tree is None or not 0 <= at < len(positions):
        return None
    # The instruction that enters a `with` has the span of the statement: what it enters was evaluated just before.
    before = positions[max(0, at - _WITHIN) : at] if (_instruction(frame) in _OPENS) else ()
    candidates = map(expressions(tree).get, (positions[at], *reversed(before)))
    return next((node for node in candidates if isinstance(node, ast.expr)), None)


def _is_undisturbed(frame: FrameType) -> bool:
    """Whether a frame is the innermost one, is suspended, or has called what cannot be a trace function: that takes three arguments."""
    for innermost in sys._current_frames().values():
        callee: FrameType | None = innermost
        if callee is frame:
            return True
        while callee is not None and callee.f_back is not frame:
            callee = callee.f_back
        if callee is not None:
            code = callee.f_code
            takes_three = code.co_argcount - ("self" in code.co_varnames[:1]) >= _TRACER_TAKES or bool(code.co_flags & inspect.CO_VARARGS)
            is_known = owner(code.co_filename) in {"torch", "python"} and str(callee.f_globals.get("__name__")) not in _TRACERS
            return is_known or not takes_three or code.co_name in _MODES
    return True  # of a coroutine


def _instruction(frame: FrameType) -> str:
    """The name of the one that runs; of a call, a frame may stand at the cache behind it."""
    code, at = frame.f_code.co_code, frame.f_lasti
    while at > 0 and dis.opname[code[at]] == "CACHE":
        at -= 2
    return dis.opname[code[at]] if 0 <= at < len(code) else ""


def calls_on_line(frame: FrameType) -> list[ast.expr]:
    """The calls that begin on the line at which the frame is."""
    return [node for node in nodes(ast.Call, tree_of(frame.f_code.co_filename)) if node.lineno == line_of(frame)]


def value_of(node: ast.expr, frame: FrameType, names: dict[str, Any] | None = None) -> Any:  # noqa: PLR0911 - one for each kind of node
    """The object that a name, an attribute, an item or a constant stands for, or `MISSING`."""
    names = names_of(frame) if names is None else names
    match node:
        case ast.Constant():
            return node.value
        case ast.Name(name):
            for space in (names, frame.f_globals, vars(builtins)):
                if name in space:
                    return space[name]
        case ast.Attribute(inner, name):
            return _attribute(value_of(inner, frame, names), name)
        case ast.Subscript(inner, index):
            return _item(value_of(inner, frame, names), value_of(index, frame, names))
        case ast.UnaryOp(ast.USub(), inner):
            value = value_of(inner, frame, names)
            return -value if type(value) in {int, float} else MISSING
        case ast.BinOp(left, how, right) if type(how) in _ARITHMETIC:
            values = value_of(left, frame, names), value_of(right, frame, names)
            return _ARITHMETIC[type(how)](*values) if all(type(value) is int for value in values) and values[1] else MISSING
    return MISSING


def function_node(code: CodeType) -> ast.AST | None:
    """The function, or the module, that a piece of code was compiled from."""
    tree = tree_of(code.co_filename)
    if is_module_code(code):
        return tree
    return next((node for node in nodes(FUNCTIONS, tree) if node.name == code.co_name and first_line(node) == code.co_firstlineno), None)


def attribute_assignment(constructor: object, attribute: str) -> ast.Assign | None:
    """The statement of an ``__init__`` of the user's that assigns ``self.attribute``."""
    code = getattr(constructor, "__code__", None)
    function = function_node(code) if code is not None and owner(code.co_filename) == "user" else None
    return next((node for node in nodes(ast.Assign, function) if f"self.{attribute}" in map(dotted, node.targets)), None)


def part_made(call: ast.expr, path: Sequence[str]) -> ast.expr:
    """What makes a part, by its path, within the call that makes its container: ``nn.Sequential(nn.ReLU(), nn.Linear(8, 2))``.

    The call itself, where the part is not written there.
    """
    if not path or not isinstance(call, ast.Call) or called(call) not in _CONTAINERS:
        return call
    name, *rest = path
    items = call.args
    match call.args:  # `nn.ModuleList([...])`, `nn.Sequential(OrderedDict([...]))`, `nn.ModuleDict({...})`
        case [ast.List(elts) | ast.Tuple(elts)] | [ast.Call(ast.Name("OrderedDict") | ast.Attribute(attr="OrderedDict"), [ast.List(elts)])]:
            items = elts
        case [ast.Dict(keys, values)]:
            items = [ast.Tuple([key or ast.Constant(None), value], ast.Load()) for key, value in zip(keys, values, strict=True)]
    named = {ast.literal_eval(item.elts[0]): item.elts[1] for item in items if _is_named(item)}
    numbered = dict(enumerate(items)) if not any(isinstance(item, ast.Starred) for item in items) else {}
    part = named.get(name) or (numbered.get(int(name)) if name.isdigit() else None)
    return call if part is None else part_made(part, rest)


def constructor_call(path: str, module_of: Callable[[str], Any]) -> tuple[Location, ast.Call] | None:
    """(the statement, the call in it) by which the constructor of a class of the user's makes the part at a path.

    `module_of` gives the module at a path, or None: several classes may have an attribute of that name.
    """
    names = path.split(".")
    for at in reversed(range(len(names))):
        constructor: Any = getattr(type(module_of(".".join(names[:at]))), "__init__", None)
        statement = attribute_assignment(constructor, names[at])
        part = None if statement is None else part_made(statement.value, names[at + 1 :])
        if statement is not None and isinstance(part, ast.Call):
            return location(constructor.__code__.co_filename, statement.lineno, "__init__"), part
    return None


def _is_named(item: ast.expr) -> TypeGuard[ast.Tuple]:
    return isinstance(item, ast.Tuple) and len(item.elts) == 2 and isinstance(item.elts[0], ast.Constant)  # noqa: PLR2004 - a pair


def _attribute(value: Any, name: str) -> Any:
    """As the object holds it: of code that the user wrote, no property and no ``__getattr__`` runs."""
    if value is MISSING:
        return MISSING
    kind: Any = type(value)
    if issubclass(kind, _PLAIN_GETTERS):
        return vars(value).get(name, MISSING)
    attributes = getattr(value, "__dict__", None) if kind.__getattribute__ is object.__getattribute__ else None
    if isinstance(attributes, dict) and name in attributes:
        return attributes[name]
    of_class = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), MISSING)
    if isinstance(of_class, (types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType, types.FunctionType)):
        try:
            return of_class.__get__(value, kind)  # a slot, a method: looked up without running anything
        except AttributeError:  # a slot that is empty
            return MISSING
    parts = attributes.get("_modules") if isinstance(attributes, dict) else None  # of an nn.Module
    return parts[name] if isinstance(parts, dict) and name in parts else of_class if not hasattr(of_class, "__get__") else MISSING


def _item(value: Any, index: Any) -> Any:
    if type(index).__module__ == "numpy" and getattr(index, "ndim", 1) == 0:
        index = index.item()
    if type(value) in {list, tuple, dict} and type(index) in {int, str, bool, float, type(None)}:
        try:
            return value[index]
        except (LookupError, TypeError):
            return MISSING
    return MISSING


@functools.lru_cache(maxsize=256)
def _positions(code: CodeType) -> tuple[Any, ...]:
    """The span of each instruction."""
    return tuple((line, column, end_line, end_column) for line, end_line, column, end_column in code.co_positions())
