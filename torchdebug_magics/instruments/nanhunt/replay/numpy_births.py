"""A sample that NumPy made bad: it is read again while NumPy raises where it would warn, with statements changed until it is finite."""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torchdebug_magics.instruments.nanhunt.remedies import Expression, Sources
from torchdebug_magics.instruments.nanhunt.report import NanFinding
from torchdebug_magics.instruments.nanhunt.rerun.step_rerun import StepRerun
from torchdebug_magics.instruments.nanhunt.verified_fix import Search, changed_statements, code_of
from torchdebug_magics.probing.source.edited_source import Source, cells
from torchdebug_magics.probing.source.syntax import called, nodes, parsed, tree_of
from torchdebug_magics.probing.source.user_code import excerpt, is_user_code, location
from torchdebug_magics.probing.tensors import is_bad, tensors_in
from torchdebug_magics.report import Location

_NOWHERE = Location(cell=None, file="", line=0, function="", source="")
_LEAST = {"sqrt": "0", "log1p": "-1 + 1e-12", **dict.fromkeys(("log", "log2", "log10"), "1e-12")}


class _Birth(NamedTuple):
    where: Location
    said: str
    """By NumPy, such as ``"invalid value encountered in sqrt"``."""


def born_in_numpy(rerun: StepRerun, source: Any, place: int, data: NanFinding) -> NanFinding:
    """The finding at the line that makes the sample bad, with code that ends that where some does; as it was where NumPy makes none."""
    met = partial(_met, rerun, source, place)
    first = met()
    if first is None or not first.where.file:
        return data
    search = Search(_ways, lambda _: (met(), ""), lambda birth: birth.where)
    node, edits = _statement(first.where, tree_of(first.where.file)), changed_statements(search.cure((first,), {}) or {})
    statement = first.where.source if node is None else ast.unparse(node)
    finding = replace(
        data,
        location=first.where,
        excerpt=excerpt(first.where),
        underlined=None,
        explanation=f"`{statement}` makes sample {place} of the data set non-finite: NumPy says {first.said}",
        fix=f"mind what NumPy says there: {first.said}",
    )
    code = code_of(edits, finding)
    fix = f"write {code}: read again with it, the sample is finite"
    return replace(finding, fix=fix, edits=edits, fix_state="verified") if code else finding


def _met(rerun: StepRerun, source: Any, place: int) -> _Birth | None:
    """What a reading meets."""
    births: list[_Birth] = []
    replayed = rerun.call(partial(_read_again, source, place, births), [source])
    if not births and not replayed.finished:  # it raised something else
        births.append(_Birth(_NOWHERE, replayed.problem or "nothing"))
    return births[0] if births else None


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
            births.append(_Birth(location(code.co_filename, own[-1][1], code.co_name), str(error)))
        return None
    if any(map(is_bad, tensors_in([sample]))):  # by something else than NumPy
        births.append(_Birth(_NOWHERE, "nothing"))
    return sample


def _statement(where: Location, tree: ast.Module | None) -> ast.stmt | None:
    return None if tree is None else Source(where, tree).statement


def _ways(birth: _Birth, sources: Sources) -> Iterator[Sources]:
    """The sources, each time with an operand that NumPy speaks of brought into the range of the operation."""
    file, library = birth.where.file, _library(birth.where.file)
    text = sources.get(file) or "".join(linecache.getlines(file))
    for node in nodes(ast.expr, _statement(birth.where, parsed(text))) if library else ():
        operand, bounds = _out_of_range(node, birth.said.rpartition(" ")[2])
        if operand is not None:
            whole = Expression(file, text, node)
            new = f"{library}.{bounds.format(whole.code(operand))}"
            yield {**sources, file: whole.with_node(operand, new, bracketed=isinstance(node, ast.BinOp))}


def _library(file: str) -> str:
    """What the user's code calls NumPy."""
    names = (name for place in (file, *(cell.where.file for cell in cells())) for name in nodes(ast.alias, tree_of(place)))
    return next((name.asname or name.name for name in names if name.name == "numpy"), "")


def _out_of_range(node: ast.expr, operation: str) -> tuple[ast.expr | None, str]:
    """The operand that may leave the range of an operation, and what of NumPy's brings it back."""
    match node:
        case ast.BinOp(_, ast.Div(), right) if "divide" in operation:
            return right, "where({0} == 0, 1, {0})"
        case ast.BinOp(left, ast.Pow(), _) if operation in {"power", "sqrt"}:  # a power of 0.5 is a root
            return left, "maximum({0}, 0)"
        case ast.Call(_, [given]) if called(node) == operation and operation in _LEAST:
            return given, f"maximum({{0}}, {_LEAST[operation]})"
    return None, ""
