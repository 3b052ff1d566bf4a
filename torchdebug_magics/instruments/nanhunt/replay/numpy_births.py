"""A sample that NumPy made bad: it is read again while NumPy raises where it would warn, with statements changed until it is finite."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from torchdebug_magics.fixes import applied
from torchdebug_magics.instruments.nanhunt.report import NanFinding
from torchdebug_magics.instruments.nanhunt.rerun.step_rerun import StepRerun
from torchdebug_magics.instruments.nanhunt.verified_fix import in_force
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.source.edited_source import Source, cells, exchanging
from torchdebug_magics.probing.source.syntax import called, expression, nodes, tree_of
from torchdebug_magics.probing.source.user_code import excerpt, is_user_code, location, owner
from torchdebug_magics.probing.tensors import is_bad, tensors_in
from torchdebug_magics.report import Edit, Location

_NOWHERE = Location(cell=None, file="", line=0, function="", source="")
_MOST_SAMPLES, _MOST_BIRTHS, _MOST_TRIES = 20_000, 3, 4


class _Birth(NamedTuple):
    source: Any
    place: int
    """Of the sample in it."""
    where: Location
    said: str
    """By NumPy, such as ``"invalid value encountered in sqrt"``."""


def born_in_numpy(rerun: StepRerun, sources: Sequence[Any], data: NanFinding) -> NanFinding:
    """The finding at the line that makes the sample bad, with code that ends that where some does; as it was where NumPy makes none."""
    first = _asked(rerun, partial(_first_bad, sources), sources)
    if first is None or not first.where.file:
        return data
    edits = tuple[Edit, ...]()
    last: _Birth | None = first
    for _ in range(_MOST_BIRTHS):
        if last is None:
            break
        for change in _changes(last):
            behind = _asked(rerun, partial(_read_again, first.source, first.place), sources, (*edits, *change))
            if behind is None or (behind.where != last.where and behind.where is not _NOWHERE):
                edits, last = (*edits, *change), behind
                break
    statement = ast.unparse(node) if (node := _statement(first.where)) is not None else first.where.source
    code = " and ".join(f"`{edit.new}`" + (f" in line {edit.line}" if len(edits) > 1 else "") for edit in edits)
    is_verified = last is None
    return replace(
        data,
        location=first.where,
        excerpt=excerpt(first.where),
        underlined=None,
        explanation=f"`{statement}` makes sample {first.place} of the data set non-finite: NumPy says {first.said}",
        fix=f"write {code}: read again with it, the sample is finite" if is_verified else f"mind what NumPy says there: {first.said}",
        edits=edits if is_verified else (),
        fix_state="verified" if is_verified else "advice",
    )


def _asked(rerun: StepRerun, read: Callable[[list[_Birth]], object], sources: Sequence[Any], edits: tuple[Edit, ...] = ()) -> _Birth | None:
    """What a reading meets, with these edits in force."""
    births: list[_Birth] = []
    functions = [function for function in live(FunctionType) if owner(function.__code__.co_filename) == "user"]
    texts = {edit.file: _text(edit.file, [each for each in edits if each.file == edit.file]) for edit in edits}
    with in_force(texts, functions):
        replayed = rerun.call(partial(read, births), sources)
    if not births and not replayed.finished:  # it raised something else
        births.append(_Birth(None, 0, _NOWHERE, replayed.problem or "nothing"))
    return births[0] if births else None


def _text(file: str, edits: list[Edit]) -> str:
    tree = tree_of(file)
    source = Source(Location(cell=edits[0].cell, file=file, line=edits[0].line, function="", source=""), tree or ast.Module([], []))
    return applied("\n".join(source.lines), [replace(edit, line=edit.line + source.offset) for edit in edits])


def _first_bad(sources: Sequence[Any], births: list[_Birth]) -> object:
    """Read the data sets from their beginning up to the first bad sample, and that one strictly."""
    for source in sources:
        for place in range(min(len(source), _MOST_SAMPLES)):
            if any(map(is_bad, tensors_in([source[place]]))):
                return _read_again(source, place, births)
    return None


def _read_again(source: Any, place: int, births: list[_Birth]) -> object:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    try:
        with numpy.errstate(invalid="raise", divide="raise"):
            sample = source[place]
    except FloatingPointError as error:
        own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
        if own:
            code = own[-1][0].f_code
            births.append(_Birth(source, place, location(code.co_filename, own[-1][1], code.co_name), str(error)))
        return None
    if any(map(is_bad, tensors_in([sample]))):  # by something else than NumPy
        births.append(_Birth(source, place, _NOWHERE, "nothing"))
    return sample


def _statement(where: Location) -> ast.stmt | None:
    tree = tree_of(where.file)
    return None if tree is None else Source(where, tree).statement


def _changes(birth: _Birth) -> Iterator[tuple[Edit, ...]]:
    """Edits of the statement after which what NumPy speaks of is in the range of the operation."""
    statement, tried, library = _statement(birth.where), 0, _library(birth.where.file)
    for node in nodes(ast.expr, statement) if library else ():
        new = _in_range(node, birth.said.rpartition(" ")[2], library)
        if new is not None and tried < _MOST_TRIES and (edits := exchanging(birth.where, node, new)):
            tried += 1
            yield edits


def _library(file: str) -> str:
    """What the user's code calls NumPy."""
    for place in dict.fromkeys([file, *(cell.where.file for cell in cells())]):
        for name in nodes(ast.alias, tree_of(place)):
            if name.name == "numpy":
                return name.asname or name.name
    return ""


def _in_range(node: ast.expr, operation: str, library: str) -> ast.expr | None:
    match node:
        case ast.BinOp(left, ast.Div(), right) if "divide" in operation:
            text = ast.unparse(right)
            return ast.BinOp(left, ast.Div(), expression(f"{library}.where({text} == 0, 1, {text})"))
        case ast.BinOp(left, ast.Pow(), right) if operation in {"power", "sqrt"}:  # a power of 0.5 is a root
            return ast.BinOp(expression(f"{library}.maximum({ast.unparse(left)}, 0)"), ast.Pow(), right)
        case ast.Call(function, [given]) if called(node) == operation and operation in {"sqrt", "log", "log2", "log10", "log1p"}:
            least = "0" if operation == "sqrt" else "1e-12" if operation != "log1p" else "-1 + 1e-12"
            return ast.Call(function, [expression(f"{library}.maximum({ast.unparse(given)}, {least})")], node.keywords)
    return None
