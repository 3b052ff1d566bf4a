"""What may be written in place of the user's expression so that it stays finite, the one that keeps its meaning best first.

Nothing here is shown before the bad step, run again with it, was finite.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Final

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import (
    BETWEEN_ONES,
    BETWEEN_ZERO_AND_ONE,
    DIVISIONS,
    EIGENVECTORS,
    EXPONENTIALS,
    FACTORISATIONS,
    LOGS,
    MEANS,
    POLES,
    POWERS,
    SOFTMAXES,
    SPREADS,
    Evidence,
)
from torchdebug_magics.instruments.nanhunt.causes.operand_causes import is_zero
from torchdebug_magics.instruments.nanhunt.fused_functions import as_one_function
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.instruments.nanhunt.source_edits import Expression, Sources, expression_at, is_named
from torchdebug_magics.instruments.nanhunt.walk.intentional_inf import on_purpose
from torchdebug_magics.probing.syntax import called, dotted, last_name, nodes, parsed
from torchdebug_magics.probing.tensors import INF, dense

_MOST_MASKS = 6
_SMALL: Final = ("1e-12", "1e-8", "1e-6", "1e-4")
_BOUNDS: Final[tuple[tuple[frozenset[str], tuple[str, ...]], ...]] = (
    (frozenset({"log1p"}), (".clamp(min=-1 + 1e-6)",)),
    (frozenset(LOGS), ()),
    (frozenset({"sqrt", "rsqrt"}), tuple(f".clamp(min={small})" for small in _SMALL)),
    (frozenset(POWERS), tuple(f".clamp(min={small})" for small in _SMALL)),
    (frozenset(EXPONENTIALS), (".clamp(max=30)", ".clamp(max=10)")),
    (BETWEEN_ONES, (".clamp(-1 + 1e-6, 1 - 1e-6)", ".clamp(-1 + 1e-3, 1 - 1e-3)")),
    (BETWEEN_ZERO_AND_ONE, (".clamp(1e-6, 1 - 1e-6)", ".clamp(1e-3, 1 - 1e-3)")),
    (frozenset({"acosh"}), (".clamp(min=1 + 1e-6)",)),
    (POLES, (".clamp(min=1e-6)",)),
    (frozenset(EIGENVECTORS), (" + torch.diag(1e-4 * torch.arange({0}.shape[-1]))",)),
    (frozenset(FACTORISATIONS), (" + 1e-4 * torch.eye({0}.shape[-1])",)),
)
"""What is appended to the argument of a function, so that it lies where the function and its derivative are finite."""
_SIGNED: Final = {"sub", "sub_", "add", "mul", "neg", "mm", "bmm", "addmm", "convolution", "sin", "cos", "tanh"}
_OPERATORS: Final[dict[type[ast.operator], frozenset[str]]] = {
    ast.Div: frozenset({"div", "reciprocal"}),
    ast.Mod: frozenset({"remainder", "fmod"}),
    ast.FloorDiv: frozenset({"floor_divide", "div"}),
    ast.Pow: frozenset({"pow", "reciprocal", "rsqrt", "sqrt"}),
}
_MODULES: Final = frozenset({"torch", "F", "nn", "functional", "linalg", "special", "np", "numpy", "math", "fn"})


def remedies(evidence: Evidence, sources: Sources) -> Iterator[Sources]:
    """The user's sources, each time changed in one place."""
    op = evidence.forward or evidence.op
    if op is None:
        return
    expression = expression_at(op.place, sources)
    for changed, text in _all(op, evidence, expression, sources):
        yield {**sources, changed.file: text}


def _all(op: Op, evidence: Evidence, expression: Expression | None, sources: Sources) -> Iterator[tuple[Expression, str]]:
    if evidence.name in SOFTMAXES or evidence.birth.on_purpose or on_purpose(op, INF) or "attention" in evidence.name:
        yield from _masks(evidence, sources)
    if expression is None:
        return
    for ways in (as_one_function, as_xlogy, _keywords, _means, _denominator, _bounded, _off_zero, _in_float32, _open_rows):
        for text in ways(evidence, expression):
            yield expression, text


