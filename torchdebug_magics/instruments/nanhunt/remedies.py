"""What may be written in place of the user's expression so that it stays finite, the one that keeps its meaning best first.

Nothing here is shown before the bad step, run again with it, was finite.
"""

from __future__ import annotations

import ast
import linecache
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
from torchdebug_magics.instruments.nanhunt.causes.op_table import (
    DIVISIONS,
    EIGENVECTORS,
    FACTORISATIONS,
    LOGS,
    POWERS,
    SOFTMAXES,
    SPREADS,
    bounds_of,
    is_zero,
)
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Place
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import on_purpose
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.syntax import as_atom, called, expressions, last_name, nodes, parsed, span_of
from torchdebug_magics.probing.source.user_code import owner, span
from torchdebug_magics.probing.tensors import INF, dense

_MOST_MASKS = 6
_INFINITY: Final = re.compile(r"-*(?:float\('[+-]?inf(?:inity)?'\)|[\w.]+\.inf(?:ty)?)", re.IGNORECASE)
_ROUNDED: Final = 1e-3
_SIGNED: Final = {"sub", "sub_", "add", "mul", "neg", "mm", "bmm", "addmm", "convolution", "sin", "cos", "tanh"}
_OPERATORS: Final[dict[type[ast.operator], frozenset[str]]] = {
    ast.Div: frozenset({"div", "reciprocal"}),
    ast.Mod: frozenset({"remainder", "fmod"}),
    ast.FloorDiv: frozenset({"floor_divide", "div"}),
    ast.Pow: frozenset({"pow", "reciprocal", "rsqrt", "sqrt"}),
}
_MODULES: Final = frozenset({"torch", "F", "nn", "functional", "linalg", "special", "np", "numpy", "math", "fn"})
_PROBABILITIES: Final = {"sigmoid": "torch.nn.functional.logsigmoid({0})", "_softmax": "torch.log_softmax({0}, {1})"}
"""Ops whose logarithm is a function of its own, of the logits and, for the second, the dimension."""
_RIGHT = (ast.Div, ast.Mod, ast.FloorDiv)
Sources: TypeAlias = Mapping[str, str]
"""The whole text of each file or cell that was changed, by name."""
Change: TypeAlias = tuple[ast.AST, str]
"""A part of an expression, and what may stand in its place."""


@dataclass(frozen=True)
class Expression:
    """An expression of the user's, with the text that it stands in."""

    file: str
    text: str
    node: ast.expr | ast.AugAssign

    def code(self, node: ast.AST) -> str:
        """The source of a node inside it."""
        return ast.get_source_segment(self.text, node) or ""

    def atom(self, node: ast.expr) -> str:
        """The source of a node inside it, in parentheses where a method could not be called on it otherwise."""
        return as_atom(node, self.code(node))

    def with_node(self, node: ast.AST, new: str, *, bracketed: bool = False) -> str:
        """The whole text with a node written anew; `bracketed`: with the brackets around it, which are no call's."""
        lines = self.text.encode().splitlines(keepends=True)
        line, column, end_line, end_column = span_of(node)
        before = b"".join(lines[: line - 1]) + lines[line - 1][:column]
        after = lines[end_line - 1][end_column:] + b"".join(lines[end_line:])
        if bracketed and before.rstrip().endswith(b"(") and after.lstrip().startswith(b")"):
            before, after = before.rstrip()[:-1], after.lstrip()[1:]
        return (before + new.encode() + after).decode()


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


@dataclass(frozen=True)
class Site(Expression):
    """The expression of the user's that called the op which made the bad value."""

    evidence: Evidence
    op: Op

    @property
    def name(self) -> str:
        """Of the op."""
        return self.evidence.plain_name

    def operand(self, name: str, place: int) -> ast.expr | None:
        """The operand of an operator, or an argument of a function, that an op was given at a place."""
        node = self.node
        if isinstance(node, ast.BinOp):
            return (node.right if isinstance(node.op, _RIGHT) else node.left) if name in _OPERATORS.get(type(node.op), ()) else None
        if isinstance(node, ast.AugAssign):
            return node.value if isinstance(node.op, (ast.Div, ast.Mod)) and name in _OPERATORS[type(node.op)] else None
        return self.argument(name, place)

    def argument(self, name: str, place: int = 0) -> ast.expr | None:
        """What a call of the op itself was given; of a matrix function, whose op has another name, the matrix."""
        # ``arcsin`` is the op `asin`, and ``log_`` writes in place.
        is_op = called(self.node).removesuffix("_").replace("arc", "a") == name.removeprefix("special_").strip("_")
        if not isinstance(self.node, ast.Call) or not (is_op or name in EIGENVECTORS | FACTORISATIONS):
            return None
        given = [*_receiver_of(self.node), *self.node.args]
        return given[place] if -len(given) <= place < len(given) else None

    def written(self, node: ast.AST, text: str) -> str:
        """The user's whole text with a part written anew."""
        is_bare = isinstance(self.node, ast.BinOp) or any(node is one for one in _receiver_of(self.node))
        return self.with_node(node, text, bracketed=is_bare)


