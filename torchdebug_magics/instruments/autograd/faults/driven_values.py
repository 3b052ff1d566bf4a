"""A value that one term of a loss moves toward its target, and that another term, which it only weights, moves away."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.instruments.autograd.tape import DISTANCES, RecordedOp, Use, walk
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import as_atom, expression, nodes
from torchdebug_magics.report import Edit

_DIFFERENCES = frozenset({"sub", "rsub"})
_SCALED = frozenset({"sub", "rsub", "neg", "div", "mul", "view", "reshape", "squeeze", "unsqueeze", "select", "stack", "cat", "clone"})
"""What an advantage goes through between the difference that it is, and the term that it weights."""
_LOGARITHMS = frozenset({"log", "_log_softmax", "logsumexp"})
_CHOICES = frozenset({"gather", "index", "nll_loss_forward"})
"""What takes the logarithm of the action that was drawn."""


def driven_values(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """An advantage that keeps its graph where it weights the logarithm of a probability, as in a policy gradient."""
    fitted = {use.memory for op in facts.tape.ops if op.name in DISTANCES and op.is_forward for use in op.reads if use.requires_grad}
    logarithms, chosen = set[int](), set[int]()
    for op in facts.tape.ops:
        parents = {maker.index for maker in op.parents}
        if op.name in _LOGARITHMS or parents & logarithms:
            logarithms.add(op.index)
        if op.name in _CHOICES or parents & chosen:
            chosen.add(op.index)
    for op in facts.tape.ops:
        if op.name != "mul" or not op.is_forward or len(op.sources) != 2 or not all(use.requires_grad for use in op.reads):  # noqa: PLR2004 - a pair
            continue
        for (use, factor), (_, weighted) in itertools.permutations(op.sources):
            difference = _difference(facts, factor, fitted) if weighted.index in logarithms & chosen else None
            if difference is None or difference in walk([weighted], lambda op: op.parents):
                continue
            name, edits = _detached(op, use)
            yield finding(
                "driven_value",
                f"`{name}` keeps its graph: the policy's term of the loss changes the value as well",
                op.where,
                f"`{name}.detach()`",
                edits=edits,
                op=op,
                tensor=name,
                saved_at=difference.where,
                explanation="it says how good an action was, and is a constant there: else the value is driven away from the returns",
            )
            return


def _difference(facts: TrainingFacts, factor: RecordedOp, fitted: set[int]) -> RecordedOp | None:
    """The difference of a target and a value that another term of the loss fits to it, of which a factor was made."""
    for op in walk([factor], _before):
        own = [use for use in op.reads if use.requires_grad]
        if op.name in _DIFFERENCES and len(own) == 1:
            is_squared = any(later.name == "pow" for later in facts.consumers.get(op.index, ()))
            if is_squared or own[0].memory in fitted:
                return op
    return None


def _before(op: RecordedOp) -> list[RecordedOp]:
    """What an advantage was before it was scaled; nothing where it met something else that is trained."""
    makers = [maker for use, maker in op.sources if use.requires_grad]
    return makers if op.name in _SCALED and op.name not in _DIFFERENCES and len(makers) == 1 else []


def _detached(product: RecordedOp, use: Use) -> tuple[str, tuple[Edit, ...]]:
    """What the user calls a factor, and the edit that takes its graph away."""
    products = [node for node in nodes(ast.BinOp, statement_at(product.where)) if isinstance(node.op, ast.Mult)]
    if len(products) != 1:
        return "the advantage", ()
    side = products[0].left if use is product.reads[0] else products[0].right
    return ast.unparse(side), exchanging(product.where, side, expression(f"{as_atom(side)}.detach()"))
