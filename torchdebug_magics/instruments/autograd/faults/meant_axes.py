"""Dimensions that are not where they were meant: moved by a view, selected in the place of sliced, summed in the place of another."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import edited, finding, statement_at, with_option
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Use, walk
from torchdebug_magics.probing.source.edited_source import calls, exchanging
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.moved_axes import MovedAxis
from torchdebug_magics.probing.source.syntax import called, dotted, expression, nodes, tree_of
from torchdebug_magics.report import Edit, Location

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_copy"})
_WRITTEN = frozenset({"view", "reshape"})
_JOINS = frozenset({"add", "mul"})


def moved_axes(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """The first view that gives a dimension the numbers of others: a permute was meant."""
    for op in facts.tape.ops:
        if (
            op.name not in _RESHAPES
            or not op.is_forward
            or not op.reads
            or not op.makes
            or (op.reads[0].is_leaf and op.reads[0].requires_grad)
        ):
            continue
        written = [call for call in nodes(ast.Call, statement_at(op.where)) if called(call) in _WRITTEN]
        # Of several in a line, the one with as many sizes.
        alike = written if len(written) == 1 else [call for call in written if len(call.args) == len(op.makes[0].shape)]
        tree = None if op.where is None else tree_of(op.where.file)
        moved = MovedAxis.of(op.reads[0].shape, op.makes[0].shape, alike[0], tree) if len(alike) == 1 else None
        if moved is None:
            continue
        call, turned = alike[0], moved.permuted(alike[0])
        name = call.func.attr if isinstance(call.func, ast.Attribute) else "view"
        yield finding(
            "scrambled",
            moved.sentence(name, ""),
            op.where,
            "permute the dimensions before" if turned is None else f"`{ast.unparse(turned)}`",
            edits=() if turned is None else exchanging(op.where, call, turned),
            op=op.name.strip("_"),
            module=op.module,
            explanation="`view` and `reshape` do not transpose: they read the values in the order in which they lie in memory",
        )
        return


_ELEMENTWISE = frozenset(
    {"mul", "div", "add", "sub", "masked_fill", "where", "clone", "_to_copy", "_unsafe_view", "view", "expand", "native_dropout"}
)
"""What leaves each element of scores, and of the weights made of them, at its place among the last two dimensions."""
_PRODUCTS = frozenset({"mm", "bmm"})


def other_axis(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Attention whose weights sum to 1 over another dimension than that over which they are summed."""
    for op in facts.tape.ops:
        if op.name != "_softmax" or not op.is_forward or op.number is None or not op.makes or not _is_of_products(op):
            continue
        sizes = op.makes[0].shape
        axis = int(op.number) % len(sizes) - len(sizes)
        for product, place in _products_of(facts, op):
            summed = -1 if place == 0 else -2
            if axis not in {-1, -2} or axis == summed or min(sizes[-2:]) == 1:
                continue
            yield finding(
                "other_axis",
                f"`softmax` over dimension {axis}, but the product sums the weights over dimension {summed}",
                op.where,
                f"apply the softmax along `dim={summed}`",
                edits=_along(op.where, summed),
                op="softmax",
                saved_at=product.where,
                module=op.module,
                explanation="the weights of a sum are to add up to 1: here they do so over what is weighted, and not over what is summed",
            )
            return


def _is_of_products(softmax: RecordedOp) -> bool:
    """Whether the scores are products of two things that were computed: of queries and keys."""
    scores = walk([softmax], lambda op: [maker for _, maker in op.sources[:1]] if op is softmax or op.name in _ELEMENTWISE else ())
    product = next((op for op in scores if op.name in _PRODUCTS), None)
    return product is not None and not any(_is_parameter(use, product) for use in product.reads)


def _is_parameter(use: Use, product: RecordedOp) -> bool:
    """Whether a factor is a parameter, as it is or turned."""
    turned = (maker.reads[0] for made, maker in product.sources if made is use and maker.name in {"t", "transpose"})
    return any(each.is_leaf and each.requires_grad for each in (use, *turned))


