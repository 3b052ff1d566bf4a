"""The user's source as syntax: text -> tree, parsed once -> statements around a line -> the names they read and bind, and what they call.

Free of torch. Trees are shared: whoever changes one works on a copy (`copied`, `exchanged`, `expression`).
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

from torchdebug_magics.probing.source.user_code import span

NodeT = TypeVar("NodeT", bound=ast.AST)
OtherT = TypeVar("OtherT", bound=ast.AST)
Span: TypeAlias = tuple[int, int, int, int]
"""Line, column, end line and end column, as `ast` counts them; a column of -1 stands for the whole line."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
WITHS = (ast.With, ast.AsyncWith)
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
FILLING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"})
"""Methods that put something into what they are called on."""
_CAPTURES = (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


class Edited(NamedTuple):
    """What stands for a file while code is tried out with a change in it."""

    tree: ast.Module
    lines: frozenset[int]
    """The lines that are not as the user wrote them."""


EDITED: dict[str, Edited] = {}
"""Edited sources by the name of the file."""


def tree_of(file: str) -> ast.Module | None:
    """The syntax tree of a cell or file as it is now; None where its source is missing or is not Python."""
    if file in EDITED:
        return EDITED[file].tree
    lines = linecache.getlines(file)
    return _parsed(tuple(lines)) if lines else None


def parsed(text: str) -> ast.Module | None:
    """The syntax tree of a text; None where it is not Python."""
    return _parsed((text,))


@functools.lru_cache(maxsize=64)
def _parsed(lines: tuple[str, ...]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None


def expression(text: str) -> ast.expr:
    """The syntax tree of one expression, to be put into another tree. Raises SyntaxError."""
    return ast.parse(text, mode="eval").body


@overload
def nodes(kind: type[NodeT], *roots: ast.AST | None) -> Iterator[NodeT]: ...
@overload
def nodes(kind: tuple[type[NodeT], type[OtherT]], *roots: ast.AST | None) -> Iterator[NodeT | OtherT]: ...
def nodes(kind: Any, *roots: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes of some types in these trees, the outer ones first."""
    return (node for root in roots if root is not None for node in ast.walk(root) if isinstance(node, kind))


def own_nodes(root: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes inside a statement, function or module in the order of the text, without those of functions and classes inside."""
    for child in ast.iter_child_nodes(root) if root is not None else ():
        yield child
        if not isinstance(child, (*SCOPES, ast.Lambda)):
            yield from own_nodes(child)


def span_as_written(code: CodeType, instruction: int, line: int) -> Span | None:
    """See `span`; None also on a line that is changed, where columns are others than the tree's."""
    edited = EDITED.get(code.co_filename)
    return None if edited is not None and line in edited.lines else span(code, instruction)


def span_of(node: ast.AST) -> Span:
    """Where an expression or statement stands."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=32)
def expressions(tree: ast.Module) -> dict[Span, ast.expr | ast.AugAssign]:
    """What an instruction may evaluate, by its span; of two with the same span, the outer one."""
    by_span: dict[Span, ast.expr | ast.AugAssign] = {}
    for node in nodes((ast.expr, ast.AugAssign), tree):
        by_span.setdefault(span_of(node), node)
    return by_span


def first_line(statement: ast.stmt) -> int:
    """The line at which a statement begins, its decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def last_line(statement: ast.stmt) -> int:
    """The line at which a statement ends."""
    return statement.end_lineno or statement.lineno


def covers(statement: ast.stmt, line: int) -> bool:
    """Whether a line is one of the statement's."""
    return first_line(statement) <= line <= last_line(statement)


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statement lists in a compound statement: body, `else`, `finally`, handlers and cases."""
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(node, name, None)
        if isinstance(inner, list) and inner:
            yield inner
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def enclosing(node: ast.AST | None, line: int) -> Iterator[ast.stmt]:
    """The statements around a line, the outermost first."""
    for block in blocks(node) if node is not None else ():
        for statement in block:
            if covers(statement, line):
                yield statement
                yield from enclosing(statement, line)


def loops_around(node: ast.AST | None, line: int) -> list[Loop]:
    """The loops around a line in the same function, the outermost first."""
    loops: list[Loop] = []
    for statement in enclosing(node, line):
        if isinstance(statement, LOOPS):
            loops.append(statement)
        elif isinstance(statement, FUNCTIONS):
            loops.clear()
    return loops


def statement_at(tree: ast.Module | None, line: int) -> ast.stmt | None:
    """The innermost statement at a line, the last of several."""
    return next(iter([*enclosing(tree, line)][::-1]), None)


def lists_around(tree: ast.Module | None, where: Span) -> list[tuple[list[ast.stmt], int]]:
    """The statement lists around a position, innermost first, each with the place of the statement that holds it.

    Stops at the function the position is in.
    """
    lists: list[tuple[list[ast.stmt], int]] = []
    body: list[ast.stmt] | None = None if tree is None else tree.body
    while body is not None:
        holder = next((place for place, statement in enumerate(body) if _holds(statement, where)), None)
        if holder is None:
            break
        lists.append((body, holder))
        statement = body[holder]
        if isinstance(statement, SCOPES) and not (where[0] < statement.body[0].lineno and statement.lineno != statement.body[0].lineno):
            lists.clear()
        body = next((inner for inner in blocks(statement) if any(_holds(child, where) for child in inner)), None)
    return lists[::-1]


def _holds(statement: ast.stmt, where: Span) -> bool:
    line, column, end_line, end_column = where
    if column < 0:
        return covers(statement, line)
    first = first_line(statement)
    start = first, statement.col_offset if first == statement.lineno else 0
    return bool(start <= (line, column) <= (end_line, end_column) <= (last_line(statement), statement.end_col_offset or 0))


def names_in(*roots: ast.AST | None) -> set[str]:
    """All variables that occur, read or bound."""
    return {node.id for node in nodes(ast.Name, *roots)}


def mentions(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether one of these variables occurs in it."""
    return not names_in(node).isdisjoint(names)


def binding(node: ast.AST) -> Iterator[str]:
    """The names that a node itself binds, without what is inside it."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, (*SCOPES, *_CAPTURES)) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.arg):
        yield node.arg


def bound_inside(root: ast.AST) -> set[str]:
    """Names that a piece of code binds in whatever scope."""
    return {name for node in ast.walk(root) for name in binding(node)}


def bound_names(*roots: ast.AST) -> set[str]:
    """Names that code binds or deletes in its own scope: not the variables of comprehensions and of functions inside."""
    return _names(roots).bound


def read_names(*roots: ast.AST) -> set[str]:
    """Names of its own scope that code reads, in whatever order; `+=` reads its target."""
    return _names(roots).read


def read_before_bound(statements: Iterable[ast.stmt]) -> set[str]:
    """Names whose value from before the statements is read."""
    known: set[str] = set()
    free: set[str] = set()
    for statement in statements:
        _scan(statement, known, free)
    return free


def _scan(statement: ast.stmt, known: set[str], free: set[str]) -> None:
    """Reads of a statement come before its bindings; a compound one is scanned in the order in which it runs."""
    inner = [] if isinstance(statement, SCOPES) else list(blocks(statement))
    head = _names([statement], frozenset(id(part) for block in inner for part in block))
    free |= head.read - known
    known |= head.bound
    for block in inner:
        # What a branch or a loop binds may not be bound after it.
        local = set(known)
        for part in block:
            _scan(part, local, free)
        if isinstance(statement, (*WITHS, ast.Try)):
            known |= local


def _names(roots: Iterable[ast.AST], skipped: frozenset[int] = frozenset()) -> _Names:
    names = _Names(skipped)
    for root in roots:
        names.visit(root)
    return names


class _Names:
    """The names that code reads and binds in its own scope; of the scopes inside, those that they take from it."""

    def __init__(self, skipped: frozenset[int] = frozenset()) -> None:
        self.read: set[str] = set()
        self.bound: set[str] = set()
        self._declared: set[str] = set()
        self._skipped = skipped
        """Ids of nodes that are left out."""

    def visit(self, node: ast.AST) -> None:
        match node:
            case _ if id(node) in self._skipped:
                pass
            case ast.Name():
                (self.read if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)
            case ast.Global() | ast.Nonlocal():
                self._declared.update(node.names)
            case ast.arg():  # only the annotation belongs to the scope around the function
                self._visit_all([] if node.annotation is None else [node.annotation])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                self._visit_scope(node)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self.visit(node.generators[0].iter)
                inner = _names(ast.iter_child_nodes(node))
                self.read |= inner.read - inner.bound
                self.bound |= {walrus.target.id for walrus in nodes(ast.NamedExpr, node)}
            case _:
                self._visit_all(ast.iter_child_nodes(node))
                self.bound.update(binding(node))
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                    self.read.add(node.target.id)

    def _visit_all(self, parts: Iterable[ast.AST]) -> None:
        for part in parts:
            self.visit(part)

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) -> None:
        body: list[Any] = node.body if isinstance(node.body, list) else [node.body]
        self._visit_all(child for child in ast.iter_child_nodes(node) if child not in body)
        self.bound.update(binding(node))
        inner = _names(body)
        own = inner.bound | {argument.arg for argument in nodes(ast.arg, getattr(node, "args", None))}
        self.read |= inner.read - (own - inner._declared)
        self.bound |= inner.bound & inner._declared


def writes_into(statement: ast.stmt, names: set[str]) -> bool:
    """``h[mask] = 0``, ``h.clamp_(0)`` and ``outs.append(h)`` change what a name holds without binding it."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store) and root_of(node) in names:
            return True
        if (name := method(node)) and root_of(node) in names and (name in FILLING or (name.endswith("_") and not name.endswith("__"))):
            return True
    return False


def makes(statement: ast.stmt, names: set[str]) -> bool:
    """Whether a statement binds one of these names, or changes what one holds."""
    return not bound_names(statement).isdisjoint(names) or writes_into(statement, names)


def backward_slice(
    before: Sequence[ast.stmt],
    wanted: set[str],
    may_run: Callable[[ast.stmt], bool] = lambda _: True,
    is_maker: Callable[[ast.stmt, set[str]], bool] = makes,
    known: frozenset[str] = frozenset(),
) -> tuple[list[ast.stmt], frozenset[str]]:
    """The statements that made what some names hold after all of them, and the names that these read whose value of then is gone.

    What a statement made that may not run again stays as it is now, and so does what was made of a value that was overwritten since,
    unless that one is `known`.
    """
    lost = frozenset[str]()
    refused: set[int] = set()
    while True:
        places = _makers(before, wanted, lambda place: place not in refused and may_run(before[place]), is_maker)  # noqa: B023 - used at once
        readers = dict(_readers_of_lost(before, places, known))
        if not readers:
            return [before[place] for place in places], lost
        lost = lost or frozenset().union(*readers.values())
        refused |= readers.keys()


def _makers(
    before: Sequence[ast.stmt], wanted: set[str], may_run: Callable[[int], bool], is_maker: Callable[[ast.stmt, set[str]], bool]
) -> list[int]:
    end = ast.Expr(ast.Tuple([ast.Name(name, ast.Load()) for name in sorted(wanted)], ast.Load()))
    kept: list[ast.stmt] = [end]
    places: list[int] = []
    needed, settled = set(wanted), set[str]()
    for place in reversed(range(len(before))):
        statement = before[place]
        if is_maker(statement, needed):
            if bound_names(statement).isdisjoint(settled) and may_run(place):
                kept.insert(0, statement)
                places.insert(0, place)
            else:
                settled |= {name for name in needed if is_maker(statement, {name})}
            needed = read_before_bound(kept) - settled
    return places


def _readers_of_lost(before: Sequence[ast.stmt], places: list[int], known: frozenset[str]) -> Iterator[tuple[int, set[str]]]:
    """The first that read a value from before the slice which was overwritten since."""
    bound, free = set[str](), set[str]()
    for place in places:
        earlier = set(free)
        _scan(before[place], bound, free)
        if gone := (free - earlier - known) & bound_names(*before[place:]):
            yield place, gone


def dotted(node: ast.AST | None) -> str:
    """``a.b.c``; empty where it begins with something else than a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def root_of(node: ast.AST) -> str:
    """The variable that ``h[0].clamp_(0)`` begins with; empty where it begins with none."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST | None) -> str:
    """``c`` of ``a.b.c`` and of ``c``; empty for what is neither."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST | None) -> str:
    """``log`` of ``torch.log(x)`` and of ``x.log()``; empty for what is not a call."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def method(node: ast.AST | None) -> str:
    """``log`` of ``x.log()`` and of ``torch.log(x)``, not of ``log(x)``; empty for what is not such a call."""
    return called(node) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def targets_of(node: ast.AST | None) -> list[ast.expr]:
    """What an assignment or a loop stores into; the parts of a tuple or list each by itself."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    else:
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)) else []
    return [part for target in targets for part in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]


def as_atom(node: ast.expr, code: str = "") -> str:
    """The code of an expression, in parentheses where a method could not be called on it otherwise."""
    code = code or ast.unparse(node)
    return code if isinstance(node, _ATOMS) else f"({code})"


def copied(tree: NodeT) -> NodeT:
    """A copy of a tree, without what others add to its nodes.

    `executing`, by which IPython shows an error, gives each node a parent; all trees share one `ast.Load`, whose parents are a whole file.
    """
    copy = type(tree)()
    for name in (*tree._fields, *tree._attributes):
        if hasattr(tree, name):
            value = getattr(tree, name)
            parts = [_copied(part) for part in value] if isinstance(value, list) else _copied(value)
            setattr(copy, name, parts)
    return copy


def _copied(value: Any) -> Any:
    return copied(value) if isinstance(value, ast.AST) else value


def exchanged(tree: NodeT, new: Callable[[ast.AST], ast.AST | None]) -> NodeT:
    """A copy of a tree with other nodes where `new` returns one."""
    changed: NodeT = _Exchange(new).visit(copied(tree))
    return changed


class _Exchange(ast.NodeTransformer):
    def __init__(self, new: Callable[[ast.AST], ast.AST | None]) -> None:
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        return self._new(node) or self.generic_visit(node)
