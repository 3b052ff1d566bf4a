"""Source in which an edit is made: its statements by line, their text as the user wrote it, and what replaces or stands beside one."""

from __future__ import annotations

import ast
import dataclasses
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from torchdebug_magics.fixes import applied, dedented
from torchdebug_magics.probing.source.syntax import (
    LOOPS,
    blocks,
    bound_names,
    called,
    copied,
    covers,
    exchanged,
    first_line,
    last_line,
    last_name,
    loops_around,
    nodes,
    parsed,
    read_names,
    root_of,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit, Location

SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Delete, ast.Raise, ast.Assert)
HEADS = (ast.For, ast.While, ast.With, ast.If)


def parse_with(edits: Sequence[Edit]) -> bool:
    """Whether the file of the edits is a program with them, and another one."""
    tree = tree_of(edits[0].file)
    if tree is None:
        return False
    source = Source(Location(cell=edits[0].cell, file=edits[0].file, line=edits[0].line, function="", source=""), tree)
    moved = [dataclasses.replace(edit, line=edit.line + source.offset) for edit in edits]
    new = parsed(applied("\n".join(source.lines), moved))
    return new is not None and not same(new, tree)


class Source:
    """The file or cell in which a finding lies."""

    def __init__(self, where: Location, tree: ast.Module) -> None:
        self.where = where
        self.tree = tree
        self.lines = [line.rstrip("\r\n") for line in linecache.getlines(where.file)]
        self.offset = _line_in_file(where, self.lines) - where.line
        """A cell's file may begin with lines that the user does not see."""
        self.line = where.line + self.offset
        self.near = sorted(nodes(ast.stmt, tree), key=lambda node: abs(node.lineno - self.line))
        self.statement = self.at(where.line)

    def at(self, line: int) -> ast.stmt | None:
        """The innermost statement at a line, as the user numbers lines."""
        here = [node for node in self.near if covers(node, line + self.offset)]
        return max(here, key=lambda node: (node.lineno, -last_line(node)), default=None)

    def is_alone(self, statement: ast.stmt) -> bool:
        """Whether no other statement begins in its line: of several, which one a line means cannot be known."""
        return sum(node.lineno == statement.lineno and node.col_offset >= statement.col_offset for node in self.near) == 1

    def beside(self, node: ast.stmt) -> list[ast.stmt]:
        """The simple statements that begin in its line, in their order."""
        here = [statement for statement in self.near if isinstance(statement, SIMPLE) and statement.lineno == node.lineno]
        return sorted(here, key=lambda statement: statement.col_offset)

    def loop(self) -> ast.stmt | None:
        """The outermost loop around the line."""
        return next(iter(loops_around(self.tree, self.line)), None)

    def block_of(self, statement: ast.stmt | None) -> list[ast.stmt]:
        """The statements among which it stands; empty where it is none of this file."""
        return next((block for node in (self.tree, *self.near) for block in blocks(node) if statement in block), [])

    def with_its_loop(self, statement: ast.stmt, other: ast.stmt | None) -> ast.stmt:
        """The loop or `with` that holds nothing else, where that stands beside the other one; else the statement itself."""
        around = (node for node in self.block_of(other) if isinstance(node, (*LOOPS, ast.With)))
        return next((node for node in around if node.body == [statement]), statement)

    def text(self, node: ast.stmt | ast.expr, *, whole: bool = False) -> str:
        """As the user wrote it; a statement dedented to its first line, a compound one without its body unless `whole`."""
        body = getattr(node, "body", None)
        is_head = isinstance(node, HEADS) and isinstance(body, list) and not whole
        end = (body[0].lineno - 1, None) if is_head and body else _end(node)
        return self._between((node.lineno, node.col_offset), end, node)

    def exchanged_text(self, statement: ast.stmt, old: ast.expr, new: ast.expr) -> str:
        """The statement with `new` in the place of `old`, all else as the user wrote it where that can be kept."""
        changed = ast.unparse(exchanged(copied(statement), lambda node: new if same(node, old) else None))
        written, at = "", (statement.lineno, statement.col_offset)
        for node in sorted(
            (part for part in nodes(ast.expr, statement) if same(part, old)), key=lambda part: (part.lineno, part.col_offset)
        ):
            if (node.lineno, node.col_offset) >= at:
                written += self._between(at, (node.lineno, node.col_offset), statement)
                written += _in_quotes_of(self.text(statement), ast.unparse(new))
                at = _end(node)
        written += self._between(at, _end(statement), statement)
        tree = parsed(written)
        return written if tree is not None and ast.unparse(tree) == changed else changed

    def _between(self, start: tuple[int, int], end: tuple[int, int | None], node: ast.stmt | ast.expr) -> str:
        """The text between two places, each a line and a byte in it, dedented as the statement is."""
        lines = [line.encode() for line in self.lines[start[0] - 1 : end[0]]]
        lines[-1] = lines[-1][: end[1]]
        lines[0] = lines[0][start[1] :]
        first, *rest = [line.decode() for line in lines]
        columns = node.col_offset if isinstance(node, ast.stmt) else 0
        return "\n".join([first, *(dedented(line, columns) for line in rest)])

    def replacing(self, node: ast.stmt, new: str, old: str = "") -> Edit:
        """The statement becomes `new`; `old` is its text where that is more than `text` gives."""
        return Edit(cell=self.where.cell, file=self.where.file, line=node.lineno - self.offset, old=old or self.text(node), new=new)

    def before(self, node: ast.stmt, new: str) -> Edit:
        """A new statement in the line before it; of one behind others in its line, as a replacement."""
        if isinstance(node, SIMPLE) and self.beside(node)[0] is not node:
            return self.replacing(node, f"{new}\n{self.text(node)}")
        return Edit(cell=self.where.cell, file=self.where.file, line=first_line(node) - self.offset, old="", new=new)

    def after(self, node: ast.stmt, new: str) -> Edit:
        """As a replacement of a simple statement; of a compound one, before the next of its block, or behind the whole."""
        block = self.block_of(node)
        following = block[block.index(node) + 1 :] if node in block and not isinstance(node, SIMPLE) else []
        if following:
            return self.before(following[0], new)
        below = [*takewhile(lambda line: line[: node.col_offset + 1].strip() == "" != line.strip(), self.lines[last_line(node) :])]
        whole = "\n".join([self.text(node, whole=True), *(line[node.col_offset :] for line in below)])  # with comments that end it
        return self.replacing(node, f"{whole}\n{new}", old=whole)

    def merged(self, edits: Iterable[Edit]) -> tuple[Edit, ...]:
        """The edits of a line that several statements share as one: each by itself would replace or push away what it does not mean."""
        result: list[Edit] = []
        own: dict[int, list[Edit]] = {}
        for edit in edits:
            shared = next(filter(None, (self.beside(node) for node in self.near if node.lineno == edit.line + self.offset)), [])
            is_own = edit.file == self.where.file and edit.old and len(shared) > 1 and shared[-1].end_lineno == shared[0].lineno
            (own.setdefault(edit.line, []) if is_own else result).append(edit)
        for line, parts in own.items():
            nodes_here = self.beside(next(node for node in self.near if isinstance(node, SIMPLE) and node.lineno == line + self.offset))
            texts = [self.text(node) for node in nodes_here]
            for edit in parts:
                if edit.old in texts:
                    texts[texts.index(edit.old)] = edit.new
            whole = self.lines[nodes_here[0].lineno - 1].encode()[nodes_here[0].col_offset : nodes_here[-1].end_col_offset].decode()
            has_block = any(text.partition("\n")[0].endswith(":") for text in texts)
            new = ("\n" if has_block else "; ").join(filter(None, texts))
            result.append(Edit(cell=self.where.cell, file=self.where.file, line=line, old=whole, new=new))
        return tuple(result)