def remedies(evidence: Evidence, sources: Sources) -> Iterator[Sources]:
    """The user's sources, each time changed in one place."""
    op = evidence.known
    if op is None:
        return
    if evidence.name in SOFTMAXES or evidence.birth.on_purpose or on_purpose(op, INF) or "attention" in evidence.name:
        yield from _masks(evidence, sources)
    expression = expression_at(op.place, sources)
    if expression is None:
        return
    site = Site(expression.file, expression.text, expression.node, evidence, op)
    for way in _WAYS:
        for node, text in way(site):
            yield {**sources, site.file: site.written(node, text)}


def _masks(evidence: Evidence, sources: Sources) -> Iterator[Sources]:
    """An infinity that was written down with the wrong sign, or that fills a whole row."""
    marks = [op for op in evidence.trace.ops[: evidence.birth.index + 1] if op.place is not None and on_purpose(op, INF)]
    for op in marks[: -_MOST_MASKS - 1 : -1]:
        expression = expression_at(op.place, sources)
        written = next((node for node in nodes(ast.expr, None if expression is None else expression.node) if _infinity(node)), None)
        if expression is None or written is None:
            continue
        for text in ("float('-inf')",) if _infinity(written) > 0 else ("-1e9", "-1e4"):
            yield {**sources, expression.file: expression.with_node(written, text)}


def _infinity(node: ast.AST) -> float:
    """The infinity that ``float('-inf')``, ``-math.inf`` or ``-float('-inf')`` is; 0 for anything else."""
    text = ast.unparse(node)
    return 0.0 if _INFINITY.fullmatch(text) is None else math.inf * (-1) ** text.count("-")


def _logsumexp(site: Site) -> Iterator[Change]:
    """``log(sum(exp(x)))`` as the one function that does all three: equal, and finite."""
    for node in nodes(ast.Call, parsed(site.text)):
        total = next(iter(_arguments(node)), None) if called(node) == "log" else None
        power = next(iter(_arguments(total)), None) if called(total) == "sum" else None
        if power is not None and called(power) == "exp" and span_of(site.node) in {span_of(node), span_of(power)}:
            logits = site.atom(_arguments(power)[0])
            dims = [site.code(argument) for argument in (*_arguments(total)[1:], *getattr(total, "keywords", ()))]
            yield node, f"torch.logsumexp({logits}, {', '.join(dims) or f'tuple(range({logits}.dim()))'})"


def _log_of_probabilities(site: Site) -> Iterator[Change]:
    """``log(sigmoid(x))``, ``log(1 - sigmoid(x))`` and ``log(softmax(x))``, maybe of a variable, as the one function that does both."""
    argument, ops = site.argument("log"), site.evidence.trace.ops
    maker = next((op for op in reversed(ops[: site.op.index]) if op.name in _PROBABILITIES and not op.backward), None)
    source = None if maker is None else expression_at(maker.place, {site.file: site.text})
    given = [] if source is None else _arguments(source.node)
    if (
        argument is None
        or maker is None
        or source is None
        or source.file != site.file
        or not isinstance(source.node, ast.Call)
        or not given
    ):
        return
    if maker.parents and ops[maker.parents[0]].place == maker.place:
        return  # one call of the user's makes the logits, too: there is no expression for them
    logits = source.code(given[0])
    if isinstance(argument, ast.BinOp) and isinstance(argument.op, ast.Sub) and ast.unparse(argument.left) in {"1", "1.0"}:
        argument, logits = argument.right, f"-{logits}" if logits.isidentifier() else f"-({logits})"
    probabilities = argument
    while isinstance(probabilities, ast.Subscript):
        probabilities = probabilities.value
    if ast.dump(probabilities) == ast.dump(source.node) or _holds(probabilities, source.node, given[0], site):
        options = [*given[1:], *source.node.keywords] if called(source.node) in {"sigmoid", "softmax"} else []
        dim = ", ".join(map(source.code, options)) or f"dim={maker.args[1] if len(maker.args) > 1 else -1}"
        taken = site.code(argument).removeprefix(site.code(probabilities))
        yield site.node, _PROBABILITIES[maker.name].format(logits, dim) + taken


