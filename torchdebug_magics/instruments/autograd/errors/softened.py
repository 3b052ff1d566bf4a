"""Comparisons and logical operations on the way to a loss, by operations that have a derivative and come close to the same values."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torchdebug_magics.instruments.autograd.source_readings import statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.source.edited_source import cells, exchanging
from torchdebug_magics.probing.source.syntax import as_atom, called, copied, expression, names_in, nodes, targets_of, tree_of
from torchdebug_magics.report import Edit, Location

_COMPARISONS = frozenset({"lt", "le", "gt", "ge"})
_LOGIC = frozenset({"logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "__and__", "__or__"})
_CASTS = frozenset({"float", "double", "half", "int", "long", "to", "type", "type_as"})
_FACTOR = 10
"""By which a difference is multiplied before its sigmoid: 0.25 above the threshold gives 0.92."""


_TAKES_MASKS = frozenset({"where", "masked_fill", "masked_fill_", "masked_select", "masked_scatter"})


def softened(ops: Iterable[RecordedOp], comparison: RecordedOp) -> tuple[Edit, ...]:
    """The edits of the lines in which a loss that these ops compute loses its gradient to a comparison, and to logic of what it gives.

    None where the result is an index or a condition, or is compared again.
    """
    hard, lines = {comparison.index}, {comparison.where: None}
    for op in sorted(ops, key=lambda op: op.index):
        if hard.isdisjoint(parent.index for parent in op.parents):
            continue
        hard.add(op.index)
        if op.name in {"eq", "ne"}:
            return ()
        if op.name in _LOGIC:
            lines[op.where] = None
    edits = [_softened_at(where) for where in lines if where is not None] if comparison.name in _COMPARISONS else []
    return tuple(edit for of_line in edits for edit in of_line) if edits and all(edits) else ()


def _softened_at(where: Location) -> tuple[Edit, ...]:
    statement, tree = statement_at(where), tree_of(where.file)
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.expr) or tree is None:
        return ()
    masks = {target.id for target in targets_of(statement) if isinstance(target, ast.Name)}
    conditions: list[ast.AST] = [node.slice for node in nodes(ast.Subscript, tree)]
    conditions += [node.test for node in nodes((ast.If, ast.While), tree)]
    conditions += [argument for node in nodes(ast.Call, tree) if called(node) in _TAKES_MASKS for argument in node.args]
    beside = [part for node in nodes(ast.Subscript, statement) for part in nodes(ast.Compare, node.slice)]
    beside += [part for option in nodes(ast.keyword, statement) for part in nodes(ast.Compare, option.value)]
    beside += [
        part
        for node in ast.walk(value)
        if isinstance(node, (ast.IfExp, ast.comprehension, ast.Lambda))
        for part in nodes(ast.Compare, node)
    ]
    if beside or any(names_in(condition) & masks for condition in conditions if condition not in ast.walk(value)):
        return ()
    imports = (name for place in (tree, *(cell.tree for cell in cells())) for node in nodes(ast.Import, place) for name in node.names)
    torch = next((name.asname for name in imports if name.name == "torch" and name.asname), "torch")
    new = _Soften(torch).visit(copied(value))
    return () if ast.unparse(new) == ast.unparse(value) else exchanging(where, value, new)


class _Soften(ast.NodeTransformer):
    """``(a > b).float()`` -> ``torch.sigmoid(10 * (a - b))``; ``logical_and(a, b)`` -> ``a * b``."""

    def __init__(self, torch: str) -> None:
        self._torch = torch

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) != 1 or not isinstance(node.ops[0], (ast.Gt, ast.GtE, ast.Lt, ast.LtE)):
            return node
        high, low = node.left, node.comparators[0]
        if isinstance(node.ops[0], (ast.Lt, ast.LtE)):
            high, low = low, high
        is_zero = isinstance(low, ast.Constant) and low.value == 0
        return expression(f"{self._torch}.sigmoid({_FACTOR} * {as_atom(high) if is_zero else f'({as_atom(high)} - {as_atom(low)})'})")

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name, args = called(node), node.args
        if name in _CASTS and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Compare):
            return self.visit_Compare(node.func.value)
        if name == "where" and args and isinstance(args[0], ast.Compare):
            chosen = [part.value if isinstance(part, ast.Constant) else None for part in args[1:]]
            if chosen == [0, 1]:
                args[0].left, args[0].comparators[0] = args[0].comparators[0], args[0].left
            return self.visit_Compare(args[0]) if chosen in ([1, 0], [0, 1]) else node
        self.generic_visit(node)
        if name.startswith("logical_"):
            operands = [*([node.func.value] if isinstance(node.func, ast.Attribute) and len(args) == 1 else []), *args]
            return _joined(name.removeprefix("logical_"), *map(as_atom, operands[-2:]))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        words = {ast.BitAnd: "and", ast.BitOr: "or"}
        word = words.get(type(node.op))
        return node if word is None else _joined(word, as_atom(node.left), as_atom(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _joined("not", as_atom(node.operand)) if isinstance(node.op, ast.Invert) else node


def _joined(word: str, *operands: str) -> ast.expr:
    """The probability that both, that any, or that the last of them holds not."""
    a, b = operands[0], operands[-1]
    return expression({"and": f"{a} * {b}", "or": f"{a} + {b} - {a} * {b}"}.get(word, f"1 - {b}"))
