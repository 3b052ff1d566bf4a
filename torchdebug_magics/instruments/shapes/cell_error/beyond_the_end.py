"""Items that are read beyond the end of their sequence: a window that its end cuts short, or an index that has no item.

Which place is read depends on a number: the index that a sampler draws, a random start, the variable of a loop. The fix lowers the bound
that this number is drawn from, by as much as the last place that it allows lies beyond the end.
"""

from __future__ import annotations

import ast
import math
import operator
import random
import re
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from torchdebug_magics.instruments.shapes.cell_error.collated import collated_batch
from torchdebug_magics.instruments.shapes.cell_error.program_slice import value_named
from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import (
    LOOPS,
    bound_inside,
    bound_names,
    called,
    covers,
    expression,
    loops_around,
    names_in,
    nodes,
    own_nodes,
    read_names,
    root_of,
    targets_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code, location

_NUMBER = re.compile(r"\d+")
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_DRAWS = frozenset({"randint", "randrange", "range", "trange"})


@dataclass(frozen=True)
class _Read:
    """The items of a container that a subscript takes, from `first` to before `end`, which lies beyond its last."""

    node: ast.Subscript
    part: ast.expr
    """The slice, or the index."""
    makers: tuple[ast.expr, ...]
    """What the numbers in it were computed by."""
    items_count: int
    first: int
    end: int

    @property
    def is_slice(self) -> bool:
        return isinstance(self.part, ast.Slice)

    @property
    def beyond(self) -> int:
        """Items that are missing."""
        return self.end - self.items_count

    @property
    def container(self) -> str:
        return ast.unparse(self.node.value)

    def sentence(self, counted: str = "") -> str:
        """What is missing, and why; `counted` says who counts more places."""
        why = f"{f'{counted}, and ' if counted else ''}`{self.container}`"
        if self.is_slice:
            missing = f"`{ast.unparse(self.node)}` has {self.items_count - self.first:,} items instead of {self.end - self.first:,}"
            return f"{missing}: {why} ends after {self.items_count:,}"
        return f"`{self.container}[{self.first}]` does not exist: {why} has {self.items_count:,} items"


@dataclass(frozen=True)
class _Reader:
    """A function that reads, and the names at that moment."""

    function: ast.AST
    file: str
    name: str
    names: dict[str, Any]

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """Those without a body, in order."""
        return [node for node in own_nodes(self.function) if isinstance(node, ast.stmt) and not hasattr(node, "body")]

    def reads(self, variable: str = "", value: int = 0) -> list[_Read]:
        """What is read beyond its end; with another value of a variable, all that it reads."""
        names, reads = dict(self.names), list[_Read]()
        if variable:
            names[variable] = value
        is_behind = not variable
        for statement in self.statements:
            is_behind = is_behind or variable in bound_names(statement) or variable in self.arguments
            match statement:
                case ast.Assign([ast.Name(name)], made) if is_behind and name != variable and (number := _number(made, names)) is not None:
                    names[name] = number
            # The variables of comprehensions over numbers, each as the largest of them.
            loops = [loop for loop in nodes(ast.comprehension, statement) if isinstance(loop.target, ast.Name)]
            largest = {ast.unparse(loop.target): _most(value_named(loop.iter, names)) for loop in loops}
            known = {name: most for name, most in largest.items() if most is not None} | names
            reads += [read for node in nodes(ast.Subscript, statement) for read in self._read(node, known)]
        return [read for read in reads if variable or ((read.first < read.items_count if read.is_slice else True) and read.beyond > 0)]

    def _read(self, node: ast.Subscript, names: dict[str, Any]) -> Iterator[_Read]:
        """What a subscript takes along each dimension, as far as its numbers are known."""
        container = value_named(node.value, names)
        for dim, part in enumerate(node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]):
            if isinstance(part, ast.Constant) and part.value in {None, ...}:
                return  # from here on, dimensions are others
            count = _count(container, dim)
            ends = (part.lower, part.upper) if isinstance(part, ast.Slice) else (part, part)
            first = 0 if ends[0] is None else _number(ends[0], names)
            end = None if ends[1] is None else _number(ends[1], names)
            if count is not None and first is not None and end is not None and 0 <= first <= end:
                made = [each for each in self.statements if isinstance(each, ast.Assign) and bound_names(each) & names_in(part)]
                makers = tuple(each.value for each in made)
                yield _Read(node, part, makers, count, first, end if isinstance(part, ast.Slice) else end + 1)

    def is_of_several(self, node: ast.Subscript) -> bool:
        """Whether a comprehension reads at many places, of which the error may name another one than the last."""
        return any(part is node for inner in nodes((ast.ListComp, ast.GeneratorExp), *self.statements) for part in ast.walk(inner))

    def flows_into(self, node: ast.Subscript, line: int) -> bool:
        """Whether what was read goes into the statement at a line, in the same round of each loop around it."""
        names, has_read = set[str](), False
        if any(not covers(loop, line) for loop in loops_around(self.function, node.lineno)):
            return False
        for statement in self.statements:
            reads_it = any(part is node for part in nodes(ast.Subscript, statement)) or (has_read and bool(names & read_names(statement)))
            has_read |= reads_it
            if covers(statement, line):
                return reads_it
            names |= bound_names(statement) if reads_it else set()
        return False

    @cached_property
    def varying(self) -> set[str]:
        """The names that loops bind."""
        return {name for node in own_nodes(self.function) if isinstance(node, (*LOOPS, ast.comprehension)) for name in bound_inside(node)}

    @property
    def arguments(self) -> set[str]:
        """The names of what it is given."""
        return {argument.arg for argument in nodes(ast.arg, self.function)}


