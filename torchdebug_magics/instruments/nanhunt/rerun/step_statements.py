"""Which statements belong to a step: those that made, filled or began what later ones read."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.syntax import bound_names, dotted, leading_to, makes, method, names_in, nodes, read_before_bound, writes_into
from torchdebug_magics.probing.tensors import is_bad, tensors_in

_TAKING = frozenset({"get", "get_nowait", "pop", "popleft", "popitem", "readline", "recv"})


def makers(before: list[ast.stmt], wanted: set[str], known: frozenset[str] = frozenset()) -> tuple[list[ast.stmt], frozenset[str]]:
    """The statements before the model call that made some variables, none that takes from an iterator; and what else they begin with.

    As far back as what they begin with is at hand: nothing has written over it since, or it is in `known`. What is not is the second.
    """
    made: list[ast.stmt] = []
    kept: list[ast.stmt] = []
    lost = frozenset[str]()
    for place in leading_to(before, wanted, lambda one, names: not draws(one) and (makes(one, names) or _is_given(one, names))):
        kept = [before[place], *kept]
        lost = frozenset(read_before_bound(kept) & bound_names(*before[place:]))
        made = kept if lost <= known else made
    return made, lost


def drawn_by(before: list[ast.stmt], names: frozenset[str]) -> ast.expr | None:
    """``x, y`` of the last ``x, y = next(batches)`` that binds one of `names`."""
    made = nodes(ast.Assign, *reversed(before))
    return next((one.targets[0] for one in made if draws(one) and bound_names(one) & names), None)


def written_into(statements: list[ast.stmt]) -> set[str]:
    """Names of lists, dicts and tensors from before the statements that these fill, and read."""
    free = read_before_bound(statements)
    return {name for name in free if any(writes_into(statement, {name}) for statement in statements)} & used(statements)


def used(statements: list[ast.stmt]) -> set[str]:
    """Names that are read for their value, not only told something."""
    calls = (node.value for node in nodes(ast.Expr, *statements) if isinstance(node.value, ast.Call))
    told = {id(call.func.value) for call in calls if isinstance(call.func, ast.Attribute)}
    return {node.id for node in nodes(ast.Name, *statements) if isinstance(node.ctx, ast.Load) and id(node) not in told}


def starts(before: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """The last statements before the model call that bind `names`: what is filled in the step must begin empty again."""
    kept: list[ast.stmt] = []
    for statement in reversed(before):
        bound = bound_names(statement) & names
        if bound and not draws(statement):
            kept.insert(0, statement)
            names = names - bound
    return kept


def _is_given(statement: ast.stmt, names: set[str]) -> bool:
    """``fill(h, x)`` and ``torch.div(h, y, out=h)``, whose value nobody takes, were called for what they do to their arguments."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    given = (*statement.value.args, *(keyword.value for keyword in statement.value.keywords))
    return any(isinstance(one, ast.Name) and one.id in names for one in given)


def draws(statement: ast.stmt) -> bool:
    """Whether anything in it is taken from an iterator."""
    return "next" in names_in(statement)


def takes(value: ast.expr) -> bool:
    """``next(batches)``, ``queue.get()``: the same call gives another value the second time."""
    return method(value) in _TAKING or (isinstance(value, ast.Call) and dotted(value.func) == "next")


class Batches:
    """The batch that each running `DataLoader` gave last, which it does not keep itself; until it is asked for the next one."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def attach(self, stack: ExitStack, hooks: Hooks) -> None:
        """Keep them until the stack closes."""
        stack.callback(self._last.clear)
        hooks.loader_batches(stack, self._around)

    def bound_by(self, target: ast.expr, names: frozenset[str]) -> Iterator[dict[str, Any]]:
        """What a loop's target, or a part of it, may have bound some names to: which loader is the loop's nobody says."""
        for batch in self._last.values():
            for part in nodes(ast.expr, target):
                bound = _bound(part, batch)
                if names <= bound.keys():
                    yield {name: bound[name] for name in names}

    def bad_sources(self) -> Iterator[Any]:
        """The data sets that a bad last batch was read from."""
        for iterator, batch in self._last.items():
            if any(map(is_bad, tensors_in(batch))) and hasattr(type(iterator._dataset), "__getitem__"):
                yield iterator._dataset

    def _around(self, original: Any, iterator: Any) -> Any:
        __tracebackhide__ = True
        self._last.pop(iterator, None)
        batch = original(iterator)
        self._last[iterator] = batch
        return batch


def _bound(target: ast.expr, element: Any) -> dict[str, Any]:
    """What the names in a loop's target are bound to by an element; nothing where it does not fit. Asks its type, which cannot fail."""
    if isinstance(target, ast.Name):
        return {target.id: element}
    if not isinstance(target, (ast.Tuple, ast.List)) or not issubclass(type(element), (tuple, list, torch.Tensor)):
        return {}
    if len(target.elts) != len(element):
        return {}
    bound: dict[str, Any] = {}
    for part, value in zip(target.elts, element, strict=True):
        inner = _bound(part, value)
        if not inner:
            return {}
        bound.update(inner)
    return bound
