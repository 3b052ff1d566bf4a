"""Which statements belong to a step: those that made, filled or began what later ones read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchdebug_magics.probing.source.statement_lists import read_before_written, written

__all__ = ["FILLING", "began_with", "drawn_by", "draws", "makers", "root", "starts", "takes", "used", "writes_into", "written_into"]

FILLING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"})
_TAKING = frozenset({"get", "get_nowait", "pop", "popleft", "popitem", "readline", "recv"})


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
    needed = set(wanted)
    for place, statement in reversed(list(enumerate(before))):
        makes = written([statement]) & needed or writes_into(statement, needed) or _is_given(statement, needed)
        if makes and not draws(statement):
            kept = [statement, *kept]
            needed |= read_before_written([statement])
            yield kept, frozenset(read_before_written(kept) & written(before[place:]))


def drawn_by(before: list[ast.stmt], names: frozenset[str]) -> ast.expr | None:
    """``x, y`` of the last ``x, y = next(batches)`` that binds one of `names`."""
    nodes = (node for statement in reversed(before) for node in ast.walk(statement))
    return next((one.targets[0] for one in nodes if isinstance(one, ast.Assign) and draws(one) and written([one]) & names), None)


def written_into(statements: list[ast.stmt]) -> set[str]:
    """Names of lists, dicts and tensors from before the statements that these fill, and read."""
    free = read_before_written(statements)
    return {name for name in free if any(writes_into(statement, {name}) for statement in statements)} & used(statements)


def used(statements: list[ast.stmt]) -> set[str]:
    """Names that are read for their value, not only told something."""
    told = {
        id(node.value.func.value)
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
    }
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in told
    }


def starts(before: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """The last statements before the model call that bind `names`: what is filled in the step must begin empty again."""
    kept: list[ast.stmt] = []
    for statement in reversed(before):
        bound = written([statement]) & names
        if bound and not draws(statement):
            kept.insert(0, statement)
            names = names - bound
    return kept


def writes_into(statement: ast.stmt, names: set[str]) -> bool:
    """``h[mask] = 0``, ``h.clamp_(0)`` and ``outs.append(h)`` change what a name holds without binding it."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store) and root(node) in names:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and root(node.func) in names:
            method = node.func.attr
            if method in FILLING or (method.endswith("_") and not method.endswith("__")):
                return True
    return False


def _is_given(statement: ast.stmt, names: set[str]) -> bool:
    """``fill(h, x)`` and ``torch.div(h, y, out=h)``, whose value nobody takes, were called for what they do to their arguments."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    given = (*statement.value.args, *(keyword.value for keyword in statement.value.keywords))
    return any(isinstance(one, ast.Name) and one.id in names for one in given)


def draws(statement: ast.stmt) -> bool:
    """Whether anything in it is taken from an iterator."""
    return any(isinstance(node, ast.Name) and node.id == "next" for node in ast.walk(statement))


def takes(value: ast.expr) -> bool:
    """``next(batches)``, ``queue.get()``: the same call gives another value the second time."""
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    return called.id == "next" if isinstance(called, ast.Name) else isinstance(called, ast.Attribute) and called.attr in _TAKING


def root(node: ast.AST) -> str:
    """The variable that ``h[0].clamp_(0)`` begins with; nothing for none."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
