"""Places in the user's source that give an order to what is, or may be, a set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.deterministic.counterfactual.reachable_state import reached
from torchdebug_magics.instruments.deterministic.origin.lines.line_statements import dotted
from torchdebug_magics.probing.source.call_sites import tree_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.body import Body

__all__ = ["OrderingPlace", "ordering_places"]

_ORDERING = frozenset({"list", "tuple", "enumerate", "zip", "map", "iter", "next", "dict", "join", "array", "tensor"})
"""They give an order to what has none."""
_SETTLED = frozenset({"sorted", "set", "frozenset", "len", "sum", "min", "max", "any", "all", "Counter"})
"""Whatever order they are given, they give the same."""
_KEEPING = frozenset({"append", "extend", "insert", "appendleft", "write", "index", "len"})
_PLAIN = frozenset(
    {"print", "set", "str", "int", "float", "isinstance", "abs", "range", "sorted", "min", "max", "any", "all", "hasattr", "getattr"}
)
_OF_SETS = frozenset({"union", "intersection", "difference", "symmetric_difference"})


class OrderingPlace(NamedTuple):
    """A place in the source that gives an order to what may be a set."""

    text: str
    """What is ordered, as the user writes it."""
    path: str
    """A dotted name whose value tells what is in it; empty where none does."""
    target: str
    """A name that holds what came of it."""
    is_set: bool
    """Whether it is one by what is written."""
    is_loop: bool = False
    """Whether the name is that of one thing after the other."""
    is_hash: bool = False
    is_text: bool = False
    """Whether it is a string by what is written."""
    is_pop: bool = False
    """Whether one is taken out of it."""


def ordering_places(body: Body) -> dict[str, dict[int, list[OrderingPlace]]]:
    """By file and line."""
    files: dict[str, list[ast.stmt]] = {body.file: list(body.statements)}
    for code in reached(body)[1]:
        if code.co_filename not in files and (tree := tree_of(code.co_filename)) is not None:
            files[code.co_filename] = tree.body
    found: dict[str, dict[int, list[OrderingPlace]]] = {}
    for file, statements in files.items():
        for line, one in _Places(statements).found():
            found.setdefault(file, {}).setdefault(line, []).append(one)
    return found


class _Places:
    """Of one file."""

    def __init__(self, statements: list[ast.stmt]) -> None:
        self._nodes = [node for statement in statements for node in ast.walk(statement)]
        self._target = {id(node): _target(one) for one in self._nodes if isinstance(one, ast.stmt) for node in _own(one)}
        self._line = {id(node): one.lineno for one in self._nodes if isinstance(one, ast.stmt) for node in _own(one)}
        self._settled = {
            id(inner)
            for node in self._nodes
            if isinstance(node, ast.Call) and _name(node) in _SETTLED
            for argument in node.args
            for inner in ast.walk(argument)
        }
        sorted_names = {dotted(one) for node in self._nodes if isinstance(node, ast.Call) and _name(node) == "sorted" for one in node.args}
        sorted_names |= {dotted(node.func.value) for node in self._nodes if isinstance(node, ast.Call) and _is_sort(node.func)}  # type: ignore[attr-defined]  # as was asked
        self._sorted = {one for one in sorted_names if one}

    def found(self) -> Iterator[tuple[int, OrderingPlace]]:
        for node in self._nodes:
            if id(node) in self._settled or self._target.get(id(node), "") in self._sorted:
                continue
            for one in _ordered(node):
                target = _bound(node.target) if isinstance(node, ast.For) else self._target.get(id(node), "")
                is_set = _is_set(one)
                path = dotted(_inside(one)) or ""
                if is_set or path:
                    yield (
                        self._line.get(id(node), one.lineno),
                        OrderingPlace(ast.unparse(one), path, target, is_set, isinstance(node, ast.For), is_pop=_is_pop(node)),
                    )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash" and len(node.args) == 1:
                argument = node.args[0]
                path = dotted(argument) or ""
                yield (
                    self._line.get(id(node), node.lineno),
                    OrderingPlace(ast.unparse(argument), path, "", is_set=True, is_hash=True, is_text=_is_text(argument)),
                )


def _ordered(node: ast.AST) -> Iterator[ast.expr]:
    """What the node gives an order."""
    if isinstance(node, ast.For):
        if any(map(_keeps_order, ast.walk(node))):
            yield node.iter
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        yield from (one.iter for one in node.generators)
    elif isinstance(node, ast.Starred):
        yield node.value
    elif isinstance(node, ast.Call) and _name(node) in _ORDERING:
        yield from node.args
    elif _is_pop(node):
        yield node.func.value  # type: ignore[attr-defined]  # as was asked


def _is_pop(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args


def _keeps_order(node: ast.AST) -> bool:
    """Whether the body of a loop keeps the order of its turns: by adding to a list, by numbering, or by computing on."""
    if isinstance(node, ast.Call):
        return _name(node) in _KEEPING or (isinstance(node.func, ast.Name) and node.func.id not in _PLAIN)
    return isinstance(node, (ast.Yield, ast.YieldFrom))


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set):
        return len(node.elts) > 1
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Sub, ast.BitXor)):
        return _is_set(node.left) or _is_set(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_SETS:
        return True
    return isinstance(node, ast.SetComp) or (isinstance(node, ast.Call) and _name(node) in {"set", "frozenset"} and bool(node.args))


def _inside(node: ast.expr) -> ast.expr:
    """What fills a set: ``labels`` of ``set(labels)``."""
    if isinstance(node, ast.Call) and _name(node) in {"set", "frozenset"} and node.args:
        return node.args[0]
    if isinstance(node, ast.BinOp):
        return _inside(node.left)
    return node


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that are in no statement within it."""
    yield statement
    todo: list[ast.AST] = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    while todo:
        node = todo.pop()
        yield node
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _target(statement: ast.stmt) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return _bound(targets[0]) if targets and isinstance(targets[0], ast.expr) else ""


def _bound(target: ast.expr) -> str:
    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
    return dotted(first) or ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _is_sort(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "sort"


def _name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
