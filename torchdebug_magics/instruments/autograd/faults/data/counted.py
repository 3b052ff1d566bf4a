"""What is added up over the batches of a loader, and what that is divided by: samples by samples, batches by batches."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.utils.data import DataLoader, DistributedSampler

from torchdebug_magics.instruments.autograd.faults.loss_terms import is_mean_loss
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import Source, exchanging
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    bound_names,
    called,
    enclosing,
    expression,
    loops_around,
    names_in,
    nodes,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit, Location

Unit: TypeAlias = Literal["samples", "batches", "all samples", ""]
"""What a sum, or a divisor, counts; empty where that is unknown. All: those of a data set of which a sampler gives a part."""
_SAME = frozenset({"item", "detach", "cpu", "numpy", "float", "double", "int", "data"})
"""What changes no number."""
_DEEPEST, _HUNDRED = 4, 100
_WORDS = {"samples": "counts samples", "batches": "adds up one number for each batch"}


class _Pass(NamedTuple):
    """A loop over a loader."""

    file: str
    loop: ast.For
    loader: str
    """What the user calls it."""
    scope: ast.AST
    """The function around it, or the whole file."""
    losses: frozenset[int]
    """The lines in which a loss is computed that is a mean over a batch."""

    @property
    def batch(self) -> set[str]:
        """The names of what a batch consists of."""
        return {node.id for node in nodes(ast.Name, self.loop.target)}

    @property
    def number(self) -> str:
        """What ``enumerate`` counts in; empty where nothing does."""
        match self.loop:
            case ast.For(ast.Tuple([number, *_]), ast.Call(ast.Name("enumerate"))):
                return ast.unparse(number)
        return ""

    def added(self) -> dict[str, Unit]:
        """The names that the loop adds up, with what they count."""
        sums = [node for node in nodes(ast.AugAssign, self.loop) if isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name)]
        own = [node for node in sums if loops_around(tree_of(self.file), node.lineno)[-1] is self.loop]
        units = {ast.unparse(node.target): self.unit(node.value) for node in own}
        return {name: unit for name, unit in units.items() if unit}

    def counts(self) -> set[str]:
        """Of these, the ones that count samples whatever is said of them: they are divisors."""
        sums = [node for node in nodes(ast.AugAssign, self.loop) if isinstance(node.op, ast.Add)]
        return {ast.unparse(node.target) for node in sums if _counted(node.value) is not None}

    def unit(self, value: ast.expr, depth: int = 0) -> Unit:
        """What a number that is added once for each batch makes of the sum."""
        if isinstance(value, ast.Name):
            return self._of_name(value.id, depth + 1) if depth < _DEEPEST else ""
        if isinstance(value, ast.BinOp):
            units = self.unit(value.left, depth), self.unit(value.right, depth)
            is_whole = isinstance(value.op, ast.Mult) and set(units) == {"samples", "batches"}
            return "samples" if is_whole else "batches" if isinstance(value.op, ast.Div) and units == ("samples", "samples") else ""
        if (counted := _counted(value)) is not None:
            return "samples" if names_in(counted) & self.batch else ""
        if (inner := _converted(value)) is not None:
            return self.unit(inner, depth)
        is_loss = isinstance(value, ast.Call) and not self.losses.isdisjoint(range(value.lineno, (value.end_lineno or 0) + 1))
        is_share = is_loss or (called(value) == "mean" and _compares(value))
        if called(value) == "sum" and _compares(value):
            return "samples"
        return "batches" if is_share or (isinstance(value, ast.Constant) and value.value == 1) else ""

    def _of_name(self, name: str, depth: int) -> Unit:
        statement = next((node for node in reversed(nodes_in_order(self.loop)) if name in bound_names(node)), None)
        if not isinstance(statement, ast.Assign) or len(targets_of(statement)) != 1:
            return ""
        is_here = not self.losses.isdisjoint(range(statement.lineno, (statement.end_lineno or 0) + 1))
        is_loss = is_here and isinstance(_bare(statement.value), ast.Call)
        return "batches" if is_loss else "" if is_here else self.unit(statement.value, depth)

    def unit_of_count(self, count: ast.expr, added: Mapping[str, Unit], loaders: Mapping[str, DataLoader[Any]]) -> Unit:
        """What a divisor counts."""
        match count:
            case ast.Call(ast.Name("float" | "int"), [inner]):
                return self.unit_of_count(inner, added, loaders)
            case ast.Name(name) if name in added:
                return added[name]
            case ast.BinOp(ast.Name(name), ast.Add(), ast.Constant(1)) if name == self.number:
                return "batches"
            case ast.Call(ast.Name("len"), [inner]):
                text, loader = ast.unparse(inner), loaders.get(self.loader)
                if text == self.loader:
                    return "batches"
                is_data = loader is not None and any(value is loader.dataset for name, value in user_names(sys._getframe()) if name == text)
                if is_data or text in {f"{self.loader}.dataset", f"{self.loader}.sampler"}:
                    return "all samples" if _gives_a_part(loader) and not text.endswith(".sampler") else "samples"
        return ""


def nodes_in_order(loop: ast.AST) -> list[ast.stmt]:
    """The statements in a loop, as they stand."""
    return sorted(nodes(ast.stmt, loop), key=lambda node: node.lineno)


def _counted(value: ast.expr) -> ast.expr | None:
    """What ``len(x)``, ``x.size(0)`` or ``x.shape[0]`` counts the rows of."""
    match value:
        case ast.Call(ast.Name("len"), [inner]) | ast.Call(ast.Attribute(inner, "size"), [ast.Constant(0)]):
            return inner
        case ast.Subscript(ast.Attribute(inner, "shape"), ast.Constant(0)):
            return inner
    return None


def _converted(value: ast.expr) -> ast.expr | None:
    """What is made another kind of number."""
    match value:
        case ast.Attribute(inner, "data") | ast.Call(ast.Name("float" | "int"), [inner]):
            return inner
        case ast.Call(ast.Attribute(inner, name)) if name in _SAME:
            return inner
    return None


def _compares(value: ast.expr) -> bool:
    """Whether it is the number, or the share, of elements that are equal."""
    return any(isinstance(node.ops[0], ast.Eq) for node in nodes(ast.Compare, value)) or any(
        called(call) == "eq" for call in nodes(ast.Call, value)
    )


def miscounted(facts: TrainingFacts, sizes: Mapping[Line, int]) -> Iterator[AutogradFinding]:
    """Sums over loaders that are divided by something else than they count; `sizes`: of the first batch, by the line of each loop."""
    losses: dict[str, set[int]] = {}
    for op in facts.tape.ops:
        if op.line is not None and is_mean_loss(op):
            losses.setdefault(op.line.file, set()).add(op.line.line)
    loaders = {name: value for name, value in user_names(sys._getframe()) if isinstance(value, DataLoader)}
    for line, size in sizes.items():
        around = [node for node in enclosing(tree_of(line.file), line.line) if isinstance(node, (ast.For, *FUNCTIONS))]
        loop = around[-1] if around else None
        if size > 1 and isinstance(loop, ast.For) and loop.lineno == line.line:
            scope = next((node for node in reversed(around) if isinstance(node, FUNCTIONS)), tree_of(line.file))
            assert scope is not None
            seen = _Pass(line.file, loop, _looped(loop.iter), scope, frozenset(losses.get(line.file, ())))
            yield from _of_another_unit(seen, loaders)
    yield from _of_other_size(facts)


def _gives_a_part(loader: Any) -> bool:
    """Whether the sampler of a loader gives fewer samples in an epoch than the data set has; of several ranks, another has the rest."""
    try:
        return not isinstance(loader.sampler, DistributedSampler) and len(loader.sampler) < len(loader.dataset)
    except (AttributeError, TypeError):  # it is not known, or a stream
        return False


def _looped(over: ast.expr) -> str:
    """The loader of ``enumerate(loader)`` and ``tqdm(loader)``."""
    while isinstance(over, ast.Call) and over.args:
        over = over.args[0]
    return ast.unparse(over) if isinstance(over, (ast.Name, ast.Attribute, ast.Subscript)) else ""


def _of_another_unit(seen: _Pass, loaders: Mapping[str, DataLoader[Any]]) -> Iterator[AutogradFinding]:
    added, counts, bound = seen.added(), seen.counts(), set[str]()
    for statement in nodes_in_order(seen.scope):
        if statement.lineno < seen.loop.lineno or hasattr(statement, "body"):
            if isinstance(statement, ast.For) and statement.lineno > (seen.loop.end_lineno or 0):
                bound |= {ast.unparse(node.target) for node in nodes(ast.AugAssign, statement)}
            continue
        for division in _divisions(statement) if seen.loader else ():
            names = names_in(division.left) & added.keys() - bound
            unit = added[next(iter(names))] if len(names) == 1 and names_in(division.left) == names and not names & counts else ""
            by = seen.unit_of_count(division.right, added, loaders)
            if not unit or not by or unit == by:
                continue
            where = location(seen.file, statement.lineno, "")
            whole = "sampler" if _gives_a_part(loaders.get(seen.loader)) else "dataset"
            meant = f"len({seen.loader})" if unit == "batches" else f"len({seen.loader}.{whole})"
            yield finding(
                "miscounted",
                f"`{names.pop()}` {_WORDS[unit]}, and `{ast.unparse(division.right)}` counts {by}",
                where,
                f"divide by `{meant}`",
                edits=_exchanged(where, statement, division, expression(meant)),
                tensor=seen.loader,
                explanation="an accuracy counts samples; a loss is the mean of a batch already, unless it is multiplied by its size",
            )
            return
        if statement.lineno > (seen.loop.end_lineno or 0) and not isinstance(statement, ast.AugAssign):
            bound |= bound_names(statement)


def _divisions(statement: ast.stmt) -> list[ast.BinOp]:
    """Those of a statement that are no part of a longer quotient or product, save by a hundred; ``a /= b`` as one."""
    products = [node for node in nodes(ast.BinOp, statement) if isinstance(node.op, (ast.Div, ast.Mult))]
    longer = [node for node in products if not _is_hundred(node.left) and not _is_hundred(node.right)]
    inner = {id(side) for node in longer for side in (node.left, node.right)}
    divisions = [node for node in nodes(ast.BinOp, statement) if isinstance(node.op, ast.Div) and id(node) not in inner]
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div) and isinstance(statement.target, ast.Name):
        divisions.append(ast.BinOp(ast.Name(statement.target.id, ast.Load()), ast.Div(), statement.value))
    return divisions


def _is_hundred(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == _HUNDRED


def _exchanged(where: Location, statement: ast.stmt, division: ast.BinOp, meant: ast.expr) -> tuple[Edit, ...]:
    """The statement with another divisor in that division alone."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div):
        return exchanging(where, statement.value, meant)
    return exchanging(where, division, ast.BinOp(division.left, ast.Div(), meant))


