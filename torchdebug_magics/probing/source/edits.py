"""A fix as edits of the user's code: report -> its findings -> the code in each fix, set against the statements around its line -> `Edit`.

A fix in words says what to write and where: in place of the statement at its line, or of an expression in it; before or after a statement.
Which of these it is, the user's own syntax tree decides: code that has the shape of a statement replaces that statement, an expression that
stands there is the one to be replaced. Where two statements would do, or the edited file does not parse, there are no edits.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product, takewhile
from textwrap import indent
from typing import Any, TypeVar

from torchdebug_magics.probing.source.edited_source import (
    HEADS,
    SIMPLE,
    Source,
    cells,
    made_as,
    parse_with,
    running_cell,
    same,
    with_variables,
)
from torchdebug_magics.probing.source.fix_check import ALIASES, CODE
from torchdebug_magics.probing.source.syntax import (
    bound_inside,
    called,
    last_name,
    loops_around,
    names_in,
    nodes,
    parsed,
    root_of,
    tree_of,
)
from torchdebug_magics.report import Edit, Finding, Report, changed, parts_of

ReportT = TypeVar("ReportT", bound=Report)
_IN_PLACE = re.compile(r"\s*,?\s*(?:in place of|instead of|rather than|for)\s*$")
_BECOMES = re.compile(r"\s*(?:by|with|becomes|->)\s*$")
_BEFORE = re.compile(r"\b(?:before|above|ahead of|in front of)\b[^`]{0,20}$")
_AFTER = re.compile(r"\b(?:after|below|behind)\b[^`]{0,20}$")
_OPTION = re.compile(r"\w+=[^=\s]")
_EFFECT = re.compile(r"\b(?:call|run|calls)\s*$")  # before a call that is made for what it does: it stands for no value
_MOVE = re.compile(r"\bmove\s*$")
_OUT_OF, _AND = re.compile(r"\s+out of\b"), re.compile(r"\s*(?:,|and|, and)\s*")
_UNDER = re.compile(r"\b(?:under|in|inside|within)\s*$")
_IN_LINE = re.compile(r"\s+in line (\d+)")
_BESIDE_LINE = re.compile(r"\b(before|after|above|below) (?:that|this|the) line\b[^`]*$")
_AT_TOP = re.compile(r"\s+at the top of this cell\b")
_NAMED_PLACE = re.compile(r"\bat\s*$")
_EACH_STEP = re.compile(r"\s+at the end of each (?:step|iteration)\b")
_IN_WORDS = re.compile(r"\w\(\)(?: with [^`]*)? and $"), re.compile(r" and \w+\(\)")
"""Before or after code: a part of the same fix of which the check of its code has left the name alone."""
_ON_A_COPY = re.compile(r"\bon a copy, $")


def with_edits(report: ReportT) -> ReportT:
    """The report, with edits for each fix that the source tells how to apply. Never raises; reads no more than source."""
    try:
        new: ReportT = changed(report, _edited) if any(map(_lacks_edits, parts_of(report))) else report
    except Exception:  # noqa: BLE001 - edits that cannot be made must leave the user's cell its report
        return report
    return new


def _lacks_edits(part: Any) -> bool:
    return isinstance(part, Finding) and bool(part.fix) and not (part.edits or part.has_failed) and part.fix_at is not None


def _edited(part: Any) -> Any:
    """A finding with a fix at a line gets its edits; any other part stays."""
    edits = _edits_of(part) if _lacks_edits(part) else ()
    return replace(part, edits=edits, fix_state="verified" if part.fix_state == "verified" else "compiles") if edits else part


def _edits_of(finding: Finding) -> tuple[Edit, ...]:
    where = finding.fix_at
    tree = None if where is None else tree_of(where.file)
    if where is None or tree is None:
        return ()
    source = Source(where, tree)
    was_tried, codes = finding.fix_state == "verified", _codes(finding.fix)
    if any(_IN_WORDS[0].search(before) or _IN_WORDS[1].match(after) for _, before, after in codes):
        return ()
    together = 1 + sum(1 for _ in takewhile(lambda code: code[1] == " and ", codes[1:]))  # a part of a fix is none
    for way in (_blocks, _moves, _expressions, _insertions, _statements, _running_calls if was_tried else _copies):
        edits = source.merged(way(finding.fix, source))
        by_file = [[edit for edit in edits if edit.file == file] for file in {edit.file for edit in edits}]
        if len(edits) >= together and all(map(parse_with, by_file)):
            return edits
    return ()


def _codes(fix: str) -> list[tuple[str, str, str]]:
    """(code, the words before it, the words after it) of each piece of code in a fix."""
    parts = CODE.split(fix)
    return [(parts[at], parts[at - 1], parts[at + 1]) for at in range(1, len(parts), 2)]


def _parsed(code: str) -> ast.stmt | None:
    """One statement; of a head such as ``with torch.no_grad():``, the statement with an empty body. An option, ``lr=0.1``, is none."""
    if _OPTION.match(code):
        return None
    for form in ("{}", "{} pass"):
        if (tree := parsed(form.format(code))) is not None:
            return tree.body[0] if len(tree.body) == 1 else None
    return None


def _blocks(fix: str, source: Source) -> Iterator[Edit]:
    """A block around the loop, or around the statement at the line: ``with torch.no_grad():``."""
    for code, before, _ in _codes(fix):
        head = _parsed(code)
        here = [] if source.statement is None else source.beside(source.statement) or [source.statement]
        inner = next((node for node in here if isinstance(head, ast.With) and len(head.body) == 1 and same(head.body[0], node)), None)
        if isinstance(head, ast.With) and inner is not None:
            yield source.replacing(inner, f"with {', '.join(map(ast.unparse, head.items))}:\n{indent(source.text(inner), '    ')}")
            return
        inside = source.loop() if re.search(r"\bloop\b", before) else source.statement
        if code.endswith(":") and isinstance(head, ast.With) and inside is not None and _UNDER.search(before) and source.is_alone(inside):
            text = source.text(inside, whole=True)
            yield source.replacing(inside, f"{code}\n{indent(text, '    ')}", old=text)
            return


def _moves(fix: str, source: Source) -> Iterator[Edit]:
    """Statements near the line go before or after another one, or out of the block that they stand in."""
    codes = _codes(fix)
    start = next((at for at, (_, before, _) in enumerate(codes) if _MOVE.search(before)), len(codes))
    moved: list[ast.stmt] = []
    for at, (code, _, after) in enumerate(codes[start:], start):
        statement = _parsed(code)
        here = next((node for node in source.near if statement is not None and same(node, statement)), None)
        if here is None:
            return
        moved.append(here)
        place = _BEFORE.search(after) or _AFTER.search(after)
        anchor = _anchor(codes[at + 1][0], "", source) if place is not None and at + 1 < len(codes) else None
        is_above = place is not None and _BEFORE.search(after) is not None
        moved = [source.with_its_loop(node, anchor) for node in moved]
        if anchor is not None and anchor not in moved and not _stands(moved, anchor, source, is_above=is_above):
            texts = [source.text(node, whole=True) for node in moved]
            text = "\n".join(texts)
            yield from (source.replacing(node, "", whole) for node, whole in zip(moved, texts, strict=True))
            yield source.before(anchor, text) if is_above else source.after(anchor, text)
        elif _OUT_OF.match(after) and len(moved) == 1:
            yield from _moved_out(here, source)
        if place is not None or not _AND.fullmatch(after):
            return


def _stands(moved: list[ast.stmt], anchor: ast.stmt, source: Source, *, is_above: bool) -> bool:
    """Whether the statements are next to the other one on that side already: to move them would change nothing."""
    block = source.block_of(anchor)
    first = block.index(anchor) + (-len(moved) if is_above else 1) if block else 0
    return bool(block) and block[max(first, 0) : first + len(moved)] == moved


def _moved_out(statement: ast.stmt, source: Source) -> Iterator[Edit]:
    """The statement goes after its loop; before the `with` in which it is the first one, or after that in which it is the last one."""
    block = next((node for node in source.near if isinstance(node, (ast.With, ast.For)) and statement in node.body), None)
    is_loop = isinstance(block, ast.For)
    if block is None or (len(block.body) == 1 if is_loop else statement not in (block.body[0], block.body[-1])):
        return
    text, old = source.text(statement), source.text(block, whole=True)
    inside = old.split("\n")
    first, last = statement.lineno - block.lineno, (statement.end_lineno or 0) - block.lineno
    rest = "\n".join(inside[:first] + inside[last + 1 :])
    parts = [text] if len(block.body) == 1 else [text, rest] if statement is block.body[0] and not is_loop else [rest, text]
    yield source.replacing(block, "\n".join(parts), old=old)


def _expressions(fix: str, source: Source) -> Iterator[Edit]:
    """Edits of an expression: `new` in place of `old`, where `old` stands in the statement at the line, or in one near it."""
    codes = _codes(fix)
    for (first, before, between), (second, _, _) in pairwise(codes):
        if _NAMED_PLACE.search(before):  # ``the layer at `0` ``, which is no number
            continue
        if _IN_PLACE.match(between):
            new, old = first, second
        elif _BECOMES.match(between):
            old, new = first, second
        else:
            continue
        for statement in filter(None, (source.statement, *source.near[:12])):
            if (text := _replaced(statement, old, new, source)) is not None:
                yield source.replacing(statement, text)
                return


def _replaced(statement: ast.stmt, old: str, new: str, source: Source, *, once: bool = False) -> str | None:
    """The statement with an expression of it exchanged wherever it stands; None where it does not, or, if only `once`, not just there."""
    was = _parsed(old)
    if was is None or not isinstance(statement, (*SIMPLE, *HEADS)):
        return None
    if same(statement, was):
        return new
    if not isinstance(was, ast.Expr):
        return None
    text = source.text(statement)
    body = [*nodes(ast.expr, *getattr(statement, "body", ()))]
    spots = [node for node in nodes(ast.expr, statement) if node not in body and same(node, was.value)]
    if not spots or (once and len(spots) > 1) or any(node.lineno != node.end_lineno for node in spots):
        return None
    lines = [line.encode() for line in text.split("\n")]
    for node in sorted(spots, key=lambda node: (-node.lineno, -node.col_offset)):
        at = node.lineno - statement.lineno
        removed = 0 if at and source.lines[node.lineno - 1][: statement.col_offset].strip() else statement.col_offset
        start, end = node.col_offset - removed, (node.end_col_offset or 0) - removed
        lines[at] = lines[at][:start] + new.encode() + lines[at][end:]
    return b"\n".join(lines).decode()


def _statements(fix: str, source: Source) -> Iterator[Edit]:
    """Edits of whole statements: code of the same shape as a statement at the line, or as the only one of that shape in the file."""
    taken: set[int] = set()
    for code, before, after in _codes(fix):
        new, line = _parsed(code), _IN_LINE.match(after)
        at = source.at(int(line[1])) if line else source.statement
        if new is None or at is None or isinstance(new, (ast.With, ast.If)):
            continue
        if "..." in code:
            yield from _with_options(new, source)
            continue
        alike = _of_the_same_shape(new, at, source)
        if len(alike) == 1 and id(alike[0]) not in taken:
            taken.add(id(alike[0]))
            if _goes_on(alike[0], new):
                rounds = [loop for loop in loops_around(source.tree, at.lineno) if alike[0] not in ast.walk(loop)]
                if not any(bound_inside(alike[0]) & bound_inside(loop) for loop in rounds):  # else it would be undone in each round
                    yield source.after(alike[0], code)
            else:
                yield source.replacing(alike[0], _as_written(alike[0], new, code, source))
        elif isinstance(new, ast.Expr) and id(at) not in taken and not _EFFECT.search(before):
            if text := _with_part(at, new.value, code, source):
                taken.add(id(at))
                yield source.replacing(at, text)
        elif isinstance(new, ast.Assign) and not alike and (edit := _after_making(new.targets[0], code, source)) is not None:
            yield edit


def _of_the_same_shape(new: ast.stmt, at: ast.stmt, source: Source) -> list[ast.stmt]:
    """The statements at a line that `new` may stand for, else those of the file."""
    here = [node for node in (source.beside(at) or [at]) if _alike(node, new)]
    here = [node for node in here if len(here) == 1 or not _goes_on(node, new)]
    alike = here or [node for node in (source.near if isinstance(new, ast.Assign) else []) if _alike(node, new)]
    is_of_itself = isinstance(new, ast.Assign) and isinstance(new.targets[0], ast.Name) and new.targets[0].id in names_in(new.value)
    if len(alike) > 1 or (is_of_itself and not here):  # else it would replace another step on the way to the value
        return [node for node in alike if _makes_the_same(node, new) or _goes_on(node, new)]
    return alike


def _makes_the_same(old: ast.stmt, new: ast.stmt) -> bool:
    """Whether both call one function, or class, for their value."""
    return isinstance(old, ast.Assign) and isinstance(new, ast.Assign) and called(old.value) == called(new.value) != ""


def _running_calls(fix: str, _: Source) -> Iterator[Edit]:
    """The call in the running cell from which the fix was tried: ``net(image.flatten(1))`` where the error is in a module of `net`."""
    for (cell, _first), (code, _before, _after) in product(running_cell(), _codes(fix)[:1]):
        call = _parsed(code)
        texts = [(node, new) for node in cell.near if isinstance(call, ast.Expr) and (new := _with_part(node, call.value, code, cell))]
        if len(texts) == 1:
            yield cell.replacing(*texts[0])
            return
    for code, _before, _after in _codes(fix)[:1]:
        match _parsed(code):  # a method of what stands once in all cells, ``Image.open(path).convert("RGB")``
            case ast.Expr(ast.Call(ast.Attribute(ast.Call() as receiver))):
                old = ast.unparse(receiver)
                places = [
                    (cell, node, new) for cell in cells() for node in cell.near if (new := _replaced(node, old, code, cell, once=True))
                ]
                yield from (cell.replacing(node, new) for cell, node, new in places if len(places) == 1)


def _copies(fix: str, _: Source) -> Iterator[Edit]:
    """A copy in place of a variable that the running cell reads in one statement; what copies is imported."""
    for (cell, first), (code, before, _after) in product(running_cell(), _codes(fix)):
        match _parsed(code) if _ON_A_COPY.search(before) else None:
            case ast.Expr(ast.Call(args=[original])) | ast.Expr(ast.Call(ast.Attribute(original), args=[])):
                texts = [(node, new) for node in cell.near if (new := _replaced(node, ast.unparse(original), code, cell, once=True))]
                if len(texts) == 1 and ast.unparse(ast.parse(code)) not in ast.unparse(cell.tree):  # a copy of a copy changes nothing
                    module, imports = code.partition(".")[0], [name for place in cells() for name in nodes(ast.alias, place.tree)]
                    if module in sys.stdlib_module_names and module not in {name.asname or name.name for name in imports}:
                        yield cell.before(first, f"import {module}")
                    yield cell.replacing(*texts[0])


def _goes_on(old: ast.stmt, new: ast.stmt) -> bool:
    """Whether `new` makes its value from that of `old`, as ``x = x.detach()`` does after ``x = f()``: it replaces nothing."""
    if not (isinstance(old, ast.Assign) and isinstance(new, ast.Assign) and isinstance(new.targets[0], ast.Name)):
        return False
    return [new.targets[0].id in names_in(value) for value in (old.value, new.value)] == [False, True]


def _with_options(new: ast.stmt, source: Source) -> Iterator[Edit]:
    """The user's own call with further options: ``DataLoader(..., generator=g)``."""
    call = new.value if isinstance(new, (ast.Expr, ast.Assign)) else None
    if (
        not isinstance(call, ast.Call)
        or not call.keywords
        or not any(isinstance(arg, ast.Constant) and arg.value is ... for arg in call.args)
    ):
        return
    simple = [node for node in (source.statement, *source.near) if isinstance(node, SIMPLE)][:1]
    here: list[tuple[Source, ast.stmt, ast.Call]]
    here = [(source, node, part) for node in simple for part in nodes(ast.Call, node) if called(part) == called(call)]
    name = last_name(new.targets[0]) if isinstance(new, ast.Assign) else ""
    for where, part in [] if here else made_as(source.where.file, name, called(call)):
        place = Source(where, tree_of(where.file) or source.tree)
        here += [(place, place.statement, part)] if place.statement is not None else []
    for place, node, part in here if len(here) == 1 else ():
        given = {keyword.arg: keyword.value for keyword in part.keywords}
        if any(keyword.arg in given and not same(keyword.value, given[keyword.arg]) for keyword in call.keywords):
            return
        options = ", ".join(ast.unparse(keyword) for keyword in call.keywords if keyword.arg not in given)
        old = ast.unparse(part)
        text = _replaced(node, old, f"{place.text(part)[:-1]}{', ' if part.args or part.keywords else ''}{options})", place)
        if text is not None:
            yield place.replacing(node, text)