def _masks(evidence: Evidence, sources: Sources) -> Iterator[tuple[Expression, str]]:
    """An infinity that was written down with the wrong sign, or that fills a whole row."""
    birth = evidence.birth
    marks = [op for op in evidence.trace.ops[: birth.index + 1] if op.place is not None and on_purpose(op, INF)]
    for op in marks[: -_MOST_MASKS - 1 : -1]:
        expression = expression_at(op.place, sources)
        written = next((node for node in nodes(ast.expr, None if expression is None else expression.node) if _infinity(node)), None)
        if expression is None or written is None:
            continue
        for text in ("float('-inf')",) if _infinity(written) > 0 else ("-1e9", "-1e4"):
            yield expression, expression.with_node(written, text)


def _infinity(node: ast.AST) -> float:
    """The infinity that ``float('-inf')``, ``-math.inf`` or ``-float('-inf')`` is; 0 for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_infinity(node.operand)
    if isinstance(node, ast.Attribute) and node.attr in {"inf", "infty"}:
        return math.inf
    if isinstance(node, ast.Call) and dotted(node.func) == "float" and len(node.args) == 1:
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        value = {"inf": math.inf, "+inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}
        return value.get(str(text).lower(), 0.0)
    return 0.0


def _keywords(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """What the called function itself offers."""
    node, name, function = expression.node, evidence.plain_name, called(expression.node)
    if not isinstance(node, ast.Call):
        return
    code = expression.code(node)
    given = {keyword.arg for keyword in node.keywords}
    if name in SPREADS and function in SPREADS and not given & {"correction", "unbiased"}:
        yield _with_keyword(expression, node, "correction=0")
    elif function == "ctc_loss" and "zero_infinity" not in given:
        yield _with_keyword(expression, node, "zero_infinity=True")
    elif function in {"cross_entropy", "nll_loss"} and len(node.args) > 1 and given <= {"ignore_index"}:
        ignored = next((expression.code(keyword.value) for keyword in node.keywords), "-100")
        labels = f"({expression.code(node.args[1])} != {ignored}).sum()"
        yield expression.with_node(node, f"({code[:-1].rstrip().rstrip(',')}, reduction='sum') / {labels}.clamp(min=1))")
    elif function in MEANS - {"mean"} and node.args and not node.keywords:
        count = f"{expression.atom(node.args[0])}.numel()"
        yield expression.with_node(node, f"({code[:-1].rstrip().rstrip(',')}, reduction='sum') / max({count}, 1))")


def _with_keyword(expression: Expression, node: ast.Call, keyword: str) -> str:
    code = expression.code(node)[:-1].rstrip().rstrip(",")
    return expression.with_node(node, f"{code}{', ' if node.args or node.keywords else ''}{keyword})")


def _means(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """The mean of nothing."""
    node, values = expression.node, evidence.inputs_at(0)
    if (
        evidence.plain_name == "mean"
        and isinstance(node, ast.Call)
        and values is not None
        and not values.numel()
        and called(node) == "mean"
    ):
        argument = argument_of_call(expression, "mean")
        if argument is not None and not node.keywords:
            code = expression.atom(argument)
            yield expression.with_node(node, f"({code}.sum() / max({code}.numel(), 1))")


def _denominator(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """A divisor that is 0."""
    if evidence.plain_name not in DIVISIONS:
        return
    node = operand_of(expression, evidence.plain_name, 1)
    if node is None:
        return
    code, atom = expression.code(node), expression.atom(node)
    divisor = evidence.inputs_at(1) if len((evidence.forward or evidence.op).inputs()) > 1 else evidence.inputs_at(0)  # type: ignore[union-attr]
    numbers = None if divisor is None else dense(divisor)
    finite = torch.zeros(0) if numbers is None or numbers.is_complex() else numbers[torch.isfinite(numbers)]
    if divisor is not None and _counts(evidence, divisor):
        yield expression.with_node(node, f"{atom}.clamp(min=1)", bracketed=is_operator(expression))
    if not bool((finite < 0).any()) and not _takes_either_sign(evidence, divisor):
        for small in ("1e-8", "1e-6", "1e-4"):
            yield expression.with_node(node, f"{atom}.clamp(min={small})", bracketed=is_operator(expression))
    yield expression.with_node(node, f"torch.where({code} == 0, 1.0, {code})", bracketed=is_operator(expression))
    yield expression.with_node(node, f"max({code}, 1)", bracketed=is_operator(expression))


def _takes_either_sign(evidence: Evidence, divisor: torch.Tensor | None) -> bool:
    """Whether it may be negative in the next step: a difference, or a number that is trained."""
    maker = None if divisor is None else evidence.maker(divisor)
    return divisor is not None and divisor.requires_grad if maker is None else maker.name in _SIGNED


def _counts(evidence: Evidence, divisor: torch.Tensor) -> bool:
    """Whether it says how many there are: a sum of zeros and ones, or a whole number."""
    if not divisor.is_floating_point():
        return True
    maker = evidence.maker(divisor)
    given = maker.inputs()[:1] if maker is not None and maker.name == "sum" else []
    return any(map(_is_mask, given))


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether it holds zeros and ones alone, and both can be told apart."""
    return tensor.dim() > 0 and not bool(((tensor != 0) & (tensor != 1)).any())