def _holds(variable: ast.expr, made: ast.expr | ast.AugAssign, logits: ast.expr, site: Site) -> bool:
    """Whether a variable still holds what an expression made of its logits, and these can be read once more."""
    if not isinstance(variable, ast.Name) or any(nodes(ast.Call, logits)):
        return False
    tree = parsed(site.text)
    binding = next((node for node in nodes(ast.Assign, tree) if span_of(node.value) == span_of(made)), None)
    if binding is None or [ast.unparse(target) for target in binding.targets] != [variable.id]:
        return False
    between = (node for node in nodes(ast.stmt, tree) if binding.lineno < node.lineno and syntax.last_line(node) < site.node.lineno)
    bound = syntax.bound_names(*between)
    return variable.id not in bound and not syntax.names_in(logits) & {variable.id, *bound}


def _covers(outer: ast.AST, inner: ast.AST) -> bool:
    around, inside = span_of(outer), span_of(inner)
    return around[:2] <= inside[:2] and inside[2:] <= around[2:]


def _selected(site: Site) -> Iterator[Change]:
    """A value that `torch.where` throws away: the same choice before the op, so that what is kept stays as it is."""
    argument = site.operand(site.name, 1 if site.name in DIVISIONS else 0)
    for node in nodes(ast.Call, parsed(site.text)):
        given = _arguments(node)
        place = next((place for place, one in enumerate(given) if _covers(one, site.node)), 0)
        if called(node) == "where" and len(given) == 3 and place and argument is not None:  # noqa: PLR2004 - condition, one, other
            condition, code = site.code(given[0]), site.code(argument)
            yield argument, f"torch.where({condition}, {f'{code}, 1.0' if place == 1 else f'1.0, {code}'})"


def _keywords(site: Site) -> Iterator[Change]:
    """What the called function itself offers."""
    node, name, function = site.node, site.name, called(site.node)
    if not isinstance(node, ast.Call):
        return
    code = site.code(node)[:-1].rstrip().rstrip(",") + (", " if node.args or node.keywords else "")
    given = {keyword.arg for keyword in node.keywords}
    if name in SPREADS and function in SPREADS and not given & {"correction", "unbiased"}:
        yield node, f"{code}correction=0)"
    elif function == "ctc_loss" and "zero_infinity" not in given:
        yield node, f"{code}zero_infinity=True)"
    elif function in {"cross_entropy", "nll_loss"} and len(node.args) > 1 and given <= {"ignore_index"}:
        ignored = next((site.code(keyword.value) for keyword in node.keywords), "-100")
        labels = f"({site.code(node.args[1])} != {ignored}).sum()"
        yield node, f"({code}reduction='sum') / {labels}.clamp(min=1))"


def _denominator(site: Site) -> Iterator[Change]:
    """A divisor that is 0."""
    node = site.operand(site.name, 1) if site.name in DIVISIONS else None
    if node is None:
        return
    code, atom = site.code(node), site.atom(node)
    divisor = site.evidence.inputs_at(min(1, len(site.op.inputs()) - 1))
    finite = _finite(divisor)
    maker = None if divisor is None else site.evidence.trace.maker(divisor)
    if divisor is not None and (
        not divisor.is_floating_point() or (maker is not None and maker.name == "sum" and any(map(_is_mask, maker.inputs()[:1])))
    ):
        yield node, f"{atom}.clamp(min=1)"  # it counts something
    is_trained = maker is None and divisor is not None and divisor.requires_grad
    is_negative = finite is not None and bool((finite < 0).any())
    # A difference, or a number that is trained, may be negative in the next step.
    if not is_negative and not is_trained and (maker is None or maker.name not in _SIGNED):
        for small in ("1e-8", "1e-6", "1e-4", "1e-30"):
            yield node, f"{atom}.clamp(min={small})"
    yield node, f"torch.where({code} == 0, 1.0, {code})"
    yield node, f"max({code}, 1)"