def _after_making(target: ast.expr, code: str, source: Source) -> Edit | None:
    """Sets a part of an object after the statement that made it: the last above the line, or in an earlier cell."""
    if isinstance(target, ast.Name) or not root_of(target):
        return None
    name = ast.Name(root_of(target), ast.Store())
    for place in (source, *(cell for cell in cells() if cell.where.file != source.where.file)):
        makings = [node for node in place.near if isinstance(node, ast.Assign) and same(node.targets[0], name)]
        above = [node for node in makings if node.lineno < place.line]
        if above:
            return place.after(max(above, key=lambda node: node.lineno), code)
        if makings:  # in that line, or below: an earlier cell has made another object of that name
            return None
    return None


def _with_part(statement: ast.stmt, new: ast.expr, code: str, source: Source) -> str | None:
    """The statement with `new` in place of the largest expression of it that `new` is a change of; None where two would do."""
    if not isinstance(statement, (*SIMPLE, *HEADS)) or any(same(node, new) for node in ast.walk(statement)):
        return None
    call = _call_of(statement)  # made for its effect: what it is called on stays
    targets = () if isinstance(new, ast.Subscript) else getattr(statement, "targets", ())
    kept = (*getattr(statement, "body", ()), *targets, *([] if call is None else [call.func]))
    inside = {id(node) for child in kept for node in ast.walk(child)}
    parts = [node for node in nodes(ast.expr, statement) if id(node) not in inside and node is not call and _is_changed(node, new)]
    sizes = [len(ast.dump(node)) for node in parts]
    largest = [node for node, size in zip(parts, sizes, strict=True) if size == max(sizes)]
    return _replaced(statement, ast.unparse(largest[0]), code, source) if len(largest) == 1 else None