def exchanging(where: Location | None, old: ast.expr, new: ast.expr | None) -> tuple[Edit, ...]:
    """The edit of the statement at a line that holds `old`, with `new` in its place; none where none, or more than one, does."""
    tree = None if where is None else tree_of(where.file)
    source = None if where is None or tree is None else Source(where, tree)
    if source is None or source.statement is None or new is None:
        return ()
    here = [node for node in source.beside(source.statement) or [source.statement] if any(same(part, old) for part in ast.walk(node))]
    if len(here) != 1:
        return ()
    body, whole = getattr(here[0], "body", []), copied(here[0])
    if isinstance(body, list) and body and not isinstance(here[0], HEADS):
        return ()
    if isinstance(body, list) and body:  # it stays as it is written
        vars(whole)["body"] = [ast.Pass()]
        head = ast.unparse(exchanged(whole, lambda node: new if same(node, old) else None)).partition("\n    pass")[0]
        return (source.replacing(here[0], head),) if body[0].lineno > here[0].lineno else ()
    return source.merged((source.replacing(here[0], source.exchanged_text(here[0], old, new)),))


def with_variables(old: ast.Call, new: ast.Call) -> ast.Call:
    """The new call with the options of the old one that are variables: their values have no part in the change."""
    named = {option.arg for option in new.keywords}
    kept = [option for option in old.keywords if option.arg not in named and not isinstance(option.value, ast.Constant)]
    return ast.Call(new.func, new.args, [*new.keywords, *kept]) if kept and called(old) == called(new) else new


