"""A dataset that says it is longer than what it reads from: the index that a sampler draws is beyond the last item."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from types import FrameType, FunctionType

from torchdebug_magics.instruments.shapes.cell_error.side_effects import UNKNOWN, value_named
from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.source.call_sites import function_node, value_of
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import expression, nodes, own_nodes, statement_at, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.report import Edit


def too_long_dataset(error: BaseException) -> Failure | None:
    """Why an index of a dataset has no item; None where the dataset is not longer than what its `__getitem__` indexes."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    reading = next((frame for frame, _ in frames if frame.f_code.co_name == "__getitem__"), None)
    if not isinstance(error, (IndexError, KeyError)) or reading is None:
        return None
    dataset, index = (reading.f_locals.get(name) for name in (*reading.f_code.co_varnames[:2], "", "")[:2])
    count = getattr(type(dataset), "__len__", None)
    if not isinstance(count, FunctionType) or not is_user_code(count.__code__) or not isinstance(index, int):
        return None
    length = count(dataset)
    for container, many in _indexed(*frames[-1], index):
        if many <= index < length:
            sentence = f"`{type(dataset).__name__}.__len__` returns {length:,}, and `{container}` has {many:,} items: "
            sentence += f"there is no `{container}[{index}]`"
            return refusal(error, sentence, fixes=_fixes(count, container))
    return None


def _indexed(frame: FrameType, line: int, index: int) -> Iterator[tuple[str, int]]:
    """What a line indexes with that index, and how many items it has."""
    for node in nodes(ast.Subscript, statement_at(tree_of(frame.f_code.co_filename), line)):
        container = value_named(node.value, {**frame.f_globals, **frame.f_locals})
        if container is not UNKNOWN and hasattr(type(container), "__len__") and value_of(node.slice, frame) == index:
            yield ast.unparse(node.value), len(container)


def _fixes(count: FunctionType, container: str) -> list[Fix]:
    """The length of the container in place of what the `return` gives, where there is one alone."""
    code = count.__code__
    if not container.startswith(f"{code.co_varnames[0]}."):
        return []
    new = f"len({container})"
    returned = [node.value for node in own_nodes(function_node(code)) if isinstance(node, ast.Return) and node.value is not None]
    edits: tuple[Edit, ...] = ()
    if len(returned) == 1:
        edits = exchanging(location(code.co_filename, returned[0].lineno, code.co_name), returned[0], expression(new))
    return [Fix(code=f"return {new}", verified=False, changes=edits, why="the dataset ends with its last item")]