def _of_other_size(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Right answers that are divided by the size of something else than what was compared, as of the whole data."""
    values = dict(user_names(sys._getframe()))
    for op in {(op.line, op.reads[0].shape[:1]): op for op in facts.tape.ops if op.name == "eq"}.values():
        tree = None if op.where is None else tree_of(op.where.file)
        if op.where is None or tree is None or not op.reads[0].shape:
            continue
        statement, count = Source(op.where, tree).statement, op.reads[0].shape[0]
        is_added_up = any(True for _ in nodes((ast.GeneratorExp, ast.ListComp), statement))  # a comparison of each batch
        is_count = isinstance(statement, ast.Assign) and _compares(statement.value) and called(_bare(statement.value)) == "sum"
        is_count = is_count and not is_added_up
        names = bound_names(statement) if is_count and isinstance(statement, ast.Assign) else set()
        compared = _compared(statement)
        if len(names) != 1 or compared is None or math.prod(op.reads[0].shape) != count:
            continue
        scope = next((node for node in list(enclosing(tree, op.where.line))[::-1] if isinstance(node, FUNCTIONS)), None)
        local = bound_names(*scope.body) | {argument.arg for argument in nodes(ast.arg, scope.args)} if scope is not None else set[str]()
        local |= {name for loop in nodes(ast.For, tree) for name in bound_names(loop, *loop.body)}
        later = [node for node in nodes_in_order(scope or tree) if node.lineno > op.where.line and not hasattr(node, "body")]
        ends = next((place for place, node in enumerate(later) if bound_names(node) & names), len(later))
        sums: list[ast.stmt] = [*nodes(ast.AugAssign, tree)]
        sums += [node for node in nodes(ast.Assign, tree) if bound_names(node) & names_in(node.value)]
        added = {name for node in sums for name in names_in(node)}
        added |= {name for call in nodes(ast.Call, tree) if called(call) in {"sum", "fsum", "append"} for name in names_in(*call.args)}
        for after in (node for node in later[:ends] if not bound_names(node) & added):
            for division in (node for node in _divisions(after) if names_in(node.left) == names):
                whole = _counted(division.right)
                data: Any = None if whole is None or names_in(whole) & local else value_of(whole, sys._getframe(), values)
                size = len(data) if hasattr(data, "__len__") and not isinstance(data, DataLoader) else count
                if size <= count:
                    continue
                where, meant = location(op.where.file, after.lineno, ""), f"len({compared})"
                yield finding(
                    "miscounted",
                    f"`{ast.unparse(division.right)}` is {size:,}, and `{min(names)}` counts right answers among {count}",
                    where,
                    f"divide by `{meant}`",
                    edits=exchanging(where, division.right, expression(meant)),
                    tensor=min(names),
                    explanation="the last batch alone was compared; for the whole data, add up the right answers of all batches",
                )
                return


def _compared(statement: ast.stmt | None) -> str | None:
    """A variable that a statement compares with another one."""
    sides: list[ast.expr] = [side for node in nodes(ast.Compare, statement) for side in (*node.comparators, node.left)]
    sides += [argument for call in nodes(ast.Call, statement) if called(call) == "eq" for argument in call.args]
    return next((side.id for side in sides if isinstance(side, ast.Name)), None)


def _bare(value: ast.expr) -> ast.expr:
    """What a number was before it was converted."""
    while (inner := _converted(value)) is not None:
        value = inner
    return value