def _products_of(facts: TrainingFacts, softmax: RecordedOp) -> Iterator[tuple[RecordedOp, int]]:
    """(the product, whether they are its first or second factor) that the weights go into, as they are."""
    sizes, passed = softmax.makes[0].shape[-2:], {softmax.index}
    if any(op.name == "sum" for op in facts.consumers.get(softmax.index, ())):
        return  # by which they are normed once more
    for op in walk([softmax], lambda op: facts.consumers.get(op.index, ()) if op.index in passed else ()):
        if op.name in _ELEMENTWISE and not (op.name == "div" and len(op.reads) > 1):  # which norms them by their own sums
            passed.add(op.index)
        for use, maker in op.sources if op.name in _PRODUCTS else ():
            if maker.index in passed and use.shape[-1:] == sizes[-1:]:
                yield op, 0 if use is op.reads[0] else 1


def _along(where: Location | None, dim: int) -> tuple[Edit, ...]:
    """The call of a softmax with another dimension: in the line, or where the module is made."""
    here = [
        (where, call)
        for call in nodes(ast.Call, statement_at(where))
        if called(call) == "softmax" and not dotted(call.func).startswith("self.")
    ]
    made = here or [(at, call) for at, call in calls("" if where is None else where.file) if called(call) == "Softmax"]
    if len(made) != 1:
        return ()
    place, call = made[0]
    return exchanging(place, call, with_dim(call, dim))


def with_dim(call: ast.Call, dim: int) -> ast.Call:
    """The call with another dimension, by name."""
    numbers = [argument for argument in call.args if isinstance(argument, (ast.Constant, ast.UnaryOp))]
    plain = ast.Call(call.func, [argument for argument in call.args if argument not in numbers], call.keywords)
    return with_option(plain, "dim", dim)


