"""What edited statements are given in place of what cannot be had a second time: the next element, the head of a queue."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchdebug_magics.probing.rerun.attempt import CannotReplay
from torchdebug_magics.probing.rerun.step_statements import takes, writes_into
from torchdebug_magics.probing.tensors import is_bad, tensors_in

__all__ = ["DRAWN", "GET", "ITERATE", "NEXT", "STAND_INS", "Drawn"]

NEXT, ITERATE, GET, DRAWN = "_torchdebug_next", "_torchdebug_iterate", "_torchdebug_get", "_torchdebug_drawn_"


class Drawn:
    """Variables that hold what the step took from an iterator, a queue or a file: ``scale = next(scales)`` is not run again.

    Only where the variable still holds it: bound once in the step, at its top level, and not written into. A tensor in a graph, or
    with a NaN, must be made again to be traced.
    """

    def __init__(self, statements: list[ast.stmt], now: Mapping[str, Any], last_line: int) -> None:
        bound = Counter(
            node.id
            for statement in statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
        )
        ahead = [one for one in statements if not one.lineno <= last_line <= (one.end_lineno or one.lineno)]
        names = [name for one in ahead if (name := self._drawn(one)) and bound[name] == 1 and name in now]
        self.values = {
            name: now[name]
            for name in names
            if not any(writes_into(one, {name}) for one in statements)
            and not any(tensor.grad_fn is not None or is_bad(tensor) for tensor in tensors_in(now[name]))
        }

    def name_in(self, statement: ast.stmt) -> str:
        """The variable that the statement binds, where its value is at hand."""
        name = self._drawn(statement)
        return name if name in self.values else ""

    @staticmethod
    def _drawn(statement: ast.stmt) -> str:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not takes(statement.value):
            return ""
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else ""


class _Blank:
    """What stands for a value that must not be taken from the user's iterator again; the model gets its recorded arguments anyway."""

    def __getattr__(self, _name: str) -> _Blank:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Blank:
        return self

    def __getitem__(self, _key: Any) -> _Blank:
        return self

    def __iter__(self) -> Iterator[_Blank]:
        return iter([self, self])


def _blank_next(*_: Any) -> _Blank:
    return _Blank()


def _iterate(values: Any) -> Any:
    """A variable in the head of a ``for``; an iterator that is already running would lose elements."""
    if hasattr(type(values), "__next__"):
        msg = "the step loops over an iterator that cannot be rewound"
        raise CannotReplay(msg)
    return values


def _get(owner: Any) -> Callable[..., Any]:
    """The method `get` of a dict, say; that of an empty queue would wait for ever."""
    if hasattr(type(owner), "put"):
        msg = "the step takes from a queue"
        raise CannotReplay(msg)
    method: Callable[..., Any] = owner.get
    return method


STAND_INS: dict[str, Any] = {NEXT: _blank_next, ITERATE: _iterate, GET: _get}
