"""Loops whose condition cannot change, told from the source; those that go round without leaving, told from looks, too."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.format import duration, listed, plural
from torchdebug_magics.instruments.hangwatch.main_thread.stopped_loops import head_of, retry_loop
from torchdebug_magics.instruments.hangwatch.report import HangFinding, unending
from torchdebug_magics.instruments.hangwatch.waits.thread_waits import wait_of
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, line_of, names_of, value_of
from torchdebug_magics.probing.source.syntax import dotted, enclosing, exchanged, nodes, root_of
from torchdebug_magics.probing.source.user_code import frames_above, is_module_code, is_user_code, owner

_HARMLESS = frozenset({"print", "len", "abs", "min", "max", "int", "float", "str", "bool", "range", "isinstance", "id", "round"})
_ENDS = re.compile("KeyboardInterrupt|SystemExit|GeneratorExit")
_FIXED = (bool, int, float, str, bytes, type(None))
_SIMPLE = (ast.Expr, ast.Pass, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Continue, ast.If, ast.While)
"""Statements that neither leave a loop nor bind a name in another way than by an assignment."""
_CONTAINERS = (list, tuple, dict, set, str)
_STATELESS = frozenset({"builtins", "random", "math", "numpy", "numpy.random", "torch"})
"""Modules whose functions, and the methods of whose objects, return what their arguments say, or draw it at random."""
_IMPURE = frozenset({"next", "input", "open", "eval", "exec", "iter", "print", "map", "filter"})
_MUTABLE = (list, dict, set, deque, torch.Tensor)
_MOST_ITEMS, _MOST_NESTED, _MOST_SAID, _LONGEST = 200_000, 16, 3, 30
_FORMS = (ast.Constant, ast.UnaryOp, ast.Not, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop)
"""What a condition is made of that is computed from constants alone, and calls nothing."""


def endless_loop(frame: FrameType | None, line: int | None = None, *, alone: bool, is_over: bool = False) -> HangFinding | None:
    """A ``while`` around the innermost line of the user's that certainly never ends; None where it may.

    `alone`: whether no other thread runs code of the user's, which could change a global name or a list. `is_over`: after a Stop, at this
    line, when it is enough that nothing in the loop stores a variable of its condition, whatever it calls.
    """
    function = None if frame is None else function_node(frame.f_code)
    if frame is None or function is None:
        return None
    around = [*enclosing(function, line_of(frame) if line is None else line)]
    for at, loop in reversed([*enumerate(around)]):
        test = _Test(frame, alone=alone, is_over=is_over)
        if not isinstance(loop, ast.While) or not test.holds(loop.test):
            continue
        values = {node.id: value_of(node, frame) for node in nodes(ast.Name, loop.test) if node.id in test.names}
        if _keeps(loop, test) if is_over else _never_left(loop, test, frame) and not any(map(_catches, around[:at])):
            why, fix = "no `break` or `return` can be reached", "leave the loop with `break` or `return`"
            if values:
                why = f"nothing in the loop changes {listed([f'`{name}`' for name in values])}"
                fix = f"change `{next(iter(values))}` inside the loop, or `break`"
            return unending(f"`while {ast.unparse(loop.test)}` never ends: {why}", head_of(loop, frame), fix, _unchanged(values))
    return retry_loop([node for node in around if isinstance(node, ast.While)], frame) if alone else None


class _Test:
    """Conditions that are the same at every round, and the names that they are made of."""

    def __init__(self, frame: FrameType, *, alone: bool, is_over: bool) -> None:
        self.names: set[str] = set()
        self.is_shared = False
        """Whether a call could change them: a global name, or a list."""
        self._frame = frame
        self._alone, self._is_over = alone, is_over

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
            case ast.Call(ast.Name("len"), [ast.Name() as name], []) if self._alone and not self._is_over:
                kinds: tuple[type, ...] = _CONTAINERS
                self.is_shared = True
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
        is_shared = name in {*code.co_cellvars, *code.co_freevars}
        if is_shared and not self._is_over:
            return False
        if not is_shared and not is_module_code(code) and name in code.co_varnames:
            return True
        self.is_shared = True
        # A function in this file, or in any cell, that declares the name as global: a signal or a callback could run it.
        declared = re.compile(rf"\b(global|nonlocal)\b[^\n]*\b{re.escape(name)}\b|\bglobals\(\)")
        sources = [linecache.getlines(code.co_filename)]
        sources += [entry[2] for entry in tuple(linecache.cache.values()) if len(entry) > 2 and entry[1] is None]  # noqa: PLR2004 - read, and no file
        return self._alone and not any(declared.search(line) for lines in sources for line in lines)


def _keeps(loop: ast.While, test: _Test) -> bool:
    """Whether the condition of a loop is of variables, none of which it binds, and nothing else leaves it."""
    is_left = any(isinstance(node, (ast.Break, ast.Return, ast.Yield, ast.Raise)) for node in nodes(ast.AST, *loop.body))
    return bool(test.names) and not is_left and not test.names & syntax.bound_inside(loop)


def _never_left(loop: ast.While, test: _Test, frame: FrameType) -> bool:
    """Whether what can run in a loop neither leaves it nor stores a name of its conditions."""
    dead: set[ast.AST] = set()  # in branches with a fixed condition
    for branch in nodes((ast.If, ast.While), *loop.body):
        if (holds := test.holds(branch.test)) is not None:
            never = branch.body if not holds else branch.orelse if isinstance(branch, ast.If) else []
            dead |= {part for statement in never for part in ast.walk(statement)}
    is_shared = isinstance(loop.test, ast.Constant) or test.is_shared
    for node in nodes(ast.AST, *loop.body):
        is_stored = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if node not in dead and (
            (isinstance(node, ast.stmt) and not isinstance(node, _SIMPLE))
            or isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr))
            or (is_stored and (node.id in test.names if isinstance(node, ast.Name) else is_shared))
            or (isinstance(node, ast.Call) and (is_shared or dotted(node.func) == "next") and not _is_harmless(node, frame))
        ):
            return False
    return True


def _catches(statement: ast.stmt) -> bool:
    """Whether the function expects that an error ends a loop inside; what ends the program from outside is none."""
    if isinstance(statement, ast.With):
        texts = [ast.unparse(item.context_expr) for item in statement.items]
        return any("suppress" in text and not _ENDS.search(text) for text in texts)
    return any(one.type is None or not _ENDS.search(ast.unparse(one.type)) for one in getattr(statement, "handlers", ()))


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


class _Ends(NamedTuple):
    """What the source of a loop says of its end."""

    ways: list[str]
    calls: set[ast.Call]
    """Those that make the values in its conditions, or could change them."""
    begins_with: dict[str, ast.expr]
    """The variables and attributes that a round has from before."""
    bound: str
    """A variable that each round binds once."""
    is_search: bool
    """Whether a round makes what its conditions are about; else it may be another thread's to end it."""


