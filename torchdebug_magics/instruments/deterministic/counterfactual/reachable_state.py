"""What a body reaches by name and does not make itself: which of it a run changes, and at which line."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.ops.recorder import Recorder
from torchdebug_magics.instruments.deterministic.ops.recording import Recording
from torchdebug_magics.instruments.deterministic.origin.digests import Digests, is_users
from torchdebug_magics.instruments.deterministic.twice.runs import Enough
from torchdebug_magics.probing.where import is_user_code, location
from torchdebug_magics.probing.written import writes_of

if TYPE_CHECKING:
    from types import FrameType

    from torchdebug_magics.instruments.deterministic.twice.body import Body
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs
    from torchdebug_magics.probing.contents import Contents
    from torchdebug_magics.report import Location

__all__ = ["OF_GRADIENTS", "changed_names", "digests_by_name", "line_that_changes", "reached"]

OF_GRADIENTS = ".grad"
"""What is put behind the name of a module for the gradients of its parameters."""
_MOST_FUNCTIONS = 200
_MOST_LINES = 20_000
_MOST_S = 3.0


def digests_by_name(body: Body) -> dict[str, tuple[int, int]]:
    """(identity, digest) of each value, as it is now; weights of modules are told by their memory."""
    names = {name: body.namespace[name] for name in reached(body)[0] if name in body.namespace}
    found = {name: (id(value), _digest(value)) for name, value in names.items() if not isinstance(value, (type, ModuleType))}
    modules = {name: value for name, value in names.items() if isinstance(value, torch.nn.Module)}
    return found | {f"{name}{OF_GRADIENTS}": (0, _digest([one.grad for one in value.parameters()])) for name, value in modules.items()}


def changed_names(body: Body, start: dict[str, tuple[int, int]], end: dict[str, tuple[int, int]]) -> tuple[str, ...]:
    """Names whose value was changed in place; else those that the body reads first and binds anew then."""
    differing = [name for name, (_, digest) in start.items() if name in end and end[name][1] != digest]
    in_place = tuple(name for name in differing if end[name][0] == start[name][0])
    return in_place or tuple(name for name in differing if _is_read_first(body, name))


def line_that_changes(runs: Runs, name: str) -> Location | None:
    """The line of the user's after which a value is another one than at the start; one run, as far as that line."""
    if sys.gettrace() is not None:
        return None
    watch = _LineWatch(runs, name)
    runs.again(watch)
    return watch.found


class _LineWatch:
    """Digests one value after each line."""

    def __init__(self, runs: Runs, name: str) -> None:
        self.found: Location | None = None
        self._recorder = Recorder(Recording(), lambda _seen, _op: None, runs.guard, runs.hooks)
        self._namespace = runs.body.namespace
        self._name = name
        self._start = _digest(self._namespace.get(name))
        self._last: tuple[str, int, str] | None = None
        self._lines = 0
        self._begin_s = time.monotonic()

    @property
    def contents(self) -> Contents:
        """What the run has written."""
        return self._recorder.contents

    def attach(self, stack: ExitStack) -> None:
        """From here until the stack closes."""
        self._recorder.attach(stack)
        stack.callback(sys.settrace, None)
        sys.settrace(self._entered)

    def _entered(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._line if is_user_code(frame.f_code) and frame.f_code.co_filename != "<string>" else None

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event not in {"line", "return"}:
            return self._line
        self._lines += 1
        if _digest(self._namespace.get(self._name)) != self._start:
            self.found = location(*self._last) if self._last is not None else None
            raise Enough
        if self._lines > _MOST_LINES or time.monotonic() - self._begin_s > _MOST_S:
            raise Enough
        self._last = frame.f_code.co_filename, frame.f_lineno or 1, frame.f_code.co_name
        return self._line


def _digest(value: Any) -> int:
    digests = Digests()  # a new one: objects are numbered in the order in which they are met
    return hash((digests.of(value), tuple(digest for _, digest in digests.inside(value))))


def reached(body: Body) -> tuple[set[str], list[CodeType]]:
    """Names in the body and in the functions and methods of the user's that it reaches by name; and their code."""
    names = {node.id for statement in body.statements for node in ast.walk(statement) if isinstance(node, ast.Name)}
    names |= body.variables.keys()
    todo, codes = sorted(names), dict[CodeType, None]()
    while todo and len(codes) < _MOST_FUNCTIONS:
        for function in _functions(body.namespace.get(todo.pop())):
            if function.__code__ not in codes:
                codes[function.__code__] = None
                new = writes_of(function.__code__).loaded - names
                names |= new
                todo += sorted(new)
    return names - body.hidden, list(codes)


def _functions(value: object) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        if is_user_code(value.__code__):
            yield value
        return
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ != "builtins" and is_users(kind):
        yield from (one for one in vars(kind).values() if isinstance(one, FunctionType))


def _is_read_first(body: Body, name: str) -> bool:
    for statement in body.statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return True
        found = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        if found:
            return any(isinstance(node.ctx, ast.Load) for node in found)
    return False
