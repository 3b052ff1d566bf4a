"""Loops whose condition cannot change, told from the source; and how far a loop with known bounds has come."""

from __future__ import annotations

import ast
import linecache
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from types import BuiltinFunctionType, FrameType
from typing import Any

from torchdebug_magics.probing.source.call_sites import MISSING, enclosing, function_node, line_of, names_of, value_of
from torchdebug_magics.probing.source.code_owner import frames_above, is_module_code, is_user_code

__all__ = ["endless_loop", "loop_progress"]

_HARMLESS = frozenset({"print", "len", "abs", "min", "max", "int", "float", "str", "bool", "range", "isinstance", "id", "round"})
_FIXED = (bool, int, float, str, bytes, type(None))
_SIMPLE = (ast.Expr, ast.Pass, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Continue)
"""Statements that neither leave a loop nor bind a name in another way than by an assignment."""
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


def endless_loop(frame: FrameType | None, *, alone: bool) -> tuple[int, str] | None:
    """(line, condition) of a ``while`` around the innermost line of the user's that certainly never ends; None where it may.

    `alone`: whether no other thread runs code of the user's, which could change a global name or a list.
    """
    if frame is None:
        return None
    function = function_node(frame.f_code)
    loops = [one for one in enclosing(function, line_of(frame)) if isinstance(one, ast.While)] if function is not None else []
    for loop in reversed(loops):
        test = _Test(frame, alone=alone)
        if test.holds(loop.test) and _never_left(loop, test, frame):
            return loop.lineno, ast.unparse(loop.test)
    return None


class _Test:
    """Conditions that are the same at every round, and the names that they are made of."""

    def __init__(self, frame: FrameType, *, alone: bool) -> None:
        self.names: set[str] = set()
        self.has_containers = False
        self.has_globals = False
        self._frame = frame
        self._alone = alone

    def holds(self, node: ast.expr) -> bool | None:
        """What a condition is now, and stays while none of `names` is stored; None where that is not certain."""
        value = self._value(node)
        return None if value is MISSING else bool(value)

    def _value(self, node: ast.expr) -> Any:  # noqa: PLR0911 - one for each kind of node
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                value = value_of(node, self._frame)
                self.names.add(name)
                return value if type(value) in _FIXED and self._is_ours(name) else MISSING
            case ast.UnaryOp(ast.Not(), inner):
                value = self._value(inner)
                return MISSING if value is MISSING else not value
            case ast.Call(ast.Name("len"), [ast.Name(name)], []) if self._alone:
                value = value_of(node.args[0], self._frame)
                self.names.add(name)
                self.has_containers = True
                return len(value) if type(value) in {list, tuple, dict, set, str} and self._is_ours(name) else MISSING
            case ast.Compare(left, [how], [right]) if type(how) in _COMPARE:
                values = self._value(left), self._value(right)
                return MISSING if MISSING in values else _COMPARE[type(how)](*values)
            case ast.BoolOp(_, parts):
                found = [self._value(part) for part in parts]
                return MISSING if MISSING in found else (all(found) if isinstance(node.op, ast.And) else any(found))
        return MISSING

    def _is_ours(self, name: str) -> bool:
        """Whether nobody else can store it: a plain local name, or a global one while no other thread can run code of the user's."""
        code = self._frame.f_code
        if name in code.co_cellvars or name in code.co_freevars:
            return False
        if not is_module_code(code) and name in code.co_varnames:
            return True
        self.has_globals = True
        return self._alone and not _may_be_stored(name, code.co_filename)


def _may_be_stored(name: str, file: str) -> bool:
    """Whether a function in this file, or in any cell, declares the name as global: a signal or a callback could run it."""
    declared = re.compile(rf"\bglobal\b[^\n]*\b{re.escape(name)}\b|\bglobals\(\)")
    sources = [linecache.getlines(file)]
    sources += [entry[2] for entry in tuple(linecache.cache.values()) if len(entry) > 2 and entry[1] is None]  # noqa: PLR2004 - read, and no file
    return any(declared.search(line) for lines in sources for line in lines)


