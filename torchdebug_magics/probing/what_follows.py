"""A statement that failed, run again as it might have been written, and what follows it in its block; nothing of that is left behind.

A statement that raises nothing any more may give what the next line cannot use: a change is right only if the block goes on.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held, quiet
from torchdebug_magics.probing.source.call_sites import MISSING, function_node
from torchdebug_magics.probing.source.syntax import copied, lists_around, names_in, nodes, read_names, tree_of
from torchdebug_magics.probing.source.user_code import is_module_code, is_user_code, local_values
from torchdebug_magics.probing.state.snapshot import KeptState

_BUDGET, _PER_LINE = 100_000, 50
"""Calls of Python functions after which a run has gone on for long enough; a line of the user's counts for more."""
_IMPORTING = "<frozen importlib._bootstrap>"
_OWN = "_torchdebug_rest", "_torchdebug_passed"
"""The function that the block becomes, and what it calls behind its first statement."""
_UNREPEATABLE = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Nonlocal)
_UNREPEATABLE_NAMES = frozenset({"super", "input", "exit", "quit"})
_HEADS = (ast.For, ast.While, ast.If, ast.With)


@dataclass(frozen=True)
class Outcome:
    """How far the block went."""

    error: BaseException | None
    """What ended it; None where nothing did, or the budget was used up."""
    has_passed: bool
    """Whether its first statement, or the head of that, did not raise."""


class _EnoughError(BaseException):
    """Ends a run that goes on."""


class FailedBlock:
    """The statement at which a frame stands after an error, and the rest of its block; None of `statement` where it cannot be repeated.

    `guard` notes what could not be put back.
    """

    def __init__(self, frame: FrameType, line: int, guard: Guard) -> None:
        self.frame, self._guard = frame, guard
        around = lists_around(tree_of(frame.f_code.co_filename), (line, -1, line, -1))
        block, place = around[0] if around else ([], 0)
        self.statement: ast.stmt | None = block[place] if block else None
        self._rest = block[place + 1 :]
        self._function = None if is_module_code(frame.f_code) else function_node(frame.f_code)
        self.names: Mapping[str, Any] = frame.f_globals if is_module_code(frame.f_code) else local_values(frame)
        body = [self.statement, *self._rest] if self.statement is not None else []
        is_class = not is_module_code(frame.f_code) and not isinstance(self._function, (ast.FunctionDef, ast.Lambda))
        if is_class or any(isinstance(node, _UNREPEATABLE) for node in nodes(ast.AST, *body)) or names_in(*body) & _UNREPEATABLE_NAMES:
            self.statement = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, `run` and `value` may be called. Raises `Irrevocable` where what they do cannot be undone."""
        assert self.statement is not None
        space = self.frame.f_globals
        read = read_names(self.statement, *self._rest)
        used = [self.names.get(name, space.get(name)) for name in read]
        effects = Effects(self._guard, *used, sentence="{} cannot be undone")
        self._before = dict(space)
        self._kept = KeptState(used, self._guard, effects)
        try:
            with effects.trial(), quiet():
                yield
        finally:
            with interrupts_held():
                self._put_back()
                effects.finish()

    def value(self, node: ast.expr) -> Any:
        """What an expression gives at this place. Raises what it raises."""
        made: list[Any] = []
        outcome = self._execute([ast.Expr(ast.Call(ast.Name(_OWN[1], ast.Load()), [node], []))], made.append)
        if outcome.error is not None:
            raise outcome.error
        return made[0] if made else None

    def run(self, *statements: ast.stmt) -> Outcome:
        """The block with these in place of its first statement."""
        first, passed = copied(statements[-1]), ast.Expr(ast.Call(ast.Name(_OWN[1], ast.Load()), [], []))
        body = [*map(copied, statements[:-1]), first]
        if isinstance(first, _HEADS):
            first.body.insert(0, copied(passed))
        body.append(passed)
        marks: list[None] = []
        if isinstance(first, ast.Return):  # nothing behind it is reached
            value = first.value or ast.Constant(None)
            body[-2:] = [ast.Assign([ast.Name(_OWN[1], ast.Store())], value), ast.Return()]
            outcome = self._execute(body, lambda: None)
            return replace(outcome, has_passed=outcome.error is None)
        outcome = self._execute([*body, *map(copied, self._rest)], lambda: marks.append(None))
        return replace(outcome, has_passed=bool(marks))

    def after_rounds(self, loop: ast.While, rounds: int, node: ast.expr) -> Any:
        """What an expression gives after more rounds of a loop, which is the statement; `MISSING` where one of them leaves it."""
        made: list[Any] = []
        shown = ast.Expr(ast.Call(ast.Name(_OWN[1], ast.Load()), [node], []))
        turns = ast.Call(ast.Name("range", ast.Load()), [ast.Constant(rounds)], [])
        outcome = self._execute([ast.For(ast.Name("_", ast.Store()), turns, [copied(each) for each in loop.body], [shown])], made.append)
        return made[0] if made and outcome.error is None else MISSING

    def _execute(self, body: list[ast.stmt], passed: Callable[..., object]) -> Outcome:
        space, given = self.frame.f_globals, {_OWN[1]: passed}
        try:
            code = self._compiled(body)
            if self._function is None:
                space.update(given)
                with _budgeted():
                    exec(code, space)  # noqa: S102 - the user's own statements, at their place
            else:
                exec(code, space)  # noqa: S102 - as above; it only defines the function
                function = space[_OWN[0]]
                with _budgeted():
                    function(**{name: value for name, value in self.names.items() if name.isidentifier()}, **given)
        except (Irrevocable, KeyboardInterrupt):
            raise
        except _EnoughError:
            return Outcome(None, has_passed=False)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the answer
            return Outcome(error, has_passed=False)
        finally:
            self._put_back()
        return Outcome(None, has_passed=False)

    def _compiled(self, body: list[ast.stmt]) -> CodeType:
        """One round of a loop, so that `break` and `continue` have their place; inside a function, with its variables as parameters."""
        once = ast.For(ast.Name("_", ast.Store()), ast.Tuple([ast.Constant(0)], ast.Load()), body, [])
        whole: list[ast.stmt] = [once]
        if self._function is not None:
            parameters = [*(name for name in self.names if name.isidentifier()), _OWN[1]]
            stated = [copied(node) for node in nodes(ast.Global, self._function)]
            template = ast.parse(f"def {_OWN[0]}({', '.join(parameters)}): pass").body[0]
            assert isinstance(template, ast.FunctionDef)
            template.body = [*stated, once]
            whole = [template]
        text = ast.unparse(ast.fix_missing_locations(ast.Module(whole, [])))  # parts of it come from different lines
        return compile(text, self.frame.f_code.co_filename, "exec")

    def _put_back(self) -> None:
        space = self.frame.f_globals
        for name in space.keys() - self._before.keys():
            del space[name]
        space.update(self._before)
        self._kept.put_back()


@contextmanager
def _budgeted() -> Iterator[None]:
    """Ends the run when it has used up its budget, which is one of calls and lines: how far it comes does not depend on the machine.

    What is imported on the way is not counted.
    """
    used, imports, before = 0, 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal used, imports
        if frame.f_code.co_filename == _IMPORTING and frame.f_code.co_name == "_find_and_load":
            imports += {"call": 1, "return": -1}.get(event, 0)
            return trace
        is_own = is_user_code(frame.f_code)
        used += 0 if imports else _PER_LINE if is_own else 1
        if used > _BUDGET:
            raise _EnoughError
        return trace if is_own else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
