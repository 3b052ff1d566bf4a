"""Where in the user's expression an operand stands: beside an operator, in a call's brackets, or before a method's name."""

from __future__ import annotations

import ast
from typing import Final

from torchdebug_magics.instruments.nanhunt.causes.op_families import EIGENVECTORS, FACTORISATIONS
from torchdebug_magics.instruments.nanhunt.fixes.source_edits import Expression, called, is_named

__all__ = ["argument_of_call", "as_atom", "is_operator", "is_receiver", "operand_of", "receiver_of"]

_OPERATORS: Final[dict[type[ast.operator], frozenset[str]]] = {
    ast.Div: frozenset({"div", "reciprocal"}),
    ast.Mod: frozenset({"remainder", "fmod"}),
    ast.FloorDiv: frozenset({"floor_divide", "div"}),
    ast.Pow: frozenset({"pow", "reciprocal", "rsqrt", "sqrt"}),
}


def operand_of(expression: Expression, name: str, place: int) -> ast.expr | None:
    """The operand of an operator, or an argument of a function, that an op was given at a place."""
    node = expression.node
    if isinstance(node, ast.BinOp):
        is_right = isinstance(node.op, (ast.Div, ast.Mod, ast.FloorDiv))
        return (node.right if is_right else node.left) if name in _OPERATORS.get(type(node.op), ()) else None
    if isinstance(node, ast.AugAssign):
        return node.value if isinstance(node.op, (ast.Div, ast.Mod)) and name in _OPERATORS[type(node.op)] else None
    return argument_of_call(expression, name, place)


def argument_of_call(expression: Expression, name: str, place: int = 0) -> ast.expr | None:
    """What a call of the op itself was given; of a matrix function, whose op has another name, the matrix."""
    node = expression.node
    function = called(node)
    is_matrix = name in EIGENVECTORS | FACTORISATIONS
    if not isinstance(node, ast.Call) or not (is_named(function, name) or is_matrix):
        return None
    given = [*receiver_of(node), *node.args]
    return given[place] if -len(given) <= place < len(given) else None


_MODULES: Final = frozenset({"torch", "F", "nn", "functional", "linalg", "special", "np", "numpy", "math", "fn"})


def receiver_of(node: ast.AST) -> list[ast.expr]:
    """``x`` of ``x.log()``; none for a function of a module."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    base = node.func.value
    last = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
    return [] if last in _MODULES else [base]


def is_receiver(expression: Expression, node: ast.AST) -> bool:
    """Whether the expression calls a method on that node."""
    return any(node is one for one in receiver_of(expression.node))


def is_operator(expression: Expression) -> bool:
    """Whether it is ``a / b`` and no call."""
    return isinstance(expression.node, ast.BinOp)


def as_atom(expression: Expression, node: ast.expr) -> str:
    """Its code, in brackets where a method could not be called on it otherwise."""
    code = expression.code(node)
    return code if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({code})"