def _is_changed(old: ast.expr, new: ast.expr) -> bool:  # noqa: PLR0911 - one for each way to change
    """Whether `new` is the same call with other arguments, the same operation with another operand, or a method of `old`."""
    if same(old, new):
        return False
    match old, new:
        case (ast.Call(), ast.Call()) if old.args and list(map(ast.dump, old.args)) == list(map(ast.dump, new.args)):
            return True
        case (ast.Call(), ast.Call()) if same(old.func, new.func):
            return True
        case (ast.Call(ast.Attribute(receiver, name)), ast.Call(ast.Attribute(changed, attr))) if name == attr:
            return any(same(receiver, part) for part in nodes(ast.expr, changed))
        case (ast.Subscript(), ast.Subscript()):
            return same(old.value, new.value)
        case (ast.BinOp(), ast.BinOp()) if type(old.op) is type(new.op):
            return same(old.left, new.left) or same(old.right, new.right)
    if isinstance(new, ast.Call) and len(new.args) == 1 and same(old, new.args[0]):
        return True
    inner = new
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
        inner = inner.func.value
        if same(old, inner):
            return not (isinstance(old, ast.Name) and (old.id == "self" or old.id in sys.modules or old.id in ALIASES))  # none is a value
    return False


def _as_written(old: ast.stmt, new: ast.stmt, code: str, source: Source) -> str:
    """The code with the targets of the user's statement: ``self.fc1`` where it only says ``fc1``; options with variables stay."""
    if not isinstance(old, ast.Assign) or not isinstance(new, ast.Assign):
        return code
    value, text = new.value, ast.get_source_segment(code, new.value) or ""
    if isinstance(value, ast.Call) and isinstance(old.value, ast.Call) and (call := with_variables(old.value, value)) is not value:
        text = ast.unparse(call)
    return "".join(f"{source.text(target)} = " for target in old.targets) + text


