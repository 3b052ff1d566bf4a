"""A size that was computed by a true division: `/` gives a float, even of two integers without a remainder, and torch wants an integer."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.source.call_sites import MISSING, value_of
from torchdebug_magics.probing.source.edited_source import HEADS, Source, cells, same
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    called,
    dotted,
    enclosing,
    exchanged,
    names_in,
    nodes,
    statement_at,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code, location

_WORDS = re.compile(r"float.*\bint|\bint.*float|integer|__index__|invalid combination of arguments")


def fractional_size(error: BaseException) -> Failure | None:
    """The division that gave it, and the same with ``//``; None where no division leads to what torch refused."""
    if not isinstance(error, TypeError) or not _WORDS.search(str(error).partition("expected one of")[0]):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_user_code(frame.f_code)]
    if not own:
        return None
    frame, line = own[-1]
    for source, statement, around in (*_of_call(frame, line), *_of_module(frames)):
        divisions = [node for node in _divisions(statement) if _is_whole(node, around)]
        if divisions:
            return _failure(error, source, statement, divisions)
    return None


Place = tuple[Source, ast.stmt, FrameType | None]


def _of_call(frame: FrameType, line: int) -> Iterator[Place]:
    """The statement that raised, and those of its function that made a float that it reads."""
    file = frame.f_code.co_filename
    tree = tree_of(file)
    statement = statement_at(tree, line)
    if tree is None or statement is None:
        return
    source = Source(location(file, line, frame.f_code.co_name), tree)
    yield source, statement, frame
    known = {**frame.f_globals, **frame.f_locals}
    read = {name for name in names_in(statement) if type(known.get(name)) is float}
    read |= {dotted(node) for node in nodes(ast.Attribute, statement) if type(value_of(node, frame)) is float}
    yield from _makers(source, read)


def _of_module(frames: list[tuple[FrameType, int]]) -> Iterator[Place]:
    """The statement that made the module which ran, of whose options one is a float, and those that made what it reads."""
    ran = [value for frame, _ in frames if isinstance(value := frame.f_locals.get("self"), torch.nn.Module)]
    options = vars(ran[-1]).values() if ran and not is_user_code(type(ran[-1]).forward.__code__) else ()
    parts = [part for value in options for part in (value if isinstance(value, tuple) else [value])]
    if not any(type(part) is float and part.is_integer() for part in parts):
        return
    simple = [(source, node) for source in cells() for node in nodes(ast.stmt, source.tree) if not hasattr(node, "body")]
    made = [(source, node) for source, node in simple if type(ran[-1]).__name__ in map(called, nodes(ast.Call, node))]
    places: list[Place] = []
    for source, statement in made:
        around = [node for node in enclosing(source.tree, statement.lineno) if isinstance(node, FUNCTIONS)]
        places += [(source, statement, None), *_makers(source, names_in(statement), *around[-1:])]
    with_division = {id(statement) for _, statement, _ in places if _divisions(statement)}
    if len(with_division) == 1:  # else which of them made this one is not known
        yield from places


def _makers(source: Source, names: set[str], *inside: ast.AST) -> Iterator[Place]:
    for statement in reversed([*nodes(ast.Assign, *(inside or [source.tree]))]):
        if names & {dotted(target) for target in targets_of(statement)}:
            yield source, statement, None


def _divisions(statement: ast.stmt) -> list[ast.BinOp]:
    """The divisions that are an assigned value, or that a call or an index is given; none where a float is given beside them."""
    given = [part for call in nodes(ast.Call, statement) for part in (*call.args, *(keyword.value for keyword in call.keywords))]
    given += [part for node in nodes(ast.Subscript, statement) for part in (node.slice, *_bounds(node.slice))]
    given += [statement.value] if isinstance(statement, ast.Assign) else []
    given += [part for node in given if isinstance(node, (ast.Tuple, ast.List)) for part in node.elts]
    given += [part for node in given if isinstance(node, ast.IfExp) for part in (node.body, node.orelse)]
    if any(type(node.value) is float for node in nodes(ast.Constant, *given)):
        return []
    return [node for node in given if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]


def _bounds(index: ast.expr) -> list[ast.expr]:
    return [part for node in nodes(ast.Slice, index) for part in (node.lower, node.upper, node.step) if part is not None]


def _is_whole(node: ast.expr, frame: FrameType | None) -> bool:
    """Whether only integers are in it, as far as they are known, and it leaves no remainder."""
    if isinstance(node, ast.BinOp):
        sides = [MISSING if frame is None else value_of(side, frame) for side in (node.left, node.right)]
        has_rest = isinstance(node.op, ast.Div) and all(type(side) is int for side in sides) and sides[1] and sides[0] % sides[1]
        return not has_rest and _is_whole(node.left, frame) and _is_whole(node.right, frame)
    if isinstance(node, ast.Call):
        return called(node) in {"len", "size", "dim", "numel", "int"}
    constant = node.value if isinstance(node, ast.Constant) else MISSING
    value: Any = constant if frame is None else value_of(node, frame)
    return type(value) is int or (value is MISSING and isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)))


def _failure(error: BaseException, source: Source, statement: ast.stmt, divisions: list[ast.BinOp]) -> Failure:
    def whole(node: ast.AST) -> ast.AST | None:
        is_one = isinstance(node, ast.BinOp) and any(same(node, division) for division in divisions)
        return ast.BinOp(node.left, ast.FloorDiv(), node.right) if is_one and isinstance(node, ast.BinOp) else None

    text = ast.unparse(exchanged(statement, whole))
    text = text.partition("\n")[0] if isinstance(statement, HEADS) else text
    where = location(source.where.file, statement.lineno - source.offset, source.where.function)
    sentence = f"`{ast.unparse(divisions[0])}` is a float, where an integer is expected: `//` divides integers"
    edits = (source.replacing(statement, text),)
    failure = refusal(error, sentence, fixes=[Fix(code=text, verified=False)])
    return replace(failure, location=where, underlined=None, edits=edits, fix_state="compiles")
