"""Positions that count the samples of a batch: each sample gets one position of its own, and all its time steps the same."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.sample_twins import SampleTwins
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Use, walk
from torchdebug_magics.probing.source.edited_source import exchanging, same
from torchdebug_magics.probing.source.syntax import as_atom, exchanged, expression, method, nodes
from torchdebug_magics.report import Edit

_JOINS = frozenset({"add", "add_", "mul", "cat"})


class Counting(NamedTuple):
    """What is computed of the samples meets what counts them."""

    op: RecordedOp
    operand: int
    """Which of the tensors that the op reads counts them."""
    counter: RecordedOp
    """Has made as many rows as there are samples, of a range or of a longer table."""


def mixed_in_model(twins: SampleTwins, passed: Iterable[RecordedOp]) -> bool:
    """Whether a model computes something of several rows along the twins' dimension."""
    inside = {op.index for op in passed if op.root}
    return any(op.index in inside for op in twins.mixing())


def counted_samples(twins: SampleTwins, passed: Iterable[RecordedOp]) -> Counting | None:
    """The first op in a model that joins the samples with positions along the dimension that holds them."""
    of_samples = twins.reached()
    for op in sorted(passed, key=lambda one: one.index):
        if op.root and op.is_forward and op.name in _JOINS and op.index in of_samples:
            for use, maker in op.sources:
                counter = _counter(use, maker, twins.samples_count, of_samples) if len(use.shape) == len(op.makes[0].shape) else None
                if counter is not None:
                    return Counting(op, op.reads.index(use), counter)
    return None


def _counter(use: Use, maker: RecordedOp, samples_count: int, of_samples: set[int]) -> RecordedOp | None:
    """The op that counts the samples, if the tensor is computed of nothing else but parameters."""
    counters: list[RecordedOp] = []
    for op in walk([maker], lambda op: op.parents) if use.shape[:1] == (samples_count,) else ():
        if op.index in of_samples or "rand" in op.name or op.name in {"bernoulli", "normal"}:
            return None
        table = op.reads[0].shape if op.reads and op.name == "slice" else ()
        if op.makes and op.makes[0].shape[:1] == (samples_count,) and (op.name == "arange" or table[:1] > (samples_count,)):
            counters.append(op)
    return counters[0] if counters else None


def counting_finding(counting: Counting) -> AutogradFinding:
    """The line that counts."""
    op, counter = counting.op, counting.counter
    return finding(
        "leaking_batch",
        "the positions count the samples of the batch: all steps of a sample get the same one",
        counter.where,
        "count the steps, dimension 1, and let the batch be the dimension of size 1",
        edits=_edits(counting),
        op=counter.name,
        module=op.module,
        saved_at=op.where if op.where != counter.where else None,
        explanation="the output for a sample depends on its place in the batch, and not on the order of its steps",
        is_hint=True,
    )


def _edits(counting: Counting) -> tuple[Edit, ...]:
    """The size of dimension 1 where the samples are counted, and a transpose where both meet."""
    counter, op = counting.counter.where, counting.op.where
    counted, joined = _of_steps(statement_at(counter)), _transposed(statement_at(op), counting)
    if counted is None or joined is None:
        return ()
    if counter != op:
        edits = (*exchanging(counter, *counted), *exchanging(op, *joined))
        return edits if len(edits) == 2 else ()  # noqa: PLR2004 - one at each line
    old, new = joined
    return exchanging(op, old, exchanged(new, lambda node: counted[1] if same(node, counted[0]) else None))


def _of_steps(statement: ast.stmt | None) -> tuple[ast.expr, ast.expr] | None:
    """The only size of dimension 0 in a statement, and that of dimension 1."""
    texts = [(node, ast.unparse(node)) for node in nodes(ast.expr, statement)]
    sizes = [(node, text) for node, text in texts if (method(node) == "size" and text.endswith("(0)")) or text.endswith(".shape[0]")]
    return (sizes[0][0], expression(sizes[0][1].replace("(0)", "(1)").replace("[0]", "[1]"))) if len(sizes) == 1 else None


def _transposed(statement: ast.stmt | None, counting: Counting) -> tuple[ast.expr, ast.expr] | None:
    """The operand that counts, and the same with the batch as a dimension of one."""
    sums = [node for node in nodes(ast.BinOp, statement) if isinstance(node.op, (ast.Add, ast.Mult))]
    old: ast.expr | None = statement.value if isinstance(statement, ast.AugAssign) else None
    if old is None and len(sums) == 1:
        old = sums[0].right if counting.operand else sums[0].left
    return None if old is None else (old, expression(f"{as_atom(old)}.transpose(0, 1)"))