def _never_left(loop: ast.While, test: _Test, frame: FrameType) -> bool:
    """Whether what can run in a loop neither leaves it nor stores a name of its conditions."""
    live = list(_live(loop.body, test))
    calls_nothing = isinstance(loop.test, ast.Constant) or test.has_containers or test.has_globals
    for node in live:
        if not isinstance(node, (ast.expr, *_SIMPLE)) and isinstance(node, ast.stmt):
            return False
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
        is_stored = not isinstance(getattr(node, "ctx", None), (ast.Load, type(None)))
        if is_stored and (not isinstance(node, ast.Name) or node.id in test.names) and (isinstance(node, ast.Name) or calls_nothing):
            return False
        if isinstance(node, ast.Call) and calls_nothing and not _is_harmless(node, frame):
            return False
    return True


def _live(body: Sequence[ast.stmt], test: _Test) -> Iterable[ast.AST]:
    """The parts of a body that can run, branches with a fixed condition decided."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.While)):
            yield from ast.walk(statement.test)
            holds = test.holds(statement.test)
            yield from _live(statement.body, test) if holds is not False else ()
            yield from _live(statement.orelse, test) if holds is not True or isinstance(statement, ast.While) else ()
        else:
            yield from ast.walk(statement)


def _is_harmless(call: ast.Call, frame: FrameType) -> bool:
    """Whether it can neither raise on purpose nor change a name: what waits, prints or counts."""
    function = value_of(call.func, frame)
    if type(function) is not BuiltinFunctionType and not (isinstance(function, type) and function.__module__ == "builtins"):
        return False
    return function.__module__ in {"time", "math"} or function.__name__ in _HARMLESS


def loop_progress(frame: FrameType | None) -> tuple[int, int | None] | None:
    """(iterations begun, bound) of the innermost counted loop of the user's around the frame; None where there is none."""
    for one in frames_above(frame):
        if not is_user_code(one.f_code):
            continue
        function = function_node(one.f_code)
        around = [] if function is None else [loop for loop in enclosing(function, line_of(one)) if isinstance(loop, ast.For)]
        for loop in reversed(around):
            if (found := _counted(loop, one)) is not None:
                return found
    return None


def _counted(loop: ast.For, frame: FrameType) -> tuple[int, int | None] | None:
    names = names_of(frame)
    iterated = _unwrapped(loop.iter)
    target: ast.expr = loop.target
    is_enumerated = isinstance(iterated, ast.Call) and getattr(iterated.func, "id", "") == "enumerate"
    if is_enumerated and isinstance(target, ast.Tuple):
        target = target.elts[0]
    count = names.get(target.id) if isinstance(target, ast.Name) else None
    if type(count) is not int or not isinstance(iterated, ast.Call) or getattr(iterated.func, "id", "") not in {"range", "enumerate"}:
        return None
    if is_enumerated:
        return count, _length(value_of(iterated.args[0], frame, names)) if iterated.args else None
    ends = [value_of(argument, frame, names) for argument in iterated.args]
    if not all(type(end) is int for end in ends):
        ends = [_length_call(argument, frame, names) for argument in iterated.args]
    if not ends or not all(type(end) is int for end in ends):
        return count, None
    whole = range(*ends)
    return (whole.index(count), len(whole)) if count in whole else (count, None)


def _unwrapped(node: ast.expr) -> ast.expr:
    """What is inside ``tqdm(...)``."""
    while (
        isinstance(node, ast.Call) and node.args and getattr(node.func, "id", getattr(node.func, "attr", "")) in {"tqdm", "track", "trange"}
    ):
        node = node.args[0]
    return node


def _length_call(node: ast.expr, frame: FrameType, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len" and node.args:
        return _length(value_of(node.args[0], frame, names))
    return value_of(node, frame, names)


def _length(value: Any) -> int | None:
    kind: Any = type(value)
    if isinstance(value, (list, tuple, dict, set, str)) or kind.__module__.startswith("torch.utils.data"):
        try:
            return len(value) if isinstance(value, Sized) else None
        except (TypeError, NotImplementedError):
            return None
    return None