def read_beyond_the_end(error: BaseException, *, in_model: bool) -> Failure | None:
    """Why an item is missing, or a window too short; None where nothing is read beyond its end.

    What fails `in_model` may do so for a smaller last batch, which is no fault of whoever cut it.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    sizes = set() if in_model else set(map(int, _NUMBER.findall(str(error))))
    for frame, line in reversed(frames):
        function = function_node(frame.f_code) if is_user_code(frame.f_code) else None
        if function is None:
            continue
        reader = _Reader(function, frame.f_code.co_filename, frame.f_code.co_name, {**frame.f_globals, **frame.f_locals})
        for read in reader.reads():
            is_index = isinstance(error, (IndexError, KeyError)) and read.node.lineno <= line <= (read.node.end_lineno or line)
            is_short = read.items_count - read.first in sizes or (bool(sizes) and reader.is_of_several(read.node))
            is_window = is_short and reader.flows_into(read.node, line)
            if not (is_window if read.is_slice else is_index):
                continue
            if frame.f_code.co_name == "__getitem__":
                dataset, index = (frame.f_locals.get(name) for name in (*frame.f_code.co_varnames[:2], "", "")[:2])
                return _of_dataset(error, reader, read, dataset, index)
            if fixes := _fixes_of_start(reader, read):
                return refusal(error, read.sentence(), fixes=fixes)
    return _in_batch(error, [frame for frame, _ in frames])


def _in_batch(error: BaseException, frames: list[FrameType]) -> Failure | None:
    """The same for samples that make no batch: the `__getitem__` that has cut one of them short has returned."""
    _, indices, dataset = collated_batch(frames)
    item = getattr(type(dataset), "__getitem__", None)
    if not isinstance(indices, list) or not isinstance(item, FunctionType) or not is_user_code(item.__code__):
        return None
    function, (own, variable) = function_node(item.__code__), (*item.__code__.co_varnames[:2], "", "")[:2]
    for index in indices:
        if function is None:
            return None
        names = {**item.__globals__, own: dataset, variable: index}
        reader = _Reader(function, item.__code__.co_filename, item.__name__, names)
        reads = [read for read in reader.reads(variable, index) if read.is_slice and read.first <= read.items_count < read.end]
        if reads and type(index) is int:
            return _of_dataset(error, reader, max(reads, key=lambda read: read.beyond), dataset, index)
    return None


def _of_dataset(error: BaseException, reader: _Reader, read: _Read, dataset: object, index: object) -> Failure | None:
    """The failure of a dataset whose `__len__` counts places from which it cannot read."""
    count = getattr(type(dataset), "__len__", None)
    if not isinstance(count, FunctionType) or not is_user_code(count.__code__) or type(index) is not int:
        return None
    length, own = count(dataset), count.__code__.co_varnames[0]
    variable = next((name for name, value in reader.names.items() if value is index and name in reader.arguments), "")
    if not index < length:
        return None
    sentence = read.sentence(f"`{type(dataset).__name__}.__len__` returns {length:,}")
    tree = function_node(count.__code__)
    returns = [node for node in own_nodes(tree) if isinstance(node, ast.Return) and node.value is not None]
    last = _last_place(reader, variable, index)
    if last is None or last < 0 or len(returns) != 1 or returns[0].value is None:
        return refusal(error, sentence)
    names = {own: dataset, **count.__globals__}
    counted, returned = _counted(read, last + 1, own, names), returns[0].value
    if counted is None and _number(returned, names) != length:
        return refusal(error, sentence)
    new = counted or _lowered(returned, length - last - 1, read, names)
    where = location(count.__code__.co_filename, returns[0].lineno, count.__code__.co_name)
    edits = exchanging(where, returned, new)
    fix = Fix(code=f"return {ast.unparse(new)}", verified=False, changes=edits, why="the dataset ends with the last item that is whole")
    return refusal(error, sentence, fixes=[fix])


def _counted(read: _Read, count: int, own: str, names: dict[str, Any]) -> ast.expr | None:
    """The length of the container, or how many windows it holds, in the words of the dataset; None where it is another number."""
    if not read.container.startswith(f"{own}."):
        return None
    if count == read.items_count:
        return expression(f"len({read.container})")
    lengths = [node for node in nodes(ast.Attribute, read.part, *read.makers) if value_named(node, names) == read.end - read.first]
    is_side_by_side = read.end - read.first > 1 and count == read.items_count // (read.end - read.first)
    return expression(f"len({read.container}) // {ast.unparse(lengths[0])}") if lengths and is_side_by_side else None


def _fixes_of_start(reader: _Reader, read: _Read) -> list[Fix]:
    """A lower bound of the number from which the place is drawn: in a loop over a range, or as a random start.

    None where the place depends on several such numbers, or the bound counts the items of another container, which may be the one at fault.
    """
    drawn = list(_drawn(reader, names_in(read.part)))
    if len(drawn) != 1:
        return []
    ((variable, call),) = drawn
    loops = [node for node in nodes(ast.comprehension, *reader.statements) if ast.unparse(node.target) == variable]
    value = _most(value_named(loops[0].iter, reader.names) if loops else reader.names.get(variable))
    places = [argument for argument in call.args if not isinstance(argument, (ast.Tuple, ast.List))]
    bound = next(iter(places[:2][::-1]), None)  # where the numbers end: the one argument, or the second
    limit = None if bound is None else _number(bound, reader.names)
    counts = [ast.unparse(node.args[0]) for node in nodes(ast.Call, bound) if called(node) == "len" and node.args]
    last = None if value is None else _last_place(reader, variable, value)
    if bound is None or limit is None or last is None or last < 0 or any(text != read.container for text in counts):
        return []
    is_included = value_named(call.func, reader.names) == random.randint
    less = limit - last - (not is_included)
    is_whole = not is_included and last + 1 == read.items_count and not isinstance(bound, ast.BinOp)
    new = expression(f"len({read.container})") if is_whole else _lowered(bound, less, read, reader.names, reader.varying | {variable})
    changed = ast.Call(call.func, [new if argument is bound else argument for argument in call.args], call.keywords)
    edits = exchanging(location(reader.file, call.lineno, reader.name), call, changed)
    fix = Fix(code=ast.unparse(changed), verified=False, changes=edits, why=f"`{variable}` ends with the last place that is whole")
    return [fix] if less > 0 else []


def _drawn(reader: _Reader, names: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """(variable, call) of the numbers that a place depends on, and that a call draws from a range."""
    todo, seen = list(names), set(names)
    loops = [node for node in own_nodes(reader.function) if isinstance(node, (ast.For, ast.comprehension))]
    while todo:
        name = todo.pop()
        sources = [loop.iter for loop in loops if isinstance(loop.target, ast.Name) and loop.target.id == name]
        made = [node for node in reader.statements if isinstance(node, ast.Assign) and name in map(ast.unparse, targets_of(node))]
        sources += [node.value for node in made[-1:]]
        for source in sources:
            call = next((node for node in nodes(ast.Call, source) if called(node) in _DRAWS), None)
            if call is not None:
                yield name, call
            else:
                todo += names_in(source) - seen
                seen |= names_in(source)


def _last_place(reader: _Reader, variable: str, value: int) -> int | None:
    """The largest value of a variable with which nothing is read beyond its end; None where more of it does not read further on."""
    now, before = reader.reads(variable, value), reader.reads(variable, value - 1)
    paces = [(read, read.end - other.end) for read, other in zip(now, before, strict=False) if read.node is other.node]
    lasts = [value - -(-read.beyond // pace) for read, pace in paces if pace > 0 and read.beyond > 0]
    return min(lasts, default=None)


def _lowered(bound: ast.expr, less: int, read: _Read, names: dict[str, Any], varying: Container[str] = ()) -> ast.expr:
    """A bound that is less by a number, in the words of the window's length where that is this number, or next to it."""
    match bound:
        case ast.BinOp(left, ast.Sub(), ast.Constant(int() as already)):
            bound, less = left, less + already
        case ast.BinOp(left, ast.Add(), ast.Constant(int() as more)) if more <= less:
            bound, less = left, less - more
    atoms = [node for node in nodes((ast.Name, ast.Attribute), read.part, *read.makers) if type(value_named(node, names)) is int]
    atoms = [node for node in atoms if root_of(node) not in varying]
    for more in (0, -1, 1):
        for atom in atoms if less > 1 else ():
            if value_named(atom, names) == less + more:
                rest = "" if not more else f" {'-' if more < 0 else '+'} 1"
                return expression(f"{_as_term(bound)} - {ast.unparse(atom)}{rest}")
    return expression(f"{_as_term(bound)} - {less}" if less else ast.unparse(bound))


