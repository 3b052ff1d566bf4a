"""Two linear layers with nothing between them: together they compute what one of them could."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, sequential_at, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.source.edited_source import same
from torchdebug_magics.probing.source.syntax import called, dotted, exchanged
from torchdebug_magics.report import Location

_PRODUCTS = frozenset({"addmm", "mm"})
_UNCHANGED = frozenset({"view", "_unsafe_view", "reshape", "clone", "alias", "native_dropout", "squeeze", "unsqueeze", "flatten"})


def linear_chains(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Where the first layer has at least as many outputs as inputs: fewer are a bottleneck, as in an adapter, and meant."""
    updated = {facts.tape.numbers.of(parameter) for key, parameter in facts.parameters.items() if key in facts.updated}
    for op in facts.tape.ops:
        first = _linear_before(op) if _is_linear(op) else None
        if first is None or first.module == op.module or first.root != op.root or _parent(first) != _parent(op):
            continue  # what is projected further in another part, as queries and keys are, meets an activation there
        if sum(later.grad_enabled for later in facts.consumers.get(first.index, ())) > 1:
            continue  # something else is computed of what the first one gives
        width, inputs = first.makes[0].shape[-1], max((use.shape[-1] for use in first.reads if use.memory not in updated), default=0)
        trains = all(any(use.memory in updated for use in each.reads) for each in (first, op))
        if not trains or not 0 < inputs <= width:
            continue
        where, code = _with_activation(op, first) or (op.where, "")
        yield finding(
            "no_activation",
            f"no activation stands between `{first.module}` and `{op.module}`: both layers compute what one could",
            where,
            f"`{code}`" if code else f"put an activation such as `nn.ReLU()` between `{first.module}` and `{op.module}`",
            op=op,
            explanation="a linear function of a linear function is linear: the model cannot fit what one layer could not fit",
            is_hint=True,
        )
        return


def _parent(op: RecordedOp) -> str:
    return (op.module or "").rpartition(".")[0]


def _is_linear(op: RecordedOp) -> bool:
    return op.name in _PRODUCTS and op.module_type == "Linear" and op.is_forward and bool(op.makes)


def _linear_before(op: RecordedOp) -> RecordedOp | None:
    """The layer whose output it is given, as it is or in another shape."""
    makers = [maker for use, maker in op.sources if use.requires_grad and maker.name != "t" and not maker.initializes]
    while len(makers) == 1 and makers[0].name in _UNCHANGED:
        makers = [maker for use, maker in makers[0].sources if use.requires_grad]
    return makers[0] if len(makers) == 1 and _is_linear(makers[0]) else None


def _with_activation(op: RecordedOp, first: RecordedOp) -> tuple[Location, str] | None:
    """The statement that makes both in an ``nn.Sequential``, with an activation between them."""
    places = [(module or "").rpartition(".")[2] for module in (first.module, op.module)]
    if not all(place.isdigit() for place in places):
        return None
    before = int(places[0]) + 1
    for where, made in sequential_at("" if op.line is None else op.line.file, before, "Linear"):
        statement = statement_at(where)
        if statement is not None and called(made.args[before - 1]) == "Linear":
            owner = dotted(made.func).rpartition(".")[0]
            relu = ast.parse(f"{owner}.ReLU()" if owner else "torch.nn.ReLU()", mode="eval").body
            new = ast.Call(made.func, [*made.args[:before], relu, *made.args[before:]], made.keywords)
            return where, ast.unparse(exchanged(statement, partial(_replaced, made, new)))
    return None


def _replaced(old: ast.AST, new: ast.AST, node: ast.AST) -> ast.AST | None:
    return new if same(node, old) else None
