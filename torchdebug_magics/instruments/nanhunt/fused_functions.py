"""``log(sigmoid(x))`` underflows where ``logsigmoid(x)`` does not: the logarithm and what it is of, as the one function that does both.

Where the probabilities come from is read from the trace, what the user's expression computes is tried out on other numbers.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.instruments.nanhunt.source_edits import Expression, expression_at
from torchdebug_magics.probing import syntax
from torchdebug_magics.probing.ops import is_movement

_SOURCES: Final = {"sigmoid": "sigmoid", "_softmax": "softmax"}
_MOST_OPS = 6
"""Between the probabilities and the logarithm: those that only choose or reorder, and one that takes them from 1."""
_RESHAPING: Final = frozenset({"squeeze", "unsqueeze", "view", "reshape", "flatten", "float", "double", "t", "transpose", "permute", "to"})
_LIBRARIES: Final[dict[str, Any]] = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, "math": math}
_ENTROPY: Final = "{0}.binary_cross_entropy_with_logits({1}, {2}{3})"
_REDUCTIONS: Final = {"": "mean", ", reduction='sum'": "sum", ", reduction='none'": "none"}


@dataclass(frozen=True)
class _Probabilities:
    """What the logarithm is taken of, and what that was made of."""

    kind: str
    is_complement: bool
    """Whether it is 1 less the probability."""
    maker: Op
    node: ast.Call
    """The call of the sigmoid, or of the softmax."""
    logits: str
    dimension: str
    """Of a softmax, as the user gives it, or by its name where a module of theirs does."""
    variable: str
    """What the probabilities are bound to; nothing where they stand in the expression itself."""


def as_one_function(evidence: Evidence, expression: Expression) -> Iterator[str]:
    """The user's text with the one function, the largest expression that it can stand for first."""
    logarithm = expression.node
    if evidence.plain_name != "log" or syntax.called(logarithm) not in {"log", "log_"} or not isinstance(logarithm, ast.Call):
        return
    made = _probabilities(evidence, expression)
    argument = next(iter(logarithm.args), None) or (logarithm.func.value if isinstance(logarithm.func, ast.Attribute) else None)
    if made is None or argument is None:
        return
    functional = "F" if "torch.nn.functional as F" in expression.text else "torch.nn.functional"
    if made.kind == "sigmoid":
        yield from _entropies(expression, made, functional)
    if made.is_complement:
        if not isinstance(argument, ast.BinOp) or not isinstance(argument.op, ast.Sub):
            return
        argument = argument.right
    sign = "-" if made.is_complement else ""
    logits = made.logits if made.logits.isidentifier() or not sign else f"({made.logits})"
    one = f"{functional}.logsigmoid({sign}{logits})" if made.kind == "sigmoid" else f"torch.log_softmax({logits}, {made.dimension})"
    text = _with_probabilities(argument, made, one)
    if text:
        yield expression.with_node(logarithm, text)


def _probabilities(evidence: Evidence, expression: Expression) -> _Probabilities | None:
    given, complements = evidence.inputs_at(0), 0
    maker = None if given is None else evidence.maker(given)
    for _ in range(_MOST_OPS):
        if maker is None or maker.name in _SOURCES:
            break
        complements += maker.name == "rsub"
        if not is_movement(maker.func) and not (maker.name == "rsub" and maker.args[1:2] == (1,)):
            return None
        maker = evidence.trace.ops[maker.parents[0]] if maker.parents else None
    if maker is None or maker.name not in _SOURCES or complements > (maker.name == "sigmoid") or maker.place is None:
        return None
    before = evidence.trace.ops[maker.parents[0]] if maker.parents else None
    source = expression_at(maker.place, {expression.file: expression.text})
    here = (evidence.forward or maker).place
    # One call of the user's that makes the logits, too, has no expression for them; in another function they have another name.
    if source is None or here is None or maker.place[0] is not here[0] or (before is not None and before.place == maker.place):
        return None
    return _named(maker, source, expression, is_complement=bool(complements))


def _named(maker: Op, source: Expression, expression: Expression, *, is_complement: bool) -> _Probabilities | None:
    """By the names that hold still where the logarithm stands."""
    node, kind = source.node, _SOURCES[maker.name]
    if not isinstance(node, ast.Call):
        return None
    is_method = (
        syntax.called(node) == kind
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) not in {"torch", "F", "nn.functional"}
    )
    logits = node.func.value if is_method and isinstance(node.func, ast.Attribute) else next(iter(node.args), None)
    if logits is None:
        return None
    given = [source.code(one) for one in (*node.args[not is_method :], *node.keywords) if syntax.called(node) == kind]
    dimension = ", ".join(given) if given or kind == "sigmoid" else f"dim={maker.args[1]}"
    inner = [one for one in syntax.nodes(ast.Call, expression.node) if syntax.span_of(one) == syntax.span_of(node)]
    if inner:
        return _Probabilities(kind, is_complement, maker, inner[0], source.code(logits), dimension, "")
    tree = syntax.parsed(expression.text)
    binding = next((one for one in syntax.nodes(ast.Assign, tree) if syntax.span_of(one.value) == syntax.span_of(node)), None)
    if binding is None or len(binding.targets) != 1 or not isinstance(binding.targets[0], ast.Name) or not _may_be_repeated(logits):
        return None
    between = [
        one for one in syntax.nodes(ast.stmt, tree) if binding.lineno <= one.lineno and syntax.last_line(one) < expression.node.lineno
    ]
    if syntax.names_in(logits) & syntax.bound_names(*between) or binding.targets[0].id in syntax.bound_names(
        *[one for one in between if one is not binding]
    ):
        return None
    return _Probabilities(kind, is_complement, maker, node, source.code(logits), dimension, binding.targets[0].id)