def _as_term(node: ast.expr) -> str:
    """Its text, in brackets where a minus behind it would not take all of it."""
    is_term = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.BinOp))
    return ast.unparse(node) if is_term and not isinstance(getattr(node, "op", None), (ast.BitAnd, ast.BitOr)) else f"({ast.unparse(node)})"


def _count(container: Any, dim: int) -> int | None:
    """How many items it has along a dimension, asked without running code of the user's."""
    if isinstance(container, (torch.Tensor, np.ndarray)):
        return int(container.shape[dim]) if dim < container.ndim else None
    length = None if isinstance(container, Mapping) else getattr(type(container), "__len__", None)
    is_known = length is not None and not (isinstance(length, FunctionType) and is_user_code(length.__code__))
    return len(container) if is_known and not dim else None


def _most(value: Any) -> int | None:
    """A whole number, or the largest of several."""
    is_array = isinstance(value, (torch.Tensor, np.ndarray)) and str(value.dtype).removeprefix("torch.").startswith(("int", "uint"))
    if is_array and math.prod(value.shape):
        return int(value.max())
    if isinstance(value, (list, tuple, range)) and value and all(type(item) is int for item in value):
        return max(value)
    return int(value) if isinstance(value, (int, np.integer)) else None


def _number(node: ast.expr, names: dict[str, Any]) -> int | None:
    """The whole number that an expression of names, sums, products and lengths stands for."""
    number = None
    match node:
        case ast.Constant(value) if type(value) is int:
            number = value
        case ast.UnaryOp(ast.USub(), inner):
            number = _number(ast.BinOp(ast.Constant(0), ast.Sub(), inner), names)
        case ast.BinOp(left, sign, right) if type(sign) in _ARITHMETIC:
            values = [value for value in (_number(left, names), _number(right, names)) if value is not None]
            is_known = len(values) > 1 and (values[1] != 0 or not isinstance(sign, ast.FloorDiv))
            number = _ARITHMETIC[type(sign)](*values) if is_known else None
        case ast.Call(ast.Name("len"), [inner]):
            number = _count(value_named(inner, names), 0)
        case ast.Call(ast.Name("int"), [inner]) | ast.Call(ast.Attribute(inner, "item"), []):
            number = _number(inner, names)
        case ast.Subscript(ast.Attribute(inner, "shape"), ast.Constant(int() as dim)) | ast.Call(
            ast.Attribute(inner, "size"), [ast.Constant(int() as dim)]
        ):
            number = _count(value_named(inner, names), dim)
        case ast.Name() | ast.Attribute():
            value = value_named(node, names)
            number = _most(value) if isinstance(value, (int, np.integer)) or getattr(value, "ndim", None) == 0 else None
    return number