def _call_of(statement: ast.stmt) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value if isinstance(value, ast.Call) else None


def _alike(was: ast.stmt, new: ast.stmt) -> bool:  # noqa: PLR0911 - one for each kind of statement
    """Whether `new` is the same statement with another value: same targets, same function, same head."""
    match was, new:
        case (ast.Assign(), ast.Assign()):
            return len(was.targets) == len(new.targets) and all(map(_same_place, was.targets, new.targets))
        case (ast.AugAssign(), ast.Assign()):
            return (
                len(new.targets) == 1 and _same_place(was.target, new.targets[0]) and any(same(was.value, part) for part in ast.walk(new))
            )
        case (ast.AugAssign(), ast.AugAssign()):
            return _same_place(was.target, new.target) and not same(was, new)
        case (ast.Return(), ast.Return()):
            return True
        case (ast.Expr(value=ast.Call() as old), ast.Expr(value=ast.Call() as call)):
            return same(old.func, call.func) and not same(old, call)
        case (ast.For(), ast.For()):
            return same(was.target, new.target) and not same(was.iter, new.iter)
    return False


def _same_place(old: ast.expr, new: ast.expr) -> bool:
    """The same target; a fix names an attribute of a module without the module: ``fc1`` for ``self.fc1``."""
    return same(old, new) or (isinstance(old, ast.Attribute) and isinstance(new, ast.Name) and old.attr == new.id)


