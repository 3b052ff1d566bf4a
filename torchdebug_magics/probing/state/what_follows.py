"""A statement that failed, run again as it might have been written, and what follows it in its block; nothing of that is left behind.

A statement that raises nothing any more may give what the next line cannot use: a change is right only if the block goes on.
"""

from __future__ import annotations

import ast
import io
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held, quiet
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.syntax import copied, lists_around, names_in, nodes, read_names, tree_of
from torchdebug_magics.probing.source.user_code import is_module_code, is_user_code, local_values
from torchdebug_magics.probing.state.rng import RandomState, same_state
from torchdebug_magics.probing.state.snapshot import KeptState

_BUDGET, _PER_LINE = 100_000, 50
"""Calls of Python functions after which a run has gone on for long enough; a line of the user's counts for more."""
_IMPORTING = "<frozen importlib._bootstrap>"
_OWN = "_torchdebug_rest", "_torchdebug_passed"
"""The function that the block becomes, and what it calls behind its first statement."""
_UNREPEATABLE = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Nonlocal)
_UNREPEATABLE_NAMES = frozenset({"super", "input", "exit", "quit", "sleep"})
_MOST_S = 3.0
"""Of one run, and twice as much of all: a net below the budget, for ops that take long. What it ends is not called verified."""
UNKNOWN = "torchdebug: no plain data"
_BOTH = 2
_HEADS = (ast.For, ast.While, ast.If, ast.With)


@dataclass(frozen=True)
class Outcome:
    """How far the block went."""

    error: BaseException | None
    """What ended it; None where nothing did, or the budget was used up."""
    has_passed: bool
    """Whether its first statement, or the head of that, did not raise."""
    is_complete: bool = True
    """Whether it went to the end, or as far as the budget of calls and lines: not where it took too long."""


class EnoughError(BaseException):
    """Ends a run that goes on; `is_late` where it has taken too long."""

    def __init__(self, *, is_late: bool) -> None:
        self.is_late = is_late


def clock_s() -> float:
    """A clock that goes slower while other programs have the processor: a verdict does not depend on them more than it must."""
    return (2 * time.thread_time() + time.monotonic()) / 3


class FailedBlock:
    """The statement at which a frame stands after an error, and the rest of its block; None of `statement` where it cannot be repeated.

    `guard` notes what could not be put back.
    """

    def __init__(self, frame: FrameType, line: int, guard: Guard) -> None:
        self.frame, self._guard = frame, guard
        around = lists_around(tree_of(frame.f_code.co_filename), (line, -1, line, -1))
        block, place = around[0] if around else ([], 0)
        self.statement: ast.stmt | None = block[place] if block else None
        self.rest = block[place + 1 :]
        """The statements behind it."""
        self._function = None if is_module_code(frame.f_code) else function_node(frame.f_code)
        self.names: Mapping[str, Any] = frame.f_globals if is_module_code(frame.f_code) else local_values(frame)
        body = [self.statement, *self.rest] if self.statement is not None else []
        is_class = not is_module_code(frame.f_code) and not isinstance(self._function, (ast.FunctionDef, ast.Lambda))
        self._left_s = 2 * _MOST_S
        if is_class or any(isinstance(node, _UNREPEATABLE) for node in nodes(ast.AST, *body)) or names_in(*body) & _UNREPEATABLE_NAMES:
            self.statement = None

    @property
    def is_repeatable(self) -> bool:
        """Whether it reads nothing by name that can be read only once, and not be put back: iterators, queues."""
        read = read_names(*([self.statement, *self.rest] if self.statement is not None else []))
        values = [self.names.get(name, self.frame.f_globals.get(name)) for name in read]
        return not any(
            (hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)) or isinstance(value, (queue.Queue, bytearray))
            for value in values
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, `run` and `value` may be called. Raises `Irrevocable` where what they do cannot be undone."""
        assert self.statement is not None
        space = self.frame.f_globals
        read = read_names(self.statement, *self.rest)
        used = [self.names.get(name, space.get(name)) for name in read]
        effects = Effects(self._guard, *used, sentence="{} cannot be undone")
        self._before = dict(space)
        self._kept = KeptState(used, self._guard, effects)
        try:
            with effects.trial():
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
        outcome = self._execute([*body, *map(copied, self.rest)], lambda: marks.append(None))
        return replace(outcome, has_passed=bool(marks))

    def is_idle(self, rounds: int, node: ast.expr) -> bool:
        """Whether more rounds of the loop that is the statement change neither what an expression gives nor any random state."""
        loop = self.statement
        assert isinstance(loop, ast.While)
        states: list[Any] = []
        shown = ast.Expr(ast.Call(ast.Name(_OWN[1], ast.Load()), [node], []))
        turns = ast.Call(ast.Name("range", ast.Load()), [ast.Constant(rounds)], [])
        again = ast.For(ast.Name("_", ast.Store()), turns, [copied(each) for each in loop.body], [copied(shown)])
        outcome = self._execute([shown, again], lambda value: states.append((frozen(value), RandomState.take())))
        if outcome.error is not None or len(states) != _BOTH or UNKNOWN in (states[0][0], states[1][0]):
            return False
        return bool(states[0][0] == states[1][0]) and same_state(vars(states[0][1]), vars(states[1][1]))

    def _execute(self, body: list[ast.stmt], passed: Callable[..., object]) -> Outcome:
        space, given = self.frame.f_globals, {_OWN[1]: passed}
        begin_s = clock_s()
        until_s = begin_s + min(_MOST_S, self._left_s)
        try:
            code = self._compiled(body)
            if self._function is None:
                space.update(given)
                with quiet(), _budgeted(until_s):
                    exec(code, space)  # noqa: S102 - the user's own statements, at their place
            else:
                exec(code, space)  # noqa: S102 - as above; it only defines the function
                function = space[_OWN[0]]
                with quiet(), _budgeted(until_s):
                    function(**{name: value for name, value in self.names.items() if name.isidentifier()}, **given)
        except (Irrevocable, KeyboardInterrupt):
            raise
        except EnoughError as enough:
            return Outcome(None, has_passed=False, is_complete=not enough.is_late)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the answer
            return Outcome(error, has_passed=False)
        finally:
            self._left_s -= clock_s() - begin_s
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


def frozen(value: Any) -> Any:
    """Plain data as it is now, to be compared later; `UNKNOWN` where there is anything else in it."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, (list, tuple, set, dict)):
        parts = [frozen(part) for part in (value.items() if isinstance(value, dict) else value)]
        return UNKNOWN if UNKNOWN in parts else (type(value), parts)
    if isinstance(value, (bool, int, float, str, bytes, range, type(None))):
        return value
    return type(value) if isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)) else UNKNOWN


@contextmanager
def _budgeted(until_s: float) -> Iterator[None]:
    """Ends the run when it has used up its budget, which is one of calls and lines: how far it comes does not depend on the machine.

    What is imported on the way is not counted.
    """
    used, imports, import_s, before = 0, 0, 0.0, sys.gettrace()

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal used, imports, import_s, until_s
        if frame.f_code.co_filename == _IMPORTING and frame.f_code.co_name == "_find_and_load":
            imports += {"call": 1, "return": -1}.get(event, 0)
            if event == "call" and imports == 1:
                import_s = clock_s()
            elif event == "return" and not imports:
                until_s += clock_s() - import_s
            return trace
        is_own = is_user_code(frame.f_code)
        used += 0 if imports else _PER_LINE if is_own else 1
        is_late = not imports and clock_s() > until_s
        if used > _BUDGET or is_late:
            raise EnoughError(is_late=is_late)
        return trace if is_own else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
