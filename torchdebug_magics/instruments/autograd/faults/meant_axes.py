"""Dimensions that are not where they were meant: moved by a view, summed before they were weighted, selected in the place of sliced."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp, walk
from torchdebug_magics.probing.moved_axes import MovedAxis
from torchdebug_magics.probing.source.edited_source import calls, exchanging
from torchdebug_magics.probing.source.syntax import called, last_name, nodes
from torchdebug_magics.report import Edit, Location

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_copy"})
_WRITTEN = frozenset({"view", "reshape"})
_REDUCTIONS = frozenset({"sum", "mean"})
_LINEAR = frozenset(
    {"add", "add_", "sub", "rsub", "neg", "mul", "div", "sum", "mean", "view", "select", "slice", "squeeze", "unsqueeze", "alias"}
)
"""What is done to the terms of a loss."""
_LOSSES = {
    "nll_loss_forward": ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss"),
    "nll_loss2d_forward": ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss"),
    "binary_cross_entropy": ("binary_cross_entropy", "BCELoss"),
    "mse_loss": ("mse_loss", "MSELoss"),
    "smooth_l1_loss": ("smooth_l1_loss", "SmoothL1Loss"),
    "huber_loss": ("huber_loss", "HuberLoss"),
}
"""The functions and modules that run the op, which take ``reduction``."""
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
        call = written[0] if len(written) == 1 else None
        moved = MovedAxis.of(op.reads[0].shape, op.makes[0].shape, call) if written else None
        if moved is None:
            continue
        turned = None if call is None else moved.permuted(call)
        name = written[0].func.attr if isinstance(written[0].func, ast.Attribute) else "view"
        yield finding(
            "scrambled",
            moved.sentence(name, ""),
            op.where,
            "permute the dimensions before" if turned is None else f"`{ast.unparse(turned)}`",
            edits=() if call is None or turned is None else exchanging(op.where, call, turned),
            op=op.name.strip("_"),
            module=op.module,
            explanation="`view` and `reshape` do not transpose: they read the values in the order in which they lie in memory",
        )
        return


def early_reductions(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """What is one number for the whole batch already when it meets the weights, the mask or the labels of the elements."""
    for op in facts.tape.ops:
        if op.name not in {"mul", "eq"} or not op.is_forward or len(op.reads) != 2:  # noqa: PLR2004 - a pair
            continue
        number, each = sorted(op.reads, key=lambda use: len(use.shape))
        sizes = _without_ones(each.shape)
        if number.shape or each.requires_grad or math.prod(sizes) < 2:  # noqa: PLR2004 - of several elements
            continue
        is_loss = op.name == "mul"
        reduction = _reduction(op, sizes, is_loss=is_loss)
        if reduction is None or (is_loss and not (number.requires_grad and _goes_into_a_loss(facts, op))):
            continue
        fix, edits = _later_reduced(reduction, len(sizes))
        what = _LOSSES.get(reduction.name, (reduction.name,))[0]
        then = f"the weights of {shape(each.shape)} multiply it" if is_loss else f"{shape(each.shape)} labels are compared with it"
        reason = "each weight multiplies the whole batch: the elements are not weighted, and the term counts once for each of them"
        yield finding(
            "early_reduction",
            f"`{what}` makes one number of {shape(reduction.reads[0].shape)} before {then}",
            reduction.where,
            fix,
            edits=edits,
            op=what,
            saved_at=op.where if op.where != reduction.where else None,
            module=reduction.module,
            explanation=reason if is_loss else "without a dimension, it is the place of the largest of all scores",
        )
        return


def _without_ones(sizes: tuple[int, ...]) -> tuple[int, ...]:
    while sizes[-1:] == (1,):
        sizes = sizes[:-1]
    return sizes


def _reduction(meeting: RecordedOp, sizes: tuple[int, ...], *, is_loss: bool) -> RecordedOp | None:
    """The op that made the number that an op reads, of a tensor with dimensions of these sizes first."""
    numbers = [maker for use, maker in meeting.sources if not use.shape]
    for maker in walk(numbers, lambda op: [parent for use, parent in op.sources if not use.shape and not op.reads[0].shape]):
        read = maker.reads[0] if maker.reads else None
        names = (_REDUCTIONS | _LOSSES.keys()) if is_loss else {"argmax"}
        if read is not None and read.shape and maker.name in names and (read.requires_grad or not is_loss):
            return maker if read.shape[: len(sizes)] == sizes and (is_loss or len(read.shape) > len(sizes)) else None
    return None


def _goes_into_a_loss(facts: TrainingFacts, product: RecordedOp) -> bool:
    """Whether its elements are added up, and nothing else is done with them."""
    later = walk(facts.consumers.get(product.index, ()), lambda op: () if _is_number(op) else facts.consumers.get(op.index, ()))
    terms = list(later)
    return any(map(_is_number, terms)) and all(op.name in _LINEAR for op in terms)


def _is_number(op: RecordedOp) -> bool:
    return bool(op.makes) and not op.makes[0].shape


def _later_reduced(reduction: RecordedOp, kept_count: int) -> tuple[str, tuple[Edit, ...]]:
    """What to write so that as many dimensions as the weights have are kept, and the edit."""
    names, where = _LOSSES.get(reduction.name, ()), reduction.where
    if names:
        here = [(where, call) for call in nodes(ast.Call, statement_at(where)) if called(call) in names]
        made = here or [(at, call) for at, call in calls("" if where is None else where.file) if called(call) in names]
        return 'use `reduction="none"`', _with_keyword(made, "reduction", ast.Constant("none"))
    dims = [-1 - place for place in reversed(range(len(reduction.reads[0].shape) - kept_count))]
    calls_here = [call for call in nodes(ast.Call, statement_at(where)) if last_name(call.func) == reduction.name and not call.keywords]
    if not dims:
        fix, one = f"leave out this `{reduction.name}`", calls_here[0] if len(calls_here) == 1 else None
        whole = (
            one.func.value
            if one is not None and not one.args and isinstance(one.func, ast.Attribute)
            else next(iter(one.args), None)
            if one
            else None
        )
        return fix, () if one is None else exchanging(where, one, whole)
    value: ast.expr = (
        ast.UnaryOp(ast.USub(), ast.Constant(1)) if len(dims) == 1 else ast.Tuple([ast.Constant(dim) for dim in dims], ast.Load())
    )
    fix = (
        f"`{reduction.name}` over the last {'dimension' if len(dims) == 1 else f'{len(dims)} dimensions'} alone: `dim={ast.unparse(value)}`"
    )
    return fix, _with_keyword([(where, call) for call in calls_here], "dim", value)


def _with_keyword(made: list[tuple[Location | None, ast.Call]], name: str, value: ast.expr) -> tuple[Edit, ...]:
    if len(made) != 1:
        return ()
    where, call = made[0]
    others = [keyword for keyword in call.keywords if keyword.arg != name]
    return exchanging(where, call, ast.Call(call.func, call.args, [*others, ast.keyword(name, value)]))


def one_row_for_all(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """``x + table[:, x.shape[1]]``, which selects a single row by the number of steps, and gives that to all of them."""
    for op in facts.tape.ops:
        if op.name != "select" or not op.is_forward or not op.makes:
            continue
        for part in nodes(ast.Subscript, statement_at(op.where)):
            sliced = _sliced(part)
            joined = next((later for later in facts.consumers.get(op.index, ()) if later.name in _JOINS), None) if sliced else None
            if sliced is None or joined is None or max(len(use.shape) for use in joined.reads) < len(op.reads[0].shape):
                continue
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


def _sliced(part: ast.Subscript) -> ast.Subscript | None:
    """The same with a slice up to the size that stands there as an index; None where there is none."""
    indices = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
    new = [ast.Slice(upper=index) if _is_size(index) else index for index in indices]
    if not any(map(_is_size, indices)):
        return None
    return ast.Subscript(part.value, ast.Tuple(new, ast.Load()) if len(new) > 1 else new[0], part.ctx)


def _is_size(node: ast.expr) -> bool:
    """``x.size(1)``, ``x.shape[1]``, ``len(x)``."""
    match node:
        case ast.Call(ast.Attribute(attr="size"), [_]) | ast.Subscript(ast.Attribute(attr="shape"), ast.Constant() | ast.UnaryOp()):
            return True
        case ast.Call(ast.Name("len"), [_]):
            return True
    return False
