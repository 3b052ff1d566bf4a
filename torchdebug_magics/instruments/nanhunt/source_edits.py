"""The user's source with an expression changed, in force while a step is run again: what a report advises is what was run."""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TypeAlias

from torchdebug_magics.fixes import dedented
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Place
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.source.edited_source import SIMPLE, Source
from torchdebug_magics.probing.source.syntax import EDITED, Edited, as_atom, expressions, nodes, parsed, span_of, tree_of
from torchdebug_magics.probing.source.user_code import location, owner, span
from torchdebug_magics.report import Edit

Sources: TypeAlias = Mapping[str, str]
"""The whole text of each file or cell that was changed, by name."""


@dataclass(frozen=True)
class Expression:
    """An expression of the user's, with the text that it stands in."""

    file: str
    text: str
    node: ast.expr | ast.AugAssign

    def code(self, node: ast.AST) -> str:
        """The source of a node inside it."""
        start, end = self._range(node)
        return self._bytes[start:end].decode()

    def atom(self, node: ast.expr) -> str:
        """The source of a node inside it, in parentheses where a method could not be called on it otherwise."""
        return as_atom(node, self.code(node))

    def with_node(self, node: ast.AST, new: str, *, bracketed: bool = False) -> str:
        """The whole text with a node written anew; `bracketed`: with the brackets around it, which are no call's."""
        start, end = self._range(node)
        raw = self._bytes
        if bracketed:
            before, after = raw[:start].rstrip(), raw[end:]
            if before.endswith(b"(") and after.lstrip().startswith(b")"):
                start, end = len(before) - 1, end + len(after) - len(after.lstrip()) + 1
        return (raw[:start] + new.encode() + raw[end:]).decode()

    @property
    def _bytes(self) -> bytes:
        return self.text.encode()

    def _range(self, node: ast.AST) -> tuple[int, int]:
        starts = [0]
        for raw in self._bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(raw))
        line, column, end_line, end_column = span_of(node)
        return starts[line - 1] + column, starts[end_line - 1] + end_column


def expression_at(place: Place | None, sources: Sources) -> Expression | None:
    """The expression that ran at an instruction of the user's; None where its text is not at hand or it could be one of several."""
    if place is None or owner(place[0].co_filename) != "user":
        return None
    file = place[0].co_filename
    text = sources.get(file) or "".join(linecache.getlines(file))
    where = span(*place)
    tree = parsed(text)
    if where is None or tree is None:
        return None
    # A method that is called on a line of its own begins, for Python, at its name.
    calls = sorted((node for node in nodes(ast.Call, tree) if span_of(node)[2:] == where[2:] and span_of(node) <= where), key=span_of)
    node = expressions(tree).get(where) or next(reversed(calls), None)
    return Expression(file, text, node) if node is not None else None


def is_named(function: str, op: str) -> bool:
    """Whether a function of torch's is that op: ``arcsin`` is ``asin``, and ``log_`` writes in place."""
    return function.removesuffix("_").replace("arc", "a") == op.removeprefix("special_").strip("_")


def changed_lines(file: str, text: str) -> list[int]:
    """The numbers of the lines that differ from what the user wrote."""
    pairs = zip(linecache.getlines(file), text.splitlines(keepends=True), strict=False)
    return [number for number, (old, new) in enumerate(pairs, 1) if old.rstrip() != new.rstrip()]


def changed_statements(sources: Sources) -> tuple[Edit, ...]:
    """Each statement that differs from what the user wrote, as an edit; none where a head of a block differs."""
    edits: dict[tuple[str, int, int], Edit] = {}
    for file, number in [(name, number) for name, text in sources.items() for number in changed_lines(name, text)]:
        old, new = tree_of(file), parsed(sources[file])
        source = None if old is None else Source(location(file, number, ""), old)
        node = None if source is None else source.statement
        if source is None or node is None or not isinstance(node, SIMPLE):
            return ()
        place = node.lineno, node.col_offset
        text = next(
            ast.get_source_segment(sources[file], changed)
            for changed in nodes(ast.stmt, new)
            if (changed.lineno, changed.col_offset) == place
        )
        first, *rest = (text or "").split("\n")
        edits[file, *place] = source.replacing(node, "\n".join([first, *(dedented(line, node.col_offset) for line in rest)]))
    return tuple(edits.values())


def user_functions() -> list[FunctionType]:
    """Every function of the user's that is alive."""
    return [one for one in live(FunctionType) if owner(one.__code__.co_filename) == "user"]


@contextlib.contextmanager
def in_force(sources: Sources, functions: list[FunctionType]) -> Iterator[None]:
    """While open, the changed ones of these functions run as changed, and the statements of a step are those of the changed text."""
    trees = {file: ast.parse(text) for file, text in sources.items()}
    codes: dict[tuple[str, str, int], CodeType | None] = {}
    for file, tree in trees.items():
        for code in _inner(compile(tree, file, "exec", dont_inherit=True)):
            key = (file, code.co_name, code.co_firstlineno)
            codes[key] = None if key in codes else code  # of two on one line nobody knows which
    before: list[tuple[FunctionType, CodeType]] = []
    EDITED.update({file: Edited(tree, frozenset(changed_lines(file, sources[file]))) for file, tree in trees.items()})
    try:
        for function in functions:
            old = function.__code__
            new = codes.get((old.co_filename, old.co_name, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars:
                before.append((function, old))
                function.__code__ = new
        yield
    finally:
        for file in trees:
            EDITED.pop(file, None)
        for function, old in before:
            function.__code__ = old


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)
