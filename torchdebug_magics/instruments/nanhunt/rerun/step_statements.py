"""Which statements belong to a step: those that made, filled or began what later ones read."""

from __future__ import annotations

import ast
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from itertools import islice
from types import FrameType, GeneratorType
from typing import Any

import torch

from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import live_kinds
from torchdebug_magics.probing.source.code_owner import local_values
from torchdebug_magics.probing.source.syntax import (
    bound_names,
    dotted,
    leading_to,
    makes,
    method,
    names_in,
    nodes,
    read_before_bound,
    writes_into,
)
from torchdebug_magics.probing.tensors import is_bad, tensors_in

_TAKING = frozenset({"get", "get_nowait", "pop", "popleft", "popitem", "readline", "recv"})
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), enumerate, zip, GeneratorType)
_MOST_GUESSES = 8
"""Each costs one replay."""
_MOST_HELD = 64
"""Members of a batch that are looked at."""


def makers(before: list[ast.stmt], wanted: set[str], known: frozenset[str] = frozenset()) -> list[ast.stmt]:
    """The statements before the model call that made some variables; none that takes from an iterator.

    As far back as what they begin with is at hand: nothing has written over it since, or it is in `known`.
    """
    found: list[ast.stmt] = []
    for kept, lost in _backwards(before, wanted):
        if lost <= known:
            found = kept
    return found


def began_with(before: list[ast.stmt], wanted: set[str]) -> frozenset[str]:
    """What the statements that made some variables began with, and is gone, as something was written over it before the model call."""
    return next((lost for _, lost in reversed(list(_backwards(before, wanted)))), frozenset())


def _backwards(before: list[ast.stmt], wanted: set[str]) -> Iterator[tuple[list[ast.stmt], frozenset[str]]]:
    """Ever more of the statements that made some variables, each time with the names that they read and that were bound anew since."""
    kept: list[ast.stmt] = []
    for place in leading_to(before, wanted, lambda one, names: not draws(one) and (makes(one, names) or _is_given(one, names))):
        kept = [before[place], *kept]
        yield kept, frozenset(read_before_bound(kept) & bound_names(*before[place:]))


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


# The loop's iterator still knows which element it gave last. Which iterator is the loop's nobody says, so each that fits is a guess, and a
# guess counts only where the replay that begins with it makes the same numbers as the step made.
class Batches:
    """The batch that each running `DataLoader` gave last, which it does not keep itself; until it is asked for the next one."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def attach(self, stack: ExitStack, hooks: Hooks) -> None:
        """Keep them until the stack closes."""
        stack.callback(self._last.clear)
        hooks.loader_batches(stack, self._around)

    def last(self) -> dict[int, Any]:
        """By the id of the iterator."""
        return {id(iterator): batch for iterator, batch in self._last.items()}

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


def earlier_values(
    lost: frozenset[str], target: ast.expr | None, frame: FrameType, kept: Mapping[str, Any], batches: Mapping[int, Any]
) -> Iterator[dict[str, Any]]:
    """Guesses at what the names in `lost` held: from iterators for what `target` binds, from the caller for an argument.

    `kept`: other names that `target` binds, and what they hold still; an element that differs in these is another one.
    """
    caller = frame.f_back
    if target is not None:
        found = (bound for element in _given_last(batches) if (bound := _bound(target, element)) and _fits(bound, kept))
        guesses = ({name: bound[name] for name in lost} for bound in found if lost <= bound.keys())
    elif len(lost) == 1 and caller is not None and lost <= set(_arguments(frame)):
        guesses = ({name: value} for value in local_values(caller).values() for name in lost)
    else:
        return
    yield from islice((guess for guess in guesses if _may_be_data(guess)), _MOST_GUESSES)


def _may_be_data(value: Any, depth: int = 3) -> bool:
    """Whether it is a tensor, or a container or a record that may hold one. Asks the type, as what is met here may be any object."""
    kind = type(value)
    if issubclass(kind, (dict, UserDict, list, tuple)) and depth:
        held = value.values() if issubclass(kind, (dict, UserDict)) else value
        return any(_may_be_data(one, depth - 1) for one in islice(held, _MOST_HELD))
    return issubclass(kind, torch.Tensor) or is_dataclass(kind)


def _arguments(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _given_last(batches: Mapping[int, Any]) -> Iterator[Any]:
    """The last element of each running iterator, as far as iterators tell; of a generator whatever it holds."""
    yield from batches.values()
    for iterators in live_kinds(*_ITERATORS).values():
        for iterator in iterators:
            yield from _last(iterator, batches)


def _last(iterator: Any, batches: Mapping[int, Any]) -> Iterable[Any]:
    if id(iterator) in batches:
        return (batches[id(iterator)],)
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return () if frame is None or iterator.gi_running else tuple(local_values(frame).values())
    return _of_builtin(iterator, batches) if type(iterator) in _ITERATORS else ()


def _of_builtin(iterator: Any, batches: Mapping[int, Any]) -> Iterable[Any]:
    """What its way to be pickled says of where it stands."""
    parts = iterator.__reduce__()
    if type(iterator) is enumerate:
        inner, count = parts[1]
        return tuple((count - 1, one) for one in _last(inner, batches))
    if type(iterator) is zip:
        columns = [tuple(_last(one, batches)) for one in parts[1]]
        return (tuple(column[0] for column in columns),) if all(len(column) == 1 for column in columns) else ()
    (sequence,), place = parts[1], parts[2] if len(parts) > 2 else 0  # noqa: PLR2004 - an exhausted one has no place
    return sequence[place - 1 : place] if place else ()


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


def _fits(bound: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    return all(_same(value, kept[name]) for name, value in bound.items() if name in kept)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in {int, float, str} and one == other)
