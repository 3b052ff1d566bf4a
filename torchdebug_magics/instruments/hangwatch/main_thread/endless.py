"""Loops whose condition cannot change, told from the source."""

from __future__ import annotations

import ast
import linecache
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FrameType
from typing import Any

from torchdebug_magics.probing.source.call_sites import MISSING, function_node, line_of, value_of
from torchdebug_magics.probing.source.code_owner import frames_above, is_module_code, is_user_code, owner
from torchdebug_magics.probing.source.syntax import dotted, enclosing

_HARMLESS = frozenset({"print", "len", "abs", "min", "max", "int", "float", "str", "bool", "range", "isinstance", "id", "round"})
_ENDS = re.compile("KeyboardInterrupt|SystemExit|GeneratorExit")
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
        if test.holds(loop.test) and _never_left(loop, test, frame) and not any(map(_catches, enclosing(function, loop.lineno))):
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
        if isinstance(node, ast.Call) and (calls_nothing or dotted(node.func) == "next") and not _is_harmless(node, frame):
            return False
    return True


def _catches(statement: ast.stmt) -> bool:
    """Whether the function expects that an error ends a loop inside; what ends the program from outside is none."""
    if isinstance(statement, ast.With):
        texts = [ast.unparse(item.context_expr) for item in statement.items]
        return any("suppress" in text and not _ENDS.search(text) for text in texts)
    return any(one.type is None or not _ENDS.search(ast.unparse(one.type)) for one in getattr(statement, "handlers", ()))


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


def is_alone() -> bool:
    """Whether no other thread can run code of the user's."""
    stacks = sys._current_frames()
    main = threading.main_thread()
    try:
        return not any(_runs_users(one, stacks.get(one.ident or 0)) for one in threading.enumerate() if one is not main)
    finally:
        stacks.clear()  # the frame that looks is in it


def _runs_users(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a thread runs code of the user's, or is one of the standard library's that may be given some: a timer, an event loop."""
    if thread.name.startswith("torchdebug-"):
        return False
    if any(is_user_code(one.f_code) for one in frames_above(frame)):
        return True
    work = getattr(thread, "_target", None) or type(thread).run
    code = getattr(work, "__code__", None)
    whose = owner(code.co_filename) if code is not None else "user"
    is_pool = getattr(code, "co_name", "") == "_worker"  # which runs what the main thread gives it
    return whose == "user" or (whose == "python" and not is_pool)
