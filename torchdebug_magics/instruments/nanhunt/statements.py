"""Which statements belong to a step: those that made, filled or began what later ones read."""

from __future__ import annotations

import ast

from torchdebug_magics.instruments.nanhunt.livein import read_before_written, written

__all__ = ["FILLING", "draws", "makers", "root", "starts", "takes", "used", "writes_into", "written_into"]

FILLING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"})
_TAKING = frozenset({"get", "get_nowait", "pop", "popleft", "popitem", "readline", "recv"})


def makers(before: list[ast.stmt], wanted: str) -> list[ast.stmt]:
    """The statements before the model call that made a variable; none that takes from an iterator."""
    kept: list[ast.stmt] = []
    needed = {wanted} if wanted else set()
    for statement in reversed(before):
        if (written([statement]) & needed or writes_into(statement, needed)) and not draws(statement):
            kept.insert(0, statement)
            needed |= read_before_written([statement])
    if read_before_written(kept) & written(kept):
        return []  # what it began with is gone
    return kept


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