def _insertions(fix: str, source: Source) -> Iterator[Edit]:
    """New statements before or after one that the fix names, or before or after the statement at the line."""
    codes = _codes(fix)
    for at, (code, before, after) in enumerate(codes):
        new = _parsed(code)
        is_statement = isinstance(new, (ast.Assign, ast.AugAssign)) or (new is not None and _call_of(new) is not None)
        if new is None or not is_statement or any(same(node, new) for node in source.near[:40]):
            continue
        if (beside := _BESIDE_LINE.search(before)) and source.statement is not None:
            is_before = beside[1] in {"before", "above"}
            yield source.before(source.statement, code) if is_before else source.after(source.statement, code)
            return
        if _EACH_STEP.match(after):
            yield from (source.after(loop.body[-1], code) for loop in loops_around(source.tree, source.line)[-1:])
            return
        if _AT_TOP.match(after):
            yield from (cell.before(first, code) for cell, first in running_cell())
            return
        place = _BEFORE.search(after) or _AFTER.search(after)
        if place is None:
            continue
        anchor = _anchor(codes[at + 1][0] if at + 1 < len(codes) else "", after, source)
        if anchor is not None:
            yield source.before(anchor, code) if _BEFORE.search(after) else source.after(anchor, code)
            return


def _anchor(code: str, words: str, source: Source) -> ast.stmt | None:
    """The statement that a fix puts code beside: the nearest that is, or calls, what it names; else the loop, or the line itself."""
    named = _parsed(code) if code else None
    if named is not None:
        call, simple = _call_of(named), [node for node in source.near if isinstance(node, SIMPLE)]
        alike = [node for node in simple if call is not None and any(same(part.func, call.func) for part in nodes(ast.Call, node))]
        return next(iter([*(node for node in simple if same(node, named)), *alike]), None)
    return source.loop() if re.search(r"\bloop\b", words) else source.statement
