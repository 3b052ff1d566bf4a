"""Dimensions that are not where they were meant: moved by a view, summed before they were weighted, selected in the place of sliced."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at, with_option
from torchdebug_magics.instruments.autograd.tape import RecordedOp, walk
from torchdebug_magics.probing.source.edited_source import Source, calls, exchanging
from torchdebug_magics.probing.source.moved_axes import MovedAxis
from torchdebug_magics.probing.source.syntax import called, dotted, expression, last_name, nodes, tree_of
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
        if reduction.name == "sum" and _per_element(reduction) == sizes:
            continue  # the product of two sums, as of log-probabilities and returns
        fix, edits = _later_reduced(reduction, each.shape)
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
            is_hint=reduction.name in _REDUCTIONS,
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
            elements = _per_element(maker)
            return maker if elements[: len(sizes)] == sizes and (is_loss or len(elements) > len(sizes)) else None
    return None


def _per_element(reduction: RecordedOp) -> tuple[int, ...]:
    """The shape of what it makes one number of: of a loss of classes, without these."""
    whole = reduction.reads[0].shape
    return (*whole[:1], *whole[2:]) if reduction.name.startswith("nll_loss") else whole


def _goes_into_a_loss(facts: TrainingFacts, product: RecordedOp) -> bool:
    """Whether its elements are added up, and nothing else is done with them."""
    later = walk(facts.consumers.get(product.index, ()), lambda op: () if _is_number(op) else facts.consumers.get(op.index, ()))
    terms = list(later)
    return any(map(_is_number, terms)) and all(op.name in _LINEAR for op in terms)


def _is_number(op: RecordedOp) -> bool:
    return bool(op.makes) and not op.makes[0].shape


def _later_reduced(reduction: RecordedOp, wanted: tuple[int, ...]) -> tuple[str, tuple[Edit, ...]]:
    """What to write so that the elements keep the shape of the weights, and the edit; none where a dimension would be left over."""
    names, where, elements = _LOSSES.get(reduction.name, ()), reduction.where, _per_element(reduction)
    fits = elements[: len(wanted)] == wanted
    if names:
        here = [(where, call) for call in nodes(ast.Call, statement_at(where)) if called(call) in names]
        made = here or [(at, call) for at, call in calls("" if where is None else where.file) if called(call) in names]
        return 'use `reduction="none"`', _with_option(made, "reduction", "none") if elements == wanted else ()
    dims = [-1 - place for place in reversed(range(len(elements) - len(_without_ones(wanted))))]
    written = [call for call in nodes(ast.Call, statement_at(where)) if last_name(call.func) == reduction.name and not call.keywords]
    if not dims:
        return f"leave out this `{reduction.name}`", _left_out(where, written) if fits else ()
    value = dims[0] if len(dims) == 1 else tuple(dims)
    fix = f"`{reduction.name}` over the last {'dimension' if len(dims) == 1 else f'{len(dims)} dimensions'} alone: `dim={value}`"
    return fix, _with_option([(where, call) for call in written], "dim", value) if fits else ()


def _left_out(where: Location | None, written: list[ast.Call]) -> tuple[Edit, ...]:
    """What a reduction is called on, or with, in its place."""
    if len(written) != 1:
        return ()
    call = written[0]
    if call.args:
        return exchanging(where, call, call.args[0])
    return exchanging(where, call, call.func.value) if isinstance(call.func, ast.Attribute) else ()


def _with_option(made: list[tuple[Location | None, ast.Call]], name: str, value: str | int | tuple[int, ...]) -> tuple[Edit, ...]:
    """The edit of the only call."""
    return exchanging(made[0][0], made[0][1], with_option(made[0][1], name, value)) if len(made) == 1 else ()


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
        is_column = is_column and _is_compared(facts, op) and not any(_is_wider(other, op) for other in facts.tape.ops)
        if call is None or not is_column or (op.name == "max" and (len(op.makes) == 1 or not _takes_places(statement, call))):
            continue
        maker = op.parents[0] if op.parents else None
        while maker is not None and maker.name in {"detach", "alias", "view", "_to_copy"}:
            maker = maker.parents[0] if maker.parents else None
        threshold = 0.5 if maker is not None and maker.name == "sigmoid" else 0 if has_logits else None
        yield finding(
            "compared_scores",
            f"`{op.name}` of one score in a sample gives place 0: the same class for all",
            op.where,
            "compare the score with a threshold"
            if threshold is None
            else f"compare the score with {threshold}, in place of `{ast.unparse(call)}`",
            edits=() if threshold is None else _thresholded(op, statement, call, threshold, keeps=place == scores),
            op=op.name,
            explanation=f"the scores are {shape(scores)}: one for each sample, which is above the threshold or not",
        )
        return


def _is_compared(facts: TrainingFacts, op: RecordedOp) -> bool:
    """Whether the places are compared with classes."""
    passed = walk([op], lambda each: facts.consumers.get(each.index, ()) if each is op or each.name in _RESHAPES | {"_to_copy"} else ())
    return any(each.name == "eq" for each in passed)


def _is_wider(other: RecordedOp, op: RecordedOp) -> bool:
    """Whether the same line has had more than one score."""
    return other.name == op.name and other.line == op.line and bool(other.reads) and other.reads[0].shape[-1:] != (1,)


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
            tree = tree_of(op.where.file)
            source = None if tree is None else Source(op.where, tree)
            return () if source is None else (source.replacing(statement, f"{ast.unparse(name)} = {ast.unparse(new)}"),)
    owner = next((node for node in nodes((ast.Subscript, ast.Attribute), statement) if node.value is call), None)
    return exchanging(op.where, owner if owner is not None and op.name == "max" else call, new)


def one_row_for_all(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """``x + table[:, x.shape[1]]``, which selects a single row by the number of steps, and gives that to all of them."""
    for op in facts.tape.ops:
        if op.name != "select" or not op.is_forward or not op.makes:
            continue
        for part in nodes(ast.Subscript, statement_at(op.where)):
            sliced = _sliced(part, statement_at(op.where))
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
