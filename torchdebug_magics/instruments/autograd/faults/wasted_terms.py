"""A term of a loss that trains nothing: what its gradient reaches is not updated, and a `detach` stands before what is."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.instruments.autograd.tape import Backward, Event, OptimizerStep, RecordedOp, Zeroed, walk
from torchdebug_magics.probing.source.syntax import exchanged, method, targets_of

_SUMS = frozenset({"add", "sub", "rsub", "neg", "mul", "div"})
_FEWEST_PASSES = 2


def wasted_terms(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Asks of each pass and of the updates after it; one that counts in another such pass of the same optimizers is none."""
    events = facts.course.events
    wasted: dict[object, list[tuple[RecordedOp, RecordedOp] | None]] = {}
    for place, seen in enumerate(events):
        if not isinstance(seen, Backward) or not seen.is_recorded:
            continue
        after = events[place + 1 :]
        steps = [event for event in takewhile(lambda event: not isinstance(event, Backward), after) if isinstance(event, OptimizerStep)]
        updated = frozenset[int]().union(*(step.parameters for step in steps))
        root = facts.tape.origin(seen.loss, seen.index)
        if root is not None and updated:
            wasted.setdefault((seen.line, *(step.optimizer for step in steps)), []).append(_wasted(root, updated, after))
    for pairs in wasted.values():
        known = [pair for pair in pairs if pair is not None]
        if len(known) == len(pairs) >= _FEWEST_PASSES:
            term, cut = known[0]
            yield _wasted_finding(term, cut)
            return


def _is_used(leaves: set[int], after: Sequence[Event]) -> bool:
    """Whether an update uses a gradient of these leaves, or may: nothing has set it to zero before the end."""
    left = set(leaves)
    for event in after:
        if isinstance(event, OptimizerStep) and event.parameters & left:
            return True
        if isinstance(event, Zeroed):
            left -= event.parameters
    return bool(left)


def _wasted(root: RecordedOp, updated: frozenset[int], after: Sequence[Event]) -> tuple[RecordedOp, RecordedOp] | None:
    """(the term, the `detach`) of a loss with terms that reach what is updated, and one that does not."""
    terms = list(_terms(root))
    reached = {id(term): _leaves(term) for term in terms}
    if len(terms) < 2 or not any(updated & leaves for leaves in reached.values()):  # noqa: PLR2004 - a sum
        return None
    for term in (term for term in terms if not updated & reached[id(term)] and not _is_used(reached[id(term)], after)):
        for op in walk([term], lambda op: [maker for maker in op.parents if not (maker.in_backward or maker.in_optimizer)]):
            is_cut = op.name == "detach" and "detach" in op.source and any(use.requires_grad for use in op.reads)
            if is_cut and any(updated & _leaves(maker) for maker in op.parents):
                return term, op
    return None


def _terms(root: RecordedOp) -> Iterator[RecordedOp]:
    """The numbers that are added up to a loss, each with its factor."""
    todo = [root]
    while todo:
        op = todo.pop()
        parts = [maker for _, maker in op.sources]
        is_sum = op.name in _SUMS and op.makes and not op.makes[0].shape
        if is_sum and parts and (len(parts) == 1 or op.name not in {"mul", "div"}):
            todo += parts
        else:
            yield op


def _leaves(op: RecordedOp) -> set[int]:
    """The ids of the leaves that a gradient of what it made reaches."""

    def passed(op: RecordedOp) -> list[RecordedOp]:
        return [maker for use, maker in op.sources if use.requires_grad and not maker.initializes and not maker.in_optimizer]

    return {use.tensor for part in walk([op], passed) for use in part.reads if use.is_leaf and use.requires_grad}


def _wasted_finding(term: RecordedOp, cut: RecordedOp) -> AutogradFinding:
    statement = statement_at(cut.where)

    def attached(node: ast.AST) -> ast.AST | None:
        return node.func.value if isinstance(node, ast.Call) and method(node) == "detach" and isinstance(node.func, ast.Attribute) else None

    named: Iterable[ast.expr] = targets_of(statement_at(term.where))
    name = next((ast.unparse(target) for target in named if isinstance(target, ast.Name)), None)
    return finding(
        "wasted_term",
        f"{f'`{name}`' if name else 'a term of the loss'} trains nothing: `detach` cuts it off from what the next step updates",
        cut.where,
        f"`{ast.unparse(exchanged(statement, attached))}`" if statement is not None else "remove `.detach()`",
        op=cut,
        tensor=name,
        saved_at=term.where,
        explanation="its gradient reaches no parameter that an optimizer updates before the next backward pass",
    )
