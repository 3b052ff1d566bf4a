"""The statement that a line belongs to: which names it reads and binds, what it calls, and where what it holds ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from torchdebug_magics.probing.syntax import SCOPES, binding, blocks, dotted, first_line, last_line, tree_of

_ITERATING = frozenset({"list", "tuple", "enumerate", "zip", "map", "iter", "next", "sum", "deque", "join"})


@dataclass(frozen=True)
class Called:
    """A call as it is written."""

    path: str
    text: str
    line: int
    is_bare: bool
    """Without an argument, or with None alone."""
    arguments: tuple[str, ...]
    """Names among its arguments."""


@dataclass(eq=False)
class Statement:
    """All statements that begin on one line; of a compound one the head, if its body stands on further lines."""

    first: int
    last: int
    """Of the head."""
    end: int
    """Of all that it holds."""
    parent: Statement | None
    """What holds it within the same function."""
    nodes: list[ast.AST]
    is_head: bool = False
    facts: dict[str, str] = field(default_factory=dict)
    """What the runs found of what a name holds: ``"set"``, ``"iterator"``, ``"file"``, ``"workers"``, ``"cache"``."""
    paths: tuple[str, ...] = ()
    """Dotted names, each as long as it is written."""
    read: frozenset[str] = frozenset()
    """Those whose value it uses."""
    bound: frozenset[str] = frozenset()
    added_to: frozenset[str] = frozenset()
    """Of these, the ones that `+=` and its like may change in place."""
    calls: tuple[Called, ...] = ()
    iterated: tuple[str, ...] = ()

    @property
    def is_handler(self) -> bool:
        """Whether it is an `except`, to which the line before has led."""
        return isinstance(self.nodes[0], ast.ExceptHandler)

    def reads(self, path: str) -> bool:
        """Whether it uses the value, or an attribute of it."""
        return any(one == path or one.startswith(f"{path}.") for one in self.read)

    def look(self) -> None:
        """Fill in what the syntax tree says."""
        nodes = [node for root in self.nodes for node in _walk(root)]
        self.bound = frozenset(_bound(nodes))
        self.added_to = frozenset(dotted(node.target) for node in nodes if isinstance(node, ast.AugAssign))
        self.read = frozenset(path for root in self.nodes for path in _paths(root, stored=False))
        self.paths = tuple(dict.fromkeys([path for root in self.nodes for path in _paths(root)] + sorted(self.bound)))
        self.calls = tuple(_called(node) for node in nodes if isinstance(node, ast.Call))
        self.iterated = tuple(dict.fromkeys(_iterated(nodes)))


_Lines: TypeAlias = "dict[tuple[int, str], Statement]"
"""By line; and the name of the function, where all of it stands there."""


class Statements:
    """By file and line; each file is read once."""

    def __init__(self) -> None:
        self._files: dict[str, _Lines] = {}

    def at(self, file: str, line: int, function: str = "") -> Statement | None:
        """None where no statement stands there. Of a function that is written in one line, what it does is no part of that line."""
        lines = self._lines(file)
        return lines.get((line, function)) or lines.get((line, ""))

    def knows(self, file: str) -> bool:
        """Whether its source is at hand."""
        return bool(self._lines(file))

    def _lines(self, file: str) -> _Lines:
        known = self._files.get(file)
        if known is None:
            known = self._files[file] = _read(file)
        return known


def _read(file: str) -> _Lines:
    found: _Lines = {}
    if (tree := tree_of(file)) is not None:
        _place(tree.body, None, found)
    for statement in set(found.values()):
        statement.look()
    return found


def _place(body: list[ast.stmt], parent: Statement | None, found: _Lines, function: str = "") -> None:
    for node in body:
        inner = list(blocks(node))
        first, end = first_line(node), last_line(node)
        is_head = bool(inner) and inner[0][0].lineno > node.lineno
        last = inner[0][0].lineno - 1 if is_head else end
        known = found.get((first, function))
        if known is not None and known.first == first:
            known.nodes.append(node)
            known.last, known.end = max(last, known.last), max(end, known.end)
            statement = known
        else:
            statement = Statement(first, max(first, last), end, parent, [node], is_head)
        for line in range(first, statement.last + 1):
            found[line, function] = statement
        for handler in getattr(node, "handlers", ()):
            head = Statement(handler.lineno, handler.lineno, handler.end_lineno, statement, [handler], is_head=True)
            found.setdefault((handler.lineno, function), head)
        if is_head:
            for one in inner:
                _place(one, None if isinstance(node, SCOPES) else statement, found, function)
        elif isinstance(node, SCOPES):
            _place(node.body, None, found, node.name)


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    """Its own expressions: a body on further lines is other statements."""
    yield root
    inner = list(blocks(root)) if isinstance(root, ast.stmt) or hasattr(root, "body") else []
    line = getattr(root, "lineno", 0)
    elsewhere = {id(one) for body in inner for one in body if isinstance(one, ast.stmt) and (isinstance(root, SCOPES) or one.lineno > line)}
    for child in ast.iter_child_nodes(root):
        if id(child) not in elsewhere:
            yield from _walk(child)


def _paths(root: ast.AST, *, stored: bool = True) -> Iterator[str]:
    todo = list(_walk(root))
    inner = {id(node.value) for node in todo if isinstance(node, ast.Attribute)}
    added_to = {id(node.target) for node in todo if isinstance(node, ast.AugAssign)}
    for node in todo:
        if isinstance(node, ast.Call) and dotted(node.func) == "super" and not node.args:
            yield "self"  # which it takes without a word
        if not isinstance(node, (ast.Attribute, ast.Name)) or id(node) in inner:
            continue
        if (path := dotted(node)) and (stored or isinstance(node.ctx, ast.Load) or id(node) in added_to):
            yield path


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield dotted(node)
        elif not isinstance(node, ast.arg):
            yield from binding(node)


def _called(node: ast.Call) -> Called:
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    is_bare = all(isinstance(one, ast.Constant) and one.value is None for one in given)
    return Called(dotted(node.func), ast.unparse(node), node.lineno, is_bare, tuple(path for one in given for path in _paths(one)))


def _iterated(nodes: list[ast.AST]) -> Iterator[str]:
    return (path for node in nodes for one in _gone_through(node) for path in _named(one))


def _gone_through(node: ast.AST) -> list[ast.expr]:
    """What is taken apart, item by item."""
    match node:
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            return [node.iter]
        case ast.Starred() | ast.Assign(targets=[ast.Tuple() | ast.List()]):
            return [node.value]
        case ast.Call(func=ast.Attribute(value=holder, attr="pop"), args=[]):
            return [holder]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _ITERATING:
            return node.args
        case _:
            return []


def _named(node: ast.AST) -> Iterator[str]:
    if path := dotted(node):
        yield path
    elif isinstance(node, (ast.Set, ast.SetComp)) or (isinstance(node, ast.Call) and dotted(node.func) in {"set", "frozenset"}):
        yield "{}"
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _ITERATING | {"reversed"}:
        for one in node.args:
            yield from _named(one)