class _Stay(NamedTuple):
    """In one activation of a loop, while each round begins with the same."""

    frame: FrameType | None
    """Held from the second look on, so that no other activation gets its address."""
    loop: ast.While
    ends: _Ends
    since_s: float
    begins_with: list[object]
    bound: int
    rounds: int


class Rounds:
    """The ``while`` loops in which all the latest looks have found the main thread, the innermost first.

    A round that begins with the same as the one before, and asks nothing else than chance, ends as that did: other lines are no progress.
    """

    def __init__(self) -> None:
        self._stays: dict[tuple[int, ast.While], _Stay] = {}

    def look(self, users: Sequence[FrameType], now_s: float, *, is_news: bool = False) -> None:
        """Note where it stands: `is_news` where something went on by itself, as a step of an optimizer."""
        before, self._stays = {} if is_news else self._stays, {}
        for frame in users:
            for loop, ends in _whiles(frame.f_code, line_of(frame)):
                names, past = names_of(frame), before.get((id(frame), loop))
                begins_with = [_print(node, value_of(node, frame, names)) for node in ends.begins_with.values()]
                stay = _Stay(None, loop, ends, now_s, begins_with, id(names.get(ends.bound)), 0)
                if past is not None and past.frame in {None, frame} and (past.begins_with == begins_with or not names):
                    bound = stay.bound if names else past.bound  # without names, it must not be looked at just now
                    stay = past._replace(frame=frame, bound=bound, rounds=past.rounds + (bound != past.bound))
                self._stays[id(frame), loop] = stay
        if self._stays and wait_of([*frames_above(users[0])]) is not None:
            self._stays.clear()

    def longer_than(self, after_s: float, now_s: float, *, alone: bool) -> HangFinding | None:
        """The innermost that has gone round for so long."""
        for frame, loop, ends, since_s, _, _, rounds in self._stays.values():
            names = names_of(frame) if frame is not None and now_s - since_s >= after_s else {}
            if frame is None or not names or rounds <= 1 or not (alone or ends.is_search):
                continue
            if all(_is_pure(call, frame, names) for call in ends.calls):
                values = {path: value_of(node, frame, names) for path, node in ends.begins_with.items()}
                headline = f"`while {ast.unparse(loop.test)}` has gone round for {duration(now_s - since_s)} without leaving"
                headline += f": it ends only where {' or '.join(ends.ways[:_MOST_SAID])}"
                fix = "check before the loop that this can happen, or bound the number of rounds"
                return unending(headline, head_of(loop, frame), fix, _unchanged(values), "slow")
        return None