def one_column(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """The place of the largest score of one: 0 for each sample, whatever the model says."""
    has_logits = any(op.name == "binary_cross_entropy_with_logits" for op in facts.tape.ops)
    for op in facts.tape.ops:
        if op.name not in {"argmax", "max"} or not op.reads or not op.makes:
            continue
        scores, place = op.reads[0].shape, op.makes[0].shape
        statement = statement_at(op.where)
        call = next((node for node in nodes(ast.Call, statement) if called(node) == op.name), None)
        is_column = len(scores) > 1 and scores[-1] == 1 and math.prod(scores) == math.prod(place) > 1
        alike = [other.reads[0].shape[-1:] for other in facts.tape.ops if other.name == op.name and other.line == op.line and other.reads]
        is_column = is_column and _is_compared(facts, op) and set(alike) == {(1,)}  # else the same line has had more than one score
        if call is None or not is_column or (op.name == "max" and (len(op.makes) == 1 or not _takes_places(statement, call))):
            continue
        maker = next(iter(op.parents), None)
        while maker is not None and maker.name in {"detach", "alias", "view", "_to_copy"}:
            maker = next(iter(maker.parents), None)
        threshold = 0.5 if maker is not None and maker.name == "sigmoid" else 0 if has_logits else None
        with_what = "a threshold" if threshold is None else f"{threshold}, in place of `{ast.unparse(call)}`"
        yield finding(
            "compared_scores",
            f"`{op.name}` of one score in a sample gives place 0: the same class for all",
            op.where,
            f"compare the score with {with_what}",
            edits=()
            if threshold is None
            else _thresholded(op, statement, call, threshold, keeps=place == scores or _meets(facts, op, scores)),
            op=op.name,
            explanation=f"the scores are {shape(scores)}: one for each sample, which is above the threshold or not",
        )
        return


def _is_compared(facts: TrainingFacts, op: RecordedOp) -> bool:
    """Whether the places are compared with classes."""
    passed = walk([op], lambda each: facts.consumers.get(each.index, ()) if each is op or each.name in _RESHAPES | {"_to_copy"} else ())
    return any(each.name == "eq" for each in passed)


def _meets(facts: TrainingFacts, op: RecordedOp, scores: tuple[int, ...]) -> bool:
    """Whether the places are compared with classes that have the shape of the scores."""
    comparisons = (each for each in facts.consumers.get(op.index, ()) if each.name == "eq")
    return any(use.shape == scores for each in comparisons for use in each.reads)


def _takes_places(statement: ast.stmt | None, call: ast.Call) -> bool:
    """Whether the second result of `max` is what is read."""
    match statement:
        case ast.Assign([ast.Tuple([ast.Name("_"), _])], value) if value is call:
            return True
    owners = [node for node in nodes((ast.Subscript, ast.Attribute), statement) if node.value is call]
    return any(ast.unparse(node).endswith(("[1]", "[-1]", ".indices")) for node in owners)


def _thresholded(op: RecordedOp, statement: ast.stmt | None, call: ast.Call, threshold: float, *, keeps: bool) -> tuple[Edit, ...]:
    """The comparison in the place of the call and of what takes its second result."""
    scores = (
        call.func.value
        if isinstance(call.func, ast.Attribute) and dotted(call.func.value) != "torch"
        else call.args[0]
        if call.args
        else None
    )
    if scores is None or op.where is None:
        return ()
    new = expression(f"({ast.unparse(scores)} > {threshold}).long()" + ("" if keeps else ".squeeze(-1)"))
    match statement:
        case ast.Assign([ast.Tuple([ast.Name("_"), name])], value) if value is call:
            return edited(op.where, f"{ast.unparse(name)} = {ast.unparse(new)}", statement=statement)
    owner = next((node for node in nodes((ast.Subscript, ast.Attribute), statement) if node.value is call), None)
    return exchanging(op.where, owner if owner is not None and op.name == "max" else call, new)


def one_row_for_all(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """``x + table[:, x.shape[1]]``, which selects a single row by the number of steps, and gives that to all of them."""
    parts: dict[Line | None, list[tuple[ast.Subscript, ast.Subscript]]] = {}
    for op in facts.tape.ops:
        if op.name != "select" or not op.is_forward or not op.makes:
            continue
        joined = next((later for later in facts.consumers.get(op.index, ()) if later.name in _JOINS), None)
        if joined is None or max(len(use.shape) for use in joined.reads) < len(op.reads[0].shape):
            continue
        if op.line not in parts:
            statement = statement_at(op.where)
            pairs = [(part, _sliced(part, statement)) for part in nodes(ast.Subscript, statement)]
            parts[op.line] = [(part, sliced) for part, sliced in pairs if sliced is not None]
        for part, sliced in parts[op.line]:
            index = ast.unparse(part)
            yield finding(
                "one_row",
                f"`{index}` is one row, and all steps get it",
                op.where,
                f"`{ast.unparse(sliced)}`, a row for each",
                edits=exchanging(op.where, part, sliced),
                op="select",
                module=op.module,
                explanation="a number in the brackets selects; with a colon before it, it is the end of a slice",
            )
            return


def _sliced(part: ast.Subscript, statement: ast.stmt | None) -> ast.Subscript | None:
    """The same with a slice up to the size of what the row is added to, where that stands as an index; None where it does not."""
    sides = [side for node in nodes(ast.BinOp, statement) for side in (node.left, node.right)]
    sides += [side for node in nodes(ast.AugAssign, statement) for side in (node.target, node.value)]
    others = {ast.unparse(side) for side in sides}
    indices = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
    sizes = [index for index in indices if (whole := _sized(index)) is not None and ast.unparse(whole) in others]
    new = [ast.Slice(upper=index) if index in sizes else index for index in indices]
    if not sizes:
        return None
    return ast.Subscript(part.value, ast.Tuple(new, ast.Load()) if len(new) > 1 else new[0], part.ctx)


def _sized(node: ast.expr) -> ast.expr | None:
    """The tensor whose size ``x.size(1)``, ``x.shape[1]`` or ``len(x)`` is."""
    match node:
        case ast.Call(ast.Attribute(whole, "size"), [_]) | ast.Subscript(ast.Attribute(whole, "shape"), ast.Constant() | ast.UnaryOp()):
            return whole
        case ast.Call(ast.Name("len"), [whole]):
            return whole
    return None
