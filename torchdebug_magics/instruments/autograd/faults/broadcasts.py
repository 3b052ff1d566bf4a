"""Predictions and targets of other shapes, of which each is combined with each."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.instruments.autograd.tape import DISTANCES, RecordedOp, Tape, Use
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import as_atom, called, expression, nodes
from torchdebug_magics.probing.tensors import Crossing
from torchdebug_magics.report import Edit

_COORDINATES = frozenset({"arange", "linspace"})
"""What these make belongs to no sample."""
_SHAPED = re.compile(r"\b(?:None|newaxis|\w*(?:squeeze|view|reshape|expand|repeat|permute|transpose|swap|movedim)\w*|m?T|t)\b")
"""Whoever writes one of these had the dimensions of the result in mind."""
_LONGEST = 40
_Read: TypeAlias = tuple[Use, RecordedOp | None]


class _Crossed(NamedTuple):
    """An op that computes each with each of two tensors."""

    op: RecordedOp
    crossing: Crossing
    operands: tuple[_Read, ...]
    is_only_summed: bool
    """Whether all its products are added up: that is the product of two sums, for which nobody pairs each with each."""

    @property
    def is_meant(self) -> bool:
        """Whether the dimension was given on purpose, or no model had a part in it. Sizes that a loss of PyTorch's compares are not."""
        if self.is_only_summed and len({use.requires_grad for use, _ in self.operands}) > 1:
            return False
        if any(maker is not None and maker.name in _COORDINATES for _, maker in self.operands):
            return True
        uses = [use for use, _ in self.operands]
        if self.is_of_loss or uses[0].memory == uses[1].memory or all(use.requires_grad for use in uses):
            return not self.is_of_loss
        is_of_model = any(use.requires_grad for use in uses)
        for use, step in self.operands:
            maker = step
            while maker is not None:
                is_of_model |= bool(maker.root)
                before = [read for read in _reads(maker) if math.prod(read[0].shape) == math.prod(use.shape)]
                is_reshaped = use.shape == self.crossing.many and any(read.shape != use.shape for read, _ in before)
                if is_reshaped and _SHAPED.search(maker.source):
                    return True
                maker = next((inner for read, inner in before if read.shape == use.shape), None)
        return not is_of_model

    @property
    def is_of_loss(self) -> bool:
        """Whether a function of PyTorch's has brought both to one shape."""
        return all(use not in self.op.reads for use, _ in self.operands)

    def expressions(self, statement: ast.stmt | None) -> list[list[ast.expr]]:
        """The operands of each expression in a statement that may be the op."""
        pairs: list[list[ast.expr]] = []
        for node in nodes(ast.expr, statement):
            pair: list[ast.expr] = []
            if isinstance(node, ast.Call) and (self.is_of_loss or called(node) == self.op.name):
                pair = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in {"input", "target", "other"})]
                pair = [node.func.value, *pair] if len(pair) == 1 and isinstance(node.func, ast.Attribute) else pair[:2]
            elif isinstance(node, (ast.BinOp, ast.Compare)):
                sign = type(node.op if isinstance(node, ast.BinOp) else node.ops[0]).__name__.lower()
                if self.op.name.startswith(sign[:2]) or (sign, self.op.name) == ("noteq", "ne"):
                    pair = [node.left, *([node.right] if isinstance(node, ast.BinOp) else node.comparators)]
            if len(pair) == 2 and not any(isinstance(part, ast.Constant) for part in pair):  # noqa: PLR2004 - a pair
                pairs.append(pair)
        return pairs

    def repaired(self, pairs: Sequence[Sequence[ast.expr]]) -> tuple[Edit, ...]:
        """The statement with one of the operands in the shape of the other one; none where its text does not show them."""
        if not pairs or self.crossing.dim is None:
            return ()
        narrow, wide = (node for _, node in sorted(zip(self.operands, pairs[0], strict=True), key=lambda side: len(side[0][0].shape)))
        is_narrow = len(pairs) > 1 and isinstance(narrow, ast.Name) and not isinstance(wide, ast.Name)
        old = narrow if is_narrow else wide
        new = expression(f"{as_atom(old)}.{'unsqueeze' if is_narrow else 'squeeze'}({self.crossing.dim})")
        return exchanging(self.op.where, old, new)


