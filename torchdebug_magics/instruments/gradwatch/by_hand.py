"""A training without an optimizer, whose parameters are updated in the user's own code: ``w -= lr * w.grad``."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchdebug_magics.format import number, plural
from torchdebug_magics.instruments.gradwatch.report import GradFinding
from torchdebug_magics.probing.source.edited_source import SIMPLE, Source, cells, exchanging
from torchdebug_magics.probing.source.syntax import called, enclosing, method, nodes, statement_at, targets_of
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Location

FEW_PASSES = 8
_RISEN = 10.0
_FACTORS = (0.1, 0.01, 1e-3, 1e-4)


@dataclass(frozen=True, eq=False)
class RateByHand:
    """The number by which gradients are multiplied in an update, and the line that sets it."""

    where: Location
    constant: ast.Constant
    value: float

    def others(self) -> Iterator[GradFinding]:
        """What is to be said of each lower rate."""
        for factor in _FACTORS:
            new = float(f"{self.value * factor:.0e}")
            yield GradFinding(
                kind="too_fast",
                module=None,
                location=self.where,
                headline=f"the training does not learn: a learning rate of {number(self.value)} is too high",
                fix=f"lower the learning rate from {number(self.value)} to {number(new)}",
                edits=exchanging(self.where, self.constant, ast.Constant(new)),
                fix_state="compiles",
                value=self.value,
            )


def rates_by_hand() -> list[RateByHand | None]:
    """Of each update by hand in the cells, the latest cell first; None for one whose number is not in the cells."""
    places, rates = list(cells()), list[RateByHand | None]()
    for cell in places:
        for update in nodes(ast.stmt, cell.tree):
            taken_off = [update.value] if isinstance(update, ast.AugAssign) and isinstance(update.op, ast.Sub) else []
            taken_off += [node.right for node in nodes(ast.BinOp, update) if isinstance(node.op, ast.Sub)]
            taken_off += [node for node in nodes(ast.Call, update) if method(node) == "sub_"]
            for product in nodes(ast.BinOp, *taken_off) if isinstance(update, SIMPLE) else ():
                sides = [product.left, product.right] if isinstance(product.op, ast.Mult) else []
                factors = [side for side in sides if isinstance(side, (ast.Name, ast.Constant))]
                if len(factors) == 1 and any(node.attr == "grad" for node in nodes(ast.Attribute, product)):
                    rates.append(_constant(places, cell, update, factors[0]))
    return rates


def doubts(losses: Sequence[float]) -> tuple[str, ...]:
    """Why such a training is not healthy, by what backward() was called on, of the first passes and of the last ones."""
    if len(losses) < FEW_PASSES:
        return ()
    first, last = losses[0], losses[-1]
    if not math.isfinite(last) or last > _RISEN * abs(first) > 0:
        return (f"the loss rises, from {number(first)} to {number(last)} in {plural(len(losses), 'pass', 'es')}",)
    return ()


def _constant(places: list[Source], cell: Source, statement: ast.stmt, rate: ast.expr) -> RateByHand | None:
    """Where the number stands: there, at its variable's assignment, or in the call of the function that has it as a parameter."""
    if isinstance(rate, ast.Constant):
        where, value = location(cell.where.file, statement.lineno, ""), rate.value
        return RateByHand(where, rate, value) if isinstance(value, (int, float)) and value else None
    name = ast.unparse(rate)
    functions = [node for node in enclosing(cell.tree, statement.lineno) if isinstance(node, ast.FunctionDef)]
    names = [argument.arg for function in functions[-1:] for argument in function.args.args]
    if name in names:
        given = (argument for place in places for argument in _arguments(place, functions[-1].name, names.index(name), name))
        return next((rate for rate in (_constant(places, *argument) for argument in given) if rate is not None), None)
    assigned = [(place, made, target) for place in places for made in nodes(ast.Assign, place.tree) for target in targets_of(made)]
    values = [(place, made) for place, made, target in assigned if ast.unparse(target) == name]
    return next((_constant(places, place, made, made.value) for place, made in values if isinstance(made.value, ast.Constant)), None)


def _arguments(place: Source, function: str, position: int, name: str) -> Iterator[tuple[Source, ast.stmt, ast.expr]]:
    """(cell, statement, value) of an argument in each call of a function; not where another function passes its own on."""
    for call in nodes(ast.Call, place.tree):
        named = [option.value for option in call.keywords if option.arg == name]
        value = next(iter([*named, *call.args[position : position + 1]]), None)
        statement = statement_at(place.tree, call.lineno)
        in_function = any(isinstance(node, ast.FunctionDef) for node in enclosing(place.tree, call.lineno))
        is_passed_on = value is not None and ast.unparse(value) == name and in_function
        if called(call) == function and statement is not None and value is not None and not is_passed_on:
            yield place, statement, value
