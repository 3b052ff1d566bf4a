"""The statements of a step, from the model call to `backward()`, as code that can run once more without side effects of its own."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torchdebug_magics.instruments.nanhunt.livein import lists_around, local_values, parse, read_before_written, written
from torchdebug_magics.probing.where import adopt_timed, owner, span

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.step import Position, Step

__all__ = ["CannotReplay", "Slice", "cut"]

_REPORTING = frozenset(
    [
        "append",
        "appendleft",
        "extend",
        "add",
        "update",
        "insert",
        "log",
        "log_dict",
        "info",
        "debug",
        "warning",
        "error",
        "write",
        "writelines",
        "add_scalar",
        "add_scalars",
        "set_postfix",
        "set_description",
        "put",
        "display",
        "zero_grad",
        "step",
        "tick",
        "record",
        "observe",
        "push",
    ]
)
"""Methods that a statement calls to tell somebody something; the step's numbers do not come from them."""
_FILLING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"})
_NEXT, _ITERATE, _ONCE = "_torchdebug_next", "_torchdebug_iterate", "_torchdebug_once"


class CannotReplay(Exception):  # noqa: N818 - not an error: a reason
    """Why a step's statements cannot be run again, in words for the report."""


@dataclass(frozen=True)
class Slice:
    """Code to execute, and the names it runs with."""

    code: CodeType
    names: dict[str, Any]
    statements: tuple[ast.stmt, ...]


def cut(step: Step, sink: tuple[Position, ...], wanted: str = "") -> Slice:
    """The slice of the deepest frame that stands both in the step's first model call and in its `backward()`.

    Without a model call: the statements before `backward()` that the loss depends on. `wanted` names a variable whose making, before
    the model call, is to be run again, too.
    """
    adopt_timed(position.frame for position in sink)
    if step.entries:
        start, end = _common(step, sink)
        body, first, last = _statements(start, end)
        statements = body[first : last + 1]
        statements = [*_makers(body[:first], wanted), *_starts(body[:first], _written_into(statements)), *statements]
        early = dict(step.live_in.of(start.frame)) if step.live_in is not None else {}
    else:
        end = next((position for position in sink if _replayable(position.frame)), None) or _no_source()
        statements = _dependencies(end)
        early = {}
    return _compiled(end, statements, early)


def _replayable(frame: FrameType) -> bool:
    return owner(frame.f_code.co_filename) in {"user", "library"} and parse(frame.f_code.co_filename) is not None


def _no_source() -> NoReturn:
    msg = "the source of the step is not at hand"
    raise CannotReplay(msg)


def _common(step: Step, sink: tuple[Position, ...]) -> tuple[Position, Position]:
    ends = {id(position.frame): position for position in sink}
    for start in step.chain:
        end = ends.get(id(start.frame))
        if end is not None:
            return start, end
    for start, end in ((start, end) for start in step.chain[-1:] for end in sink if _one_cell(start.frame, end.frame)):
        return start, end
    msg = "the model call and backward() share no running function"
    raise CannotReplay(msg)


def _one_cell(one: FrameType, other: FrameType) -> bool:
    """Whether two frames run top-level statements of the same cell: IPython compiles each of those by itself."""
    return (
        one.f_globals is other.f_globals
        and one.f_code.co_filename == other.f_code.co_filename
        and not (one.f_code.co_flags | other.f_code.co_flags) & CO_OPTIMIZED
    )


def _where(position: Position) -> tuple[int, int, int, int]:
    return span(position.frame.f_code, position.instruction) or (position.line, -1, position.line, -1)


def _lists(position: Position) -> list[tuple[list[ast.stmt], int]]:
    tree = parse(position.frame.f_code.co_filename)
    return _no_source() if tree is None else lists_around(tree, _where(position))


def _statements(start: Position, end: Position) -> tuple[list[ast.stmt], int, int]:
    ends = {id(body): place for body, place in _lists(end)}
    for body, first in _lists(start):
        last = ends.get(id(body))
        if last is not None:
            if last < first:
                msg = "backward() stands before the model call"
                raise CannotReplay(msg)
            return body, first, last
    msg = "no statements hold both the model call and backward()"
    raise CannotReplay(msg)


def _makers(before: list[ast.stmt], wanted: str) -> list[ast.stmt]:
    """The statements before the model call that made a variable; none that takes from an iterator."""
    kept: list[ast.stmt] = []
    needed = {wanted} if wanted else set()
    for statement in reversed(before):
        if (written([statement]) & needed or _writes_into(statement, needed)) and not _draws(statement):
            kept.insert(0, statement)
            needed |= read_before_written([statement])
    if read_before_written(kept) & written(kept):
        return []  # what it began with is gone
    return kept


def _written_into(statements: list[ast.stmt]) -> set[str]:
    """Names of lists, dicts and tensors from before the statements that these fill, and read."""
    free = read_before_written(statements)
    return {name for name in free if any(_writes_into(statement, {name}) for statement in statements)} & _used(statements)