def accidental_broadcast(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Predictions and targets of which a loss or a metric, one number, compares each with each."""
    for op in facts.tape.ops:
        if (
            op.is_forward
            and op.name in DISTANCES
            and op.makes
            and not op.makes[0].shape
            and (sizes := _unequal(op, facts.tape)) is not None
        ):
            repair = "sum or average the larger one over the dimension that the other one has not, where it is made"
            if 1 in map(math.prod, sizes):
                repair = "let the model return a single value for each sample"
            yield finding(
                "broadcast",
                f"`{op.name}` broadcasts {shape(sizes[0])} with {shape(sizes[1])}",
                op.where,
                f"give both the same shape: {repair}",
                op=op,
                explanation="each value is compared with several, which PyTorch warns about, too",
            )
            return
        if not op.is_forward or not op.makes or op.makes[0].shape:
            continue
        if (crossed := _averaged(op, facts)) is None:
            if (spread := _spread(op, facts.tape)) is not None:
                yield spread
                return
            continue
        pairs = crossed.expressions(statement_at(crossed.op.where))
        texts = [ast.unparse(node) for node in (pairs[0] if pairs else ())]
        shown = texts if texts and len("".join(texts)) <= _LONGEST else ["", ""]
        yield finding(
            "broadcast",
            crossed.crossing.sentence(crossed.op.name, [(text, use.shape) for text, (use, _) in zip(shown, crossed.operands, strict=True)]),
            crossed.op.where,
            "give both operands the same shape before they meet",
            edits=crossed.repaired(pairs),
            op=crossed.op,
            tensor=texts[0] if texts else None,
            explanation=f"it combines {crossed.crossing.meets} instead of each with its own",
        )
        return


def _unequal(op: RecordedOp, tape: Tape) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes that a loss of PyTorch's has brought to one, where they are no pair for a `Crossing`."""
    reads = [_before_expanding(op, read) for read in _reads(op)][:2]
    first, second = (use.shape for use, _ in reads)
    less, more = sorted((math.prod(first), math.prod(second)))
    if less == 1 < more and first[:1] == second[:1] == (1,):  # of one sample
        return (first, second) if _is_of_data(op, min(reads, key=lambda read: math.prod(read[0].shape)), tape) else None
    is_pair = 1 < less < more and Crossing.of(first, second) is None  # of as many, dimensions of 1 alone are added
    return (first, second) if is_pair and first != second else None


def _is_of_data(op: RecordedOp, target: _Read, tape: Tape) -> bool:
    """Whether a target belongs to the sample: another memory in each step, and no constant that is made there, as a GAN's 1 and 0 are."""
    use, maker = target
    others = [read for other in tape.ops if other.name == op.name and other.line is op.line for read in _reads(other)]
    values = {(each.memory, each.span) for each, _ in (_before_expanding(op, read) for read in others) if math.prod(each.shape) == 1}
    is_taken = maker is None or any(math.prod(read.shape) > 1 for read in maker.reads)
    return not use.requires_grad and is_taken and len(values) > 1


def _spread(reducer: RecordedOp, tape: Tape) -> AutogradFinding | None:
    """The log-probability of each value under the distribution of each sample: a column of values, for one distribution a sample."""
    whole = reducer.reads[0].shape if reducer.reads else ()
    if len(whole) < 2 or whole[-2] != whole[-1] or whole[-1] == 1 or not reducer.sources:  # noqa: PLR2004 - a table
        return None
    maker = reducer.sources[0][1]
    while "log_prob" not in maker.source and _keeps_sums(maker) and maker.sources:
        maker = maker.sources[0][1]
    statement = statement_at(maker.where)
    log_probs = [call for call in nodes(ast.Call, statement) if called(call) == "log_prob" and len(call.args) == 1]
    beside = (
        [op for op in tape.ops if op.line is maker.line] if len(log_probs) == 1 and maker.makes and maker.makes[0].shape == whole else []
    )
    entering = [use for op in beside for use, origin in _reads(op) if origin is None or origin.line is not op.line]
    column = (*whole[:-1], 1)
    if not any(use.shape == column and not use.requires_grad for use in entering) or any(use.shape == whole for use in entering):
        return None
    text = ast.unparse(log_probs[0].args[0])
    return finding(
        "broadcast",
        f"`log_prob` of {shape(column)} values under {shape(whole[:-1])} distributions gives {shape(whole)}",
        maker.where,
        edits=exchanging(maker.where, log_probs[0].args[0], expression(f"{as_atom(log_probs[0].args[0])}.squeeze(-1)")),
        op="log_prob",
        tensor=text,
        explanation="each distribution is fitted to the values of all samples instead of its own",
    )


def _averaged(reducer: RecordedOp, facts: TrainingFacts) -> _Crossed | None:
    """The first op whose result, of each with each, went into one number; where it met another tensor of all pairs, it was meant."""
    whole = max((use.shape for use in reducer.reads), key=math.prod, default=())
    first: _Crossed | None = None
    todo, seen, between = [reducer], set[int](), list[RecordedOp]()
    while todo and len(whole) > 1:
        op = todo.pop()
        if op.index in seen:
            continue
        seen.add(op.index)
        operands = tuple(_before_expanding(op, read) for read in _reads(op))
        crossing = Crossing.of(*(use.shape for use, _ in operands))
        if crossing is None or crossing.whole != whole or all(use.shape != whole for use in (*op.makes, *op.reads)):
            wide = [maker for use, maker in _reads(op) if use.shape == whole]
            if not wide or None in wide:
                return None
            todo += filter(None, wide)
            between.append(op)
        elif (crossed := _Crossed(op, crossing, operands, _is_only_summed(op, between, facts))).is_meant:
            return None
        elif first is None or op.index < first.op.index:
            first = crossed
    return first


def _is_only_summed(op: RecordedOp, between: Sequence[RecordedOp], facts: TrainingFacts) -> bool:
    """Whether the products of an op are added up, and nothing else is done with them; none whose line gives a dimension on purpose."""
    is_product = op.name == "mul" and not _SHAPED.search(op.source)
    return is_product and len(facts.consumers.get(op.index, ())) == 1 and all(map(_keeps_sums, between))


def _keeps_sums(op: RecordedOp) -> bool:
    """Whether a sum of what it makes is that of what it reads, but for a factor."""
    return op.name in {"sum", "mean", "neg", "view"} or (op.name in {"mul", "div"} and len([use for use in op.reads if use.shape]) == 1)


def _reads(op: RecordedOp) -> list[_Read]:
    """What it reads, with the op that made it."""
    makers = {id(use): maker for use, maker in op.sources}
    return [(use, makers.get(id(use))) for use in op.reads]


def _before_expanding(op: RecordedOp, read: _Read) -> _Read:
    """What PyTorch has expanded in the same line for an op that wants one shape."""
    maker = read[1]
    is_written = "expand" in op.source or "broadcast" in op.source
    return _reads(maker)[0] if maker is not None and maker.name == "expand" and maker.line is op.line and not is_written else read
