"""Loops whose condition cannot change, told from the source."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from types import BuiltinFunctionType, FrameType

from torchdebug_magics.probing.source.call_sites import function_node, line_of, value_of
from torchdebug_magics.probing.source.syntax import dotted, enclosing, exchanged
from torchdebug_magics.probing.source.user_code import frames_above, is_module_code, is_user_code, owner

_HARMLESS = frozenset({"print", "len", "abs", "min", "max", "int", "float", "str", "bool", "range", "isinstance", "id", "round"})
_ENDS = re.compile("KeyboardInterrupt|SystemExit|GeneratorExit")
_FIXED = (bool, int, float, str, bytes, type(None))
_SIMPLE = (ast.Expr, ast.Pass, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Continue)
"""Statements that neither leave a loop nor bind a name in another way than by an assignment."""
_CONTAINERS = (list, tuple, dict, set, str)
_FORMS = (ast.Constant, ast.UnaryOp, ast.Not, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop)
"""What a condition is made of that is computed from constants alone, and calls nothing."""


def endless_loop(frame: FrameType | None, *, alone: bool) -> tuple[int, str] | None:
    """(line, condition) of a ``while`` around the innermost line of the user's that certainly never ends; None where it may.

    `alone`: whether no other thread runs code of the user's, which could change a global name or a list.
    """
    if frame is None:
        return None
    function = function_node(frame.f_code)
    loops = [node for node in enclosing(function, line_of(frame)) if isinstance(node, ast.While)] if function is not None else []
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
        fixed = exchanged(node, self._constant)
        if not all(isinstance(part, _FORMS) for part in ast.walk(fixed)):
            return None
        with contextlib.suppress(TypeError):  # what cannot be compared ends the loop
            return bool(eval(compile(ast.Expression(fixed), "<condition>", "eval"), {}))  # noqa: S307 - constants alone
        return None

    def _constant(self, node: ast.AST) -> ast.expr | None:
        """The value of a name, or of ``len(name)``, in its place; None for any other node, and for what may change."""
        match node:
            case ast.Call(ast.Name("len"), [ast.Name() as name], []) if self._alone:
                kinds: tuple[type, ...] = _CONTAINERS
                self.has_containers = True
            case ast.Name() as name:
                kinds = _FIXED
            case _:
                return None
        value = value_of(name, self._frame)
        self.names.add(name.id)
        if type(value) not in kinds or not self._is_ours(name.id):
            return None
        return ast.copy_location(ast.Constant(value if kinds is _FIXED else len(value)), name)

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
    stacks, main = sys._current_frames(), threading.main_thread()
    try:
        return not any(_runs_users(thread, stacks.get(thread.ident or 0)) for thread in threading.enumerate() if thread is not main)
    finally:
        stacks.clear()  # the frame that looks is in it


def _runs_users(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a thread runs code of the user's, or is one of the standard library's that may be given some: a timer, an event loop."""
    if thread.name.startswith("torchdebug-"):
        return False
    if any(is_user_code(frame.f_code) for frame in frames_above(frame)):
        return True
    work = getattr(thread, "_target", None) or type(thread).run
    code = getattr(work, "__code__", None)
    whose = owner(code.co_filename) if code is not None else "user"
    is_pool = getattr(code, "co_name", "") == "_worker"  # which runs what the main thread gives it
    return whose == "user" or (whose == "python" and not is_pool)