def statements(file: str) -> Iterator[tuple[Location, ast.stmt]]:
    """The user's statements without a body: of that file, then of the cells, the last one first."""
    for place in dict.fromkeys([file, *(cell.where.file for cell in cells())]):
        for statement in sorted(nodes(ast.stmt, tree_of(place)), key=lambda node: -node.lineno):
            if not hasattr(statement, "body"):
                yield location(place, statement.lineno, "<module>"), statement


def calls(file: str) -> Iterator[tuple[Location, ast.Call]]:
    """The calls in the same statements, each at the line of its statement."""
    return ((where, call) for where, statement in statements(file) for call in nodes(ast.Call, statement))


def made_as(file: str, name: str, kind: str = "") -> list[tuple[Location, ast.Call]]:
    """Where an object is made: the last call for its name; of a known class, any call of the class, if it is the only one."""
    made = [(where, statement, call) for where, statement in statements(file) for call in nodes(ast.Call, statement)]
    made = [each for each in made if not kind or called(each[2]) == kind]
    named = [(where, call) for where, statement, call in made if name in map(last_name, targets_of(statement))]
    return named[:1] or ([(made[0][0], made[0][2])] if len(made) == 1 and kind else [])


def made_later(where: Location | None, last_line: int) -> tuple[str, tuple[Edit, ...]]:
    """An assignment below the last statement that changes what it reads: of its block, up to a line, or of a later cell; else empty."""
    tree = None if where is None else tree_of(where.file)
    if where is None or tree is None:
        return "", ()
    source = Source(where, tree)
    made, last = source.statement, last_line + source.offset
    block = next((block for block in blocks(tree) if made in block), [])
    names = set() if made is None else read_names(made) - set(sys.modules)
    for node in reversed([node for node in block if isinstance(node, SIMPLE) and source.line < node.lineno < last]):
        if made is not None and (bound_names(node) & names or any(root_of(target) in names for target in targets_of(node))):
            fix = f"move `{ast.unparse(made)}` below `{ast.unparse(node)}`"
            return fix, source.merged((source.replacing(made, ""), source.after(node, source.text(made))))
    for cell in cells():
        if made is not None and (cell.where.cell or 0) > (where.cell or 0):
            loops = [node.lineno for node in cell.tree.body if isinstance(node, LOOPS)]
            before = [node for node in cell.tree.body if isinstance(node, SIMPLE) and node.lineno < max(loops, default=cell.line)]
            changing = [
                node for node in before if bound_names(node) & names or any(root_of(target) in names for target in targets_of(node))
            ]
            if changing:
                text = source.text(made)
                return f"run `{text}` again after `{cell.text(changing[-1])}`", (cell.after(changing[-1], text),)
    return "", ()


def cells() -> Iterator[Source]:
    """The cells of the notebook, the latest first, as looked at from their ends."""
    for file in reversed(list(linecache.cache)):
        here = location(file, len(linecache.getlines(file)) + 1, "")
        tree = None if here.cell is None else tree_of(file)
        if tree is not None:
            yield Source(here, tree)


def running_cell() -> Iterator[tuple[Source, ast.stmt]]:
    """The latest cell that is more than magics, which the report is about, and its first statement below them; none in a script."""
    for cell in sorted(cells(), key=lambda cell: -(cell.where.cell or 0)):
        own = [statement for statement in cell.tree.body if not ast.unparse(statement).startswith("get_ipython().run_")]
        if own:
            yield cell, own[0]
            return


def _line_in_file(where: Location, lines: list[str]) -> int:
    """Where the line of a location stands in its file: magics above a cell are in its source, too, so that it mostly is the same."""
    if where.line <= len(lines) and lines[where.line - 1].strip() == where.source:
        return where.line
    alike = [number for number, line in enumerate(lines, 1) if where.source and line.strip() == where.source]
    return min(alike, key=lambda number: abs(number - where.line), default=where.line)


def same(a: ast.AST, b: ast.AST) -> bool:
    """Whether two trees are alike, wherever they stand, be it read there or written."""
    return type(a) is type(b) and ast.unparse(a) == ast.unparse(b)


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """The line, and the byte in it, at which the node's text ends."""
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _in_quotes_of(source: str, code: str) -> str:
    """The code with its plain strings in double quotes where the source uses no others."""
    if '"' not in source or "'" in source:
        return code
    return re.sub(r"(?<![\w'])'([^'\"\\\n]*)'(?!')", r'"\1"', code)