def _used(statements: list[ast.stmt]) -> set[str]:
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


def _starts(before: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """The last statements before the model call that bind `names`: what is filled in the step must begin empty again."""
    kept: list[ast.stmt] = []
    for statement in reversed(before):
        bound = written([statement]) & names
        if bound and not _draws(statement):
            kept.insert(0, statement)
            names = names - bound
    return kept


def _dependencies(end: Position) -> list[ast.stmt]:
    """The statements that `backward()` needs, back to the start of the innermost list, without those nothing depends on."""
    lists = _lists(end)
    if not lists:
        _no_source()
    body, last = lists[0]
    kept = [body[last]]
    needed = read_before_written(kept)
    for statement in reversed(body[:last]):
        if written([statement]) & needed or _writes_into(statement, needed):
            if _draws(statement):
                break
            kept.insert(0, statement)
            needed = read_before_written(kept)
    lost = needed & written(kept)
    if lost:
        msg = f"the earlier value of {', '.join(sorted(lost))} is gone"
        raise CannotReplay(msg)
    return kept


def _writes_into(statement: ast.stmt, names: set[str]) -> bool:
    """``h[mask] = 0``, ``h.clamp_(0)`` and ``outs.append(h)`` change what a name holds without binding it."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store) and _root(node) in names:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _root(node.func) in names:
            method = node.func.attr
            if method in _FILLING or (method.endswith("_") and not method.endswith("__")):
                return True
    return False


def _draws(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "next" for node in ast.walk(statement))


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _compiled(end: Position, statements: list[ast.stmt], early: dict[str, Any]) -> Slice:
    frame = end.frame
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)):
            msg = "the step awaits or yields"
            raise CannotReplay(msg)
    names = {**frame.f_globals, **local_values(frame), **early}
    names.update({_NEXT: _blank_next, _ITERATE: _iterate})
    edited = _Edit(frame, end.line, _used(statements))
    copies = [copied for statement in statements for copied in edited.statement(statement)]
    once = ast.For(
        target=ast.Name(_ONCE, ast.Store()), iter=ast.Tuple([ast.Constant(0)], ast.Load()), body=copies, orelse=[], type_comment=None
    )
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(once, statements[0])], []))
    return Slice(compile(module, frame.f_code.co_filename, "exec", dont_inherit=True), names, tuple(statements))


class _Edit(ast.NodeTransformer):
    """Makes a statement of a function one that runs on its own, and takes out what only reports."""

    def __init__(self, frame: FrameType, last_line: int, used: set[str]) -> None:
        self._last_line = last_line
        self._used = used
        self._first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
        parts = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).split(".")
        self._class = parts[-2] if len(parts) > 1 and parts[-2].isidentifier() else ""

    def statement(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        edited = self.visit(copy.deepcopy(statement))
        yield from edited if isinstance(edited, list) else [edited]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        inside = self.generic_visit(node)
        is_sink = node.lineno <= self._last_line <= (node.end_lineno or node.lineno)
        only_reports = _only_reports(node) and not (_fills(node) and _root(node.value) in self._used)
        return ast.copy_location(ast.Pass(), node) if only_reports and not is_sink else inside

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = self.visit(node.value) if node.value is not None else ast.Constant(None)
        return ast.copy_location(ast.Expr(value), node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_Delete(self, node: ast.Delete) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = _Checked().visit(node.iter)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "next":
            return ast.copy_location(ast.Call(ast.Name(_NEXT, ast.Load()), [], []), node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and self._first:
            node.args = [ast.Name("__class__", ast.Load()), ast.Name(self._first, ast.Load())]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self._class and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{self._class.lstrip('_')}{node.attr}"
        return node


def _fills(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute) and node.value.func.attr in _FILLING


class _Checked(ast.NodeTransformer):
    """Asks every variable that a ``for`` runs over whether it can be run over once more."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Call(ast.Name(_ITERATE, ast.Load()), [node], []), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.copy_location(ast.Call(ast.Name(_ITERATE, ast.Load()), [node], []), node)


def _only_reports(statement: ast.stmt) -> bool:
    """``print(loss)``, ``losses.append(loss.item())``: what is said about the step, not what the step does."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    if isinstance(called, ast.Name):
        return called.id in {"print", "display"}
    return isinstance(called, ast.Attribute) and called.attr in _REPORTING


class _Blank:
    """What stands for a value that must not be taken from the user's iterator again; the model gets its recorded arguments anyway."""

    def __getattr__(self, _name: str) -> _Blank:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Blank:
        return self

    def __getitem__(self, _key: Any) -> _Blank:
        return self

    def __iter__(self) -> Iterator[_Blank]:
        return iter([self, self])


def _blank_next(*_: Any) -> _Blank:
    return _Blank()


def _iterate(values: Any) -> Any:
    """A variable in the head of a ``for``; an iterator that is already running would lose elements."""
    if hasattr(type(values), "__next__"):
        msg = "the step loops over an iterator that cannot be rewound"
        raise CannotReplay(msg)
    return values