@functools.lru_cache(maxsize=256)
def _whiles(code: CodeType, line: int) -> list[tuple[ast.While, _Ends]]:
    """The ``while`` loops around a line whose ends are known, the innermost first."""
    loops = syntax.loops_around(function_node(code), line)
    return [(loop, ends) for at, loop in enumerate(loops) if isinstance(loop, ast.While) and (ends := _ends(loop, *loops[:at]))][::-1]


def _ends(loop: ast.While, *around: syntax.Loop) -> _Ends | None:
    """None where the source does not say under which conditions it ends, or what these are of."""
    exits = list(_exits(loop))
    ways = [] if isinstance(loop.test, ast.Constant) else [f"`{ast.unparse(loop.test)}` is false"]
    ways += (f"`{ast.unparse(ast.BoolOp(ast.And(), tests))}`" for tests in exits)
    tests = [loop.test, *(test for tests in exits for test in tests)]
    made, _ = syntax.backward_slice(loop.body, syntax.names_in(*tests))
    known = syntax.read_before_bound([*loop.body, ast.Expr(loop.test)])
    reads = _reads(*tests, *made)
    is_hidden = any(isinstance(node, ast.Attribute) and root_of(node) not in known for node in reads)  # what only another object leads to
    if not ways or not all(exits) or is_hidden or any(nodes((ast.Await, ast.Yield), loop)) or any(nodes(ast.YieldFrom, loop)):
        return None
    bound = [name for statement in loop.body if isinstance(statement, syntax.SIMPLE) for name in syntax.bound_names(statement)]
    inner = {name for part in nodes((ast.For, ast.While), *loop.body) for name in syntax.bound_inside(part)}
    outside = [node for node in _reads(*around) if root_of(node) not in syntax.bound_inside(loop)]
    begins_with = {dotted(node): node for node in (*reads, *outside) if dotted(node) and (root_of(node) in known or node in outside)}
    shared = known & syntax.names_in(*tests, *made)
    calls = {call for call in nodes(ast.Call, loop) if syntax.mentions(call, shared)} | {*nodes(ast.Call, *tests, *made)}
    return _Ends([*dict.fromkeys(ways)], calls, begins_with, next((name for name in bound if name not in inner), ""), bool(made))