def _finite(values: torch.Tensor | None) -> torch.Tensor | None:
    """The finite numbers of a tensor; None where they cannot be ordered."""
    numbers = None if values is None or values.is_complex() else dense(values)
    return None if numbers is None else numbers[torch.isfinite(numbers)]


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether it holds zeros and ones alone, and both can be told apart."""
    return tensor.dim() > 0 and not bool(((tensor != 0) & (tensor != 1)).any())


def _bounded(site: Site) -> Iterator[Change]:
    """An argument outside of where the function, or its derivative, is finite."""
    name = site.name
    node = site.operand(name, -1 if "xlogy" in name else 0)
    if node is None:  # the op is a part of the function that the user called
        name = called(site.node)
        node = site.argument(name)
    if node is None:
        return
    bounds, values = bounds_of(name), site.evidence.inputs_at(1 if "xlogy" in name else 0)
    if site.evidence.name in SOFTMAXES:
        bounds = (".clamp(min=-1e9)",)  # a whole row is -inf, by a mask that was there before the step
    if name in LOGS - {"log1p"} and values is not None:
        # The logarithm of a mask stays far below that of 1; that of a distance is not so steep that one update throws the weights away.
        is_large = not values.is_complex() and bool((values > 1).any())
        bounds = (".clamp(min=1e-30)", ".clamp(min=1e-6)") if _is_mask(values) else bounds[1:] if is_large else bounds
    for bound in bounds:
        # A method that writes in place writes into what it is called on: a copy, clamped, would take the result away.
        text = bound.replace(".clamp(", ".clamp_(") if called(site.node).endswith("_") else bound
        yield node, f"{site.atom(node)}{text.format(site.atom(node))}"


def _signed_power(site: Site) -> Iterator[Change]:
    """A fractional power of values of both signs: that of their magnitudes, with the sign. Clamping would lose it."""
    base, power = site.operand("pow", 0), site.node.right if isinstance(site.node, ast.BinOp) else site.argument("pow", 1)
    finite = _finite(site.evidence.inputs_at(0)) if site.name in POWERS else None
    if base is None or power is None or finite is None or not finite.numel():
        return
    if any(nodes(ast.Call, base)) or called(site.node).endswith("_"):  # the base stands there twice, and nothing is written into it
        return
    low, high = finite.aminmax()
    if high > 0 and low < -_ROUNDED * high:  # what rounding made of 0 has no sign
        exponent = site.code(power) if isinstance(power, ast.Constant) else site.atom(power)
        for small in ("", ".clamp(min=1e-8)", ".clamp(min=1e-4)"):
            yield site.node, f"({site.atom(base)}.sign() * {site.atom(base)}.abs(){small} ** {exponent})"


def _off_zero(site: Site) -> Iterator[Change]:
    """One of several arguments that are all 0."""
    node, values = site.argument(site.name, -1), site.evidence.operands()
    if node is not None and len(values) > 1 and all(map(is_zero, values)):
        code = site.code(node)
        yield node, f"torch.where({code} == 0, 1e-6, {code})"


def _in_float32(site: Site) -> Iterator[Change]:
    """A result that fits float32 and not the type that it has."""
    node, birth = site.node, site.evidence.birth
    if birth.tensor.dtype in {torch.float16, torch.bfloat16} and birth.kind == INF:
        operands = [node.left, node.right] if isinstance(node, ast.BinOp) else _arguments(node)
        for operand in operands[:2]:
            yield operand, f"{site.atom(operand)}.float()"


def _as_xlogy(site: Site) -> Iterator[Change]:
    """The product of a number and a logarithm as the one function."""
    argument = site.argument("log") if site.name == "log" else None
    for node in nodes(ast.BinOp, parsed(site.text)) if argument is not None else ():
        sides = [one for one in (node.left, node.right) if span_of(one) != span_of(site.node)]
        if isinstance(node.op, ast.Mult) and len(sides) == 1 and not isinstance(sides[0], ast.Constant) and argument is not None:
            yield node, f"torch.xlogy({site.code(sides[0])}, {site.code(argument)})"


_WAYS: tuple[Callable[[Site], Iterator[Change]], ...] = (
    _logsumexp, _log_of_probabilities, _as_xlogy, _keywords, _selected, _denominator, _signed_power, _bounded, _off_zero, _in_float32,
)  # fmt: skip
"""Those that change nothing but what was bad come first."""


def _arguments(node: ast.AST | None) -> list[ast.expr]:
    """What a function or a method of torch's is given, the tensor that it is called on first."""
    return [*_receiver_of(node), *node.args] if isinstance(node, ast.Call) else []


def _receiver_of(node: ast.AST | None) -> list[ast.expr]:
    """``x`` of ``x.log()``; none for a function of a module."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    return [] if last_name(node.func.value) in _MODULES else [node.func.value]