def _may_be_repeated(node: ast.expr) -> bool:
    """Whether it may be computed once more: it draws nothing, and calls nothing of the user's."""
    return all(syntax.method(one) in _RESHAPING for one in syntax.nodes(ast.Call, node))


def _entropies(expression: Expression, made: _Probabilities, functional: str) -> Iterator[str]:
    """Expressions around the logarithm that are a binary cross-entropy."""
    for around in _around(expression):
        calls = [one for one in syntax.nodes(ast.Call, around) if not _is_torchs(one) and one is not made.node]
        if calls or sum(_is_probability(one, made) for one in ast.walk(around)) < 2:  # noqa: PLR2004 - p and 1 - p
            continue
        for target in _targets(around, made):
            for reduction, sign in _equal_to(around, target, made):
                text = _ENTROPY.format(functional, made.logits, ast.unparse(target), reduction)
                yield expression.with_node(around, f"({sign}{text})" if sign and not expression.is_bracketed(around) else sign + text)


def _around(expression: Expression) -> list[ast.expr]:
    """The expressions that hold the logarithm, the largest first."""
    where = syntax.span_of(expression.node)
    lists = syntax.lists_around(syntax.parsed(expression.text), where)
    inside = syntax.nodes(ast.expr, lists[0][0][lists[0][1]] if lists else None)
    return [
        one
        for one in inside
        if syntax.span_of(one)[:2] <= where[:2] and syntax.span_of(one)[2:] >= where[2:] and syntax.span_of(one) != where
    ]


def _targets(around: ast.expr, made: _Probabilities) -> list[ast.expr]:
    """What may be the labels: all that has nothing to do with the probabilities, the largest first."""
    found: dict[str, ast.expr] = {}
    for one in ast.walk(around):
        if not isinstance(one, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) or ast.unparse(one) in _LIBRARIES:
            continue
        if not any(_is_probability(inner, made) for inner in ast.walk(one)):
            found.setdefault(ast.unparse(one), one)
    return list(found.values())


def _equal_to(around: ast.expr, target: ast.expr, made: _Probabilities) -> Iterator[tuple[str, str]]:
    """The reductions, each with a sign, by which the cross-entropy is what the user's expression computes; tried on random numbers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(8, dtype=torch.float64, generator=generator)
        labels = torch.rand(8, dtype=torch.float64, generator=generator)
        replaced = _replaced(around, made, ast.unparse(target))
        if not syntax.names_in(replaced) <= {*_LIBRARIES, _P, _Y}:
            return
        code = compile(ast.fix_missing_locations(ast.Expression(replaced)), "<tried>", "eval")
        try:
            value = eval(code, {"__builtins__": {}, **_LIBRARIES, _P: torch.sigmoid(logits), _Y: labels})  # noqa: S307 - arithmetic alone
        except Exception:  # noqa: BLE001 - what cannot be tried is none
            return
        for reduction, name in _REDUCTIONS.items():
            entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction=name)
            if isinstance(value, torch.Tensor) and value.shape == entropy.shape:
                for sign, signed in (("", entropy), ("-", -entropy)):
                    if torch.allclose(value.double(), signed, rtol=1e-4):
                        yield reduction, sign


_P, _Y = "_torchdebug_p", "_torchdebug_y"


def _replaced(around: ast.expr, made: _Probabilities, target: str) -> ast.expr:
    """The expression with names in place of the probabilities and the labels."""

    def name(node: ast.AST) -> ast.Name | None:
        if _is_probability(node, made):
            return ast.Name(_P, ast.Load())
        return ast.Name(_Y, ast.Load()) if isinstance(node, ast.expr) and ast.unparse(node) == target else None

    return syntax.exchanged(around, name)


def _with_probabilities(argument: ast.expr, made: _Probabilities, text: str) -> str:
    """The argument with its one use of the probabilities written anew."""
    uses = [one for one in ast.walk(argument) if _is_probability(one, made)]
    if len(uses) != 1:
        return ""
    return ast.unparse(_replaced(argument, made, "")).replace(_P, text)


def _is_probability(node: ast.AST, made: _Probabilities) -> bool:
    if made.variable:
        return isinstance(node, ast.Name) and node.id == made.variable
    return isinstance(node, ast.Call) and ast.unparse(node) == ast.unparse(made.node)


def _is_torchs(node: ast.Call) -> bool:
    """A function of torch's, or a method that makes a new tensor."""
    if not isinstance(node.func, ast.Attribute):
        return False
    is_function = syntax.dotted(node.func).partition(".")[0] in _LIBRARIES
    return is_function or (hasattr(torch.Tensor, node.func.attr) and not node.func.attr.endswith("_"))