def _reads(*parts: ast.AST) -> list[ast.expr]:
    """The variables and attributes in some code, without the functions that it calls."""
    functions = {call.func for call in nodes(ast.Call, *parts)}
    return [node for node in nodes((ast.Name, ast.Attribute), *parts) if node not in functions]


def _exits(loop: ast.While) -> Iterator[list[ast.expr]]:
    """The conditions around each statement that leaves it."""
    for node in syntax.own_nodes(loop):
        if isinstance(node, (ast.Return, ast.Raise, ast.Break)):
            around = [*enclosing(loop, node.lineno)]
            ifs = [(part.test, node.lineno <= syntax.last_line(part.body[-1])) for part in around if isinstance(part, ast.If)]
            if not (isinstance(node, ast.Break) and any(isinstance(part, syntax.LOOPS) for part in around)):
                yield [test if is_met else ast.UnaryOp(ast.Not(), test) for test, is_met in ifs]


def _print(node: ast.expr, value: Any, *, is_inside: bool = False) -> object:
    """Equal while a value stays as it is; never where only code of its own could tell."""
    kind = type(value)
    if kind in _FIXED:
        return kind, value
    if isinstance(value, torch.Tensor):
        return (id(value), value._version) if kind in {torch.Tensor, torch.nn.Parameter} and not value.is_inference() else object()
    if kind.__module__ == "numpy" and hasattr(value, "nbytes"):
        return value.tobytes() if value.nbytes < _MOST_ITEMS else object()
    if isinstance(value, (*_CONTAINERS, frozenset, deque)):
        items = [*value, *(value.values() if isinstance(value, dict) else ())] if kind.__module__ in {"builtins", "collections"} else [[]]
        is_nested = any(issubclass(kind, _MUTABLE) or kind.__module__ == "numpy" for kind in {*map(type, items)})
        if is_nested and not is_inside and len(items) <= _MOST_NESTED:  # such as the states of a recurrent layer
            return id(value), tuple(_print(node, item, is_inside=True) for item in items)
        return object() if is_nested or len(items) > _MOST_ITEMS else (id(value), hash(tuple(map(id, items))))
    is_unknown = hasattr(kind, "__next__") or (value is MISSING and isinstance(node, ast.Attribute))
    return object() if is_unknown else id(value)


def _unchanged(values: Mapping[str, Any]) -> str:
    """What variables and attributes hold that stay as they are, for the reason of a finding."""
    still = []
    for path, value in values.items():
        if isinstance(value, _CONTAINERS) and type(value) is not str:
            still.append(f"`{path}` has {plural(len(value), 'item')}")
        elif type(value) in _FIXED and len(text := repr(value)) <= _LONGEST:
            still.append(f"`{path}` is {text}")
    return f"unchanged meanwhile: {', '.join(still[:_MOST_SAID])}" if still else ""


def _is_pure(call: ast.Call, frame: FrameType, names: dict[str, Any]) -> bool:
    """Whether what it returns depends on its arguments and on chance alone, and it changes nothing but what it is a method of."""
    whose = value_of(call.func.value if isinstance(call.func, ast.Attribute) else call.func, frame, names)
    if whose is MISSING:
        return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, (ast.Call, ast.BinOp))
    if isinstance(whose, (BuiltinFunctionType, MethodType)):
        whose = whose.__self__
    if isinstance(whose, ModuleType):
        return whose.__name__ in _STATELESS and syntax.called(call) not in _IMPURE
    kind = whose if isinstance(whose, type) else type(whose)
    is_data = kind is whose or not (callable(whose) or hasattr(kind, "__next__"))
    return is_data and kind.__module__.partition(".")[0] in {*_STATELESS, "collections"} and syntax.called(call) not in _IMPURE