def _bounded(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """An argument outside of where the function, or its derivative, is finite."""
    name = evidence.plain_name
    node = operand_of(expression, name, -1 if "xlogy" in name else 0)
    if node is None:  # the op is a part of the function that the user called, such as its derivative in forward mode
        name = called(expression.node)
        node = argument_of_call(expression, name)
    bounds = next((bounds for names, bounds in _BOUNDS if name in names), ())
    if node is None:
        return
    if name in LOGS - {"log1p"}:
        bounds = _least_of_log(evidence.inputs_at(1 if "xlogy" in name else 0))
    for bound in bounds:
        atom = expression.atom(node)
        yield expression.with_node(node, f"{atom}{bound.format(atom)}", bracketed=is_operator(expression) or is_receiver(expression, node))


def _off_zero(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """One of several arguments that are all 0."""
    node = argument_of_call(expression, evidence.plain_name, -1)
    values = evidence.operands()
    if node is not None and len(values) > 1 and all(map(is_zero, values)):
        code = expression.code(node)
        yield expression.with_node(node, f"torch.where({code} == 0, 1e-6, {code})")


def _least_of_log(argument: torch.Tensor | None) -> tuple[str, ...]:
    """The logarithm of a mask stays far below that of 1; that of a distance is not so steep that one update throws the weights away."""
    if argument is not None and _is_mask(argument):
        return (".clamp(min=1e-30)", ".clamp(min=1e-6)")
    is_probability = argument is None or argument.is_complex() or not bool((argument > 1).any())
    return (".clamp(min=1e-6)", ".clamp(min=1e-4)") if is_probability else (".clamp(min=1e-4)",)


def _in_float32(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """A result that fits float32 and not the type that it has."""
    if evidence.birth.tensor.dtype not in {torch.float16, torch.bfloat16} or evidence.birth.kind != INF:
        return
    node = expression.node
    operands = (
        [node.left, node.right] if isinstance(node, ast.BinOp) else [*receiver_of(node), *node.args] if isinstance(node, ast.Call) else []
    )
    for operand in operands[:2]:
        atom = expression.atom(operand)
        yield expression.with_node(operand, f"{atom}.float()", bracketed=is_operator(expression) or is_receiver(expression, operand))


def _open_rows(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """Scores of which a whole row is -inf, by a mask that was there before the step."""
    if evidence.name in SOFTMAXES:
        node = argument_of_call(expression, called(expression.node))
        if node is not None:
            atom = expression.atom(node)
            yield expression.with_node(node, f"{atom}.clamp(min=-1e9)", bracketed=is_receiver(expression, node))


def as_xlogy(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """The user's text with the product of a number and a logarithm as the one function."""
    argument = argument_of_call(expression, "log")
    if evidence.plain_name != "log" or argument is None:
        return
    for node in nodes(ast.BinOp, parsed(expression.text)):
        sides = [one for one in (node.left, node.right) if ast.dump(one, include_attributes=True) != _dumped(expression)]
        if isinstance(node.op, ast.Mult) and len(sides) == 1:
            yield expression.with_node(node, f"torch.xlogy({expression.code(sides[0])}, {expression.code(argument)})")


def _dumped(expression: Expression) -> str:
    return ast.dump(expression.node, include_attributes=True)


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


def receiver_of(node: ast.AST) -> list[ast.expr]:
    """``x`` of ``x.log()``; none for a function of a module."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    return [] if last_name(node.func.value) in _MODULES else [node.func.value]


def is_receiver(expression: Expression, node: ast.AST) -> bool:
    """Whether the expression calls a method on that node."""
    return any(node is one for one in receiver_of(expression.node))


def is_operator(expression: Expression) -> bool:
    """Whether it is ``a / b`` and no call."""
    return isinstance(expression.node, ast.BinOp)
