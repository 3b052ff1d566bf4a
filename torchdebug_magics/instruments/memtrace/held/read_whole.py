"""A list of an object that one method fills and another does away with, item by item, and that nobody empties: it is cleared there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchdebug_magics.memory.paths import HolderPath
from torchdebug_magics.probing.source.edited_source import Source, cells
from torchdebug_magics.probing.source.syntax import FUNCTIONS, called, covers, dotted, method, nodes, targets_of, tree_of
from torchdebug_magics.report import Edit, Location

_ADDS = frozenset({"append", "extend", "insert", "appendleft"})


def cleared_where_read(path: HolderPath, added_at: Location | None) -> tuple[str, tuple[Edit, ...]]:
    """What to write, and the edit; empty where it is not read like that by one method alone, or is emptied somewhere."""
    attribute = path.collection.rpartition(".")[2]
    tree = None if added_at is None else tree_of(added_at.file)
    if added_at is None or tree is None or not attribute.isidentifier() or path.collection == attribute:
        return "", ()
    source, name = Source(added_at, tree), f"self.{attribute}"
    kind = next((node for node in nodes(ast.ClassDef, tree) if covers(node, source.line)), None)
    methods = [node for node in nodes(FUNCTIONS, kind) if node.name != "__init__"]
    if any(name in map(dotted, targets_of(node)) for function in methods for node in nodes(ast.stmt, function)):
        return "", ()
    readers = [(function, statement) for function in methods for statement in _reading(function, name)]
    others = [node for function in methods for node in _taken_apart(function, name)]
    functions = {function.name for function, _ in readers}
    inside = {id(node) for node in nodes(ast.Attribute, kind)}
    others += [node for cell in cells() for node in nodes(ast.Attribute, cell.tree) if node.attr == attribute and id(node) not in inside]
    if len(functions) != 1 or others or covers(readers[0][0], source.line) or isinstance(readers[-1][1], ast.Return):
        return "", ()
    clear = f"{name}.clear()"
    last = readers[-1][1]
    whole = source.text(last, whole=True)
    return f"run `{clear}` in `{readers[0][0].name}`, after it was read", (source.replacing(last, f"{whole}\n{clear}", whole),)


def _reading(function: ast.AST, name: str) -> Iterator[ast.stmt]:
    """The loops of a method's own block that do away with each item: ``for handle in self.handles: handle.remove()``."""
    for statement in getattr(function, "body", ()):
        match statement:
            case ast.For(ast.Name(item), iterable, [ast.Expr(ast.Call(ast.Attribute(ast.Name(owner), _), []))]) if owner == item:
                if dotted(iterable) == name:
                    yield statement


def _taken_apart(function: ast.AST, name: str) -> Iterator[ast.AST]:
    """Where single items are read, or it is emptied, or handed out."""
    yield from (node for node in nodes(ast.Subscript, function) if dotted(node.value) == name)
    yield from (node for node in nodes(ast.Return, function) if dotted(node.value) == name)
    yield from (call for call in nodes(ast.Call, function) if name in map(dotted, call.args) and called(call) not in {"len", "print"})
    calls = [call for call in nodes(ast.Call, function) if isinstance(call.func, ast.Attribute) and dotted(call.func.value) == name]
    yield from (call for call in calls if method(call) not in _ADDS)
