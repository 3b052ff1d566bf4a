"""What has no effect: a term of a loss that trains nothing, a layer that adds nothing to the one before it, a result that is not kept."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.autograd.faults.loss_terms import terms_of
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import edited, finding, loop_around, sequential_at, statement_at, with_options
from torchdebug_magics.instruments.autograd.tape import Backward, Event, OptimizerStep, RecordedOp, Zeroed, walk
from torchdebug_magics.probing.source.edited_source import exchanging, same
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    as_atom,
    blocks,
    called,
    dotted,
    exchanged,
    expression,
    method,
    nodes,
    targets_of,
    tree_of,
)
from torchdebug_magics.report import Edit, Location

_FEWEST_PASSES = 2
_SAMPLES = frozenset({"normal", "bernoulli", "poisson"})
_CONVERSIONS = frozenset({"to", "float", "double", "half", "bfloat16", "long", "int", "bool", "cuda", "cpu", "type"})


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
    terms = [term for term, _ in terms_of(root)]
    reached = {id(term): _leaves(term) for term in terms}
    if len(terms) < 2 or not any(updated & leaves for leaves in reached.values()):  # noqa: PLR2004 - a sum
        return None
    for term in (term for term in terms if not updated & reached[id(term)] and not _is_used(reached[id(term)], after)):
        for op in walk([term], lambda op: [maker for maker in op.parents if not (maker.in_backward or maker.in_optimizer)]):
            is_cut = op.name == "detach" and "detach" in op.source and any(use.requires_grad for use in op.reads)
            if is_cut and any(updated & _leaves(maker) for maker in op.parents):
                return term, op
    return None


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


def dropped_sums(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A sum of losses that is overwritten before the backward pass, by a loss without some of its terms."""
    passes = [seen for seen in facts.course.backwards if seen.is_recorded and seen.leaves & facts.updated]
    reached = {op.index for seen in passes for op in facts.tape.ancestors(seen.loss, seen.index)}
    passes = [seen for seen in passes if facts.tape.ops and seen.index > facts.tape.ops[0].index]  # the ops of earlier ones are forgotten
    sums = [op for op in facts.tape.ops if _is_dropped(op, reached, facts.updated)]
    lost: dict[Line | None, list[tuple[RecordedOp, RecordedOp]]] = {}
    for start, seen in zip([0, *(seen.index for seen in passes)], passes, strict=False):
        root, dropped = facts.tape.origin(seen.loss, seen.index), [op for op in sums if start <= op.index < seen.index]
        if root is not None and dropped:
            lost.setdefault(dropped[-1].line, []).append((dropped[-1], root))
    for pairs in lost.values():
        if len(pairs) == len(passes) >= _FEWEST_PASSES and (overwritten := _overwritten(*pairs[0])) is not None:
            yield overwritten
            return


def _is_dropped(op: RecordedOp, reached: set[int], updated: frozenset[int] | set[int]) -> bool:
    if op.name != "add" or not op.is_forward or op.index in reached or not op.makes or op.makes[0].shape:
        return False
    terms = [term for term, _ in terms_of(op)]
    missed = [term for term in terms if term.index not in reached and updated & _leaves(term)]
    return bool(missed) and any(term.index in reached for term in terms)


def _overwritten(dropped: RecordedOp, root: RecordedOp) -> AutogradFinding | None:
    """Where both are assigned to one variable, in one block: what stands under a condition may be meant."""
    tree = None if root.where is None else tree_of(root.where.file)
    first, second = statement_at(dropped.where), statement_at(root.where)
    if tree is None or second is None or root.index < dropped.index:
        return None
    names = [next((ast.unparse(target) for target in targets_of(statement)), "") for statement in (first, second)]
    block = next((block for node in ast.walk(tree) for block in blocks(node) if second in block), [])
    together = first is not None and any(same(part, first) for part in block)
    if not names[0] or names[0] != names[1] or not together:
        return None
    return finding(
        "wasted_term",
        f"`{names[0]}` is overwritten: of the losses in it, backward() reaches only a part",
        root.where,
        fix="remove this line",
        edits=edited(root.where, "", statement=second),
        tensor=names[0],
        saved_at=dropped.where,
        explanation="some of the losses that were added up train nothing",
    )


_PRODUCTS = frozenset({"addmm", "mm"})
_UNCHANGED = frozenset({"view", "_unsafe_view", "reshape", "clone", "alias", "native_dropout", "squeeze", "unsqueeze", "flatten"})


def dropped_results(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A statement that computes a tensor from one that goes on into a loss, and keeps it nowhere: ``x.clamp(0, 1)`` changes no `x`."""
    consumers, backwards = facts.consumers, facts.course.backwards
    used = {use.tensor for seen in backwards for op in facts.tape.ancestors(seen.loss, seen.index) for use in op.reads}
    loops = [loop_around(seen.where) for seen in backwards]
    for op in facts.tape.ops:
        later = consumers.get(op.index, [])
        is_read = any(
            each.name != "detach" or each.line is not op.line or consumers.get(each.index) for each in later
        )  # by more than its graph
        statement = statement_at(op.where) if op.is_forward and op.makes and not op.writes and not is_read else None
        call = statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
        made_by = {op.name.strip("_"), *(_CONVERSIONS if op.name == "_to_copy" else ())}
        if call is None or called(call) not in made_by or not any(use.tensor in used for use in op.reads):
            continue
        is_inside = op.line is not None and op.line.function != "<module>"
        if not is_inside and loop_around(op.where) not in loops:
            continue  # shown below the cell, or run for its time
        tensors = [argument for argument in call.args if not isinstance(argument, ast.Constant)]
        # A method of a tensor reads that, too; else it is a module, or a library, that is called.
        is_method = isinstance(call.func, ast.Attribute) and len(tensors) < len(op.reads)
        whole = call.func.value if is_method and isinstance(call.func, ast.Attribute) else next(iter(tensors), None)
        is_alike = op.reads[0].shape == op.makes[0].shape
        if isinstance(whole, (ast.Name, ast.Attribute, ast.Subscript)) and (is_method or is_alike) and ast.unparse(whole) != "self":
            yield finding(
                "dropped_result",
                f"`{ast.unparse(call)}` returns a new tensor, which is not kept: `{ast.unparse(whole)}` stays as it is",
                op.where,
                # What comes after the statement has run on the shape as it is.
                f"keep its result where that shape is wanted, or remove the line: the step runs with {shape(op.reads[0].shape)}",
                edits=edited(op.where, ast.unparse(ast.Assign([whole], call, lineno=0))) if is_alike else (),
                op=op,
                explanation="only methods whose names end in an underscore change a tensor in place",
                is_hint=not is_alike,
            )
            return


def samples_without_gradient(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A sample that is drawn by what a model has computed, where nothing else trains that: its derivative is 0."""
    moved = frozenset[int]().union(*(step.nonzero for step in facts.course.steps))
    for op in facts.tape.ops:
        if op.name not in _SAMPLES or not op.is_forward or not op.grad_enabled or not facts.course.backwards:
            continue
        if not (leaves := _leaves(op)) or leaves & moved or not leaves & facts.updated:
            continue  # they are trained by another way: by the logarithm of a probability, or as if nothing had been drawn
        drawn, edits = _with_noise(op)
        yield finding(
            "no_gradient",
            f"`{op.name}` draws a sample, which has no gradient: what has computed its parameters is not trained",
            op.where,
            f"`{drawn}`" if drawn else "draw noise that depends on nothing, and compute the sample from it, as `rsample()` does",
            edits=edits,
            op=op,
            explanation="the derivative of a random number by its mean is taken for 0; that of a mean and scaled noise is not",
        )
        return


def _with_noise(op: RecordedOp) -> tuple[str, tuple[Edit, ...]]:
    """A normal sample as a mean and scaled noise, and the edit of the call; empty for other samples."""
    written = [call for call in nodes(ast.Call, statement_at(op.where)) if called(call) == op.name == "normal"]
    options = {option.arg: option.value for call in written for option in call.keywords}
    given = [*written[0].args, *(options[name] for name in ("mean", "std") if name in options)] if len(written) == 1 else []
    if len(given) < 2 or len(op.reads) < 2:  # noqa: PLR2004 - mean and deviation, both tensors
        return "", ()
    mean, deviation = given[:2]
    drawn = f"{ast.unparse(mean)} + {as_atom(deviation)} * torch.randn_like({ast.unparse(deviation)})"
    return drawn, exchanging(op.where, written[0], expression(drawn))


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
        where, edits = _with_activation(op, first)
        yield finding(
            "no_activation",
            f"no activation stands between `{first.module}` and `{op.module}`: both layers compute what one could",
            where,
            f"put an activation such as `nn.ReLU()` between `{first.module}` and `{op.module}`",
            edits=edits,
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


def _with_activation(op: RecordedOp, first: RecordedOp) -> tuple[Location | None, tuple[Edit, ...]]:
    """The statement that makes both in an ``nn.Sequential``, with an activation between them; else the line of the second layer."""
    places = [(module or "").rpartition(".")[2] for module in (first.module, op.module)]
    before = int(places[0]) + 1 if all(place.isdigit() for place in places) else 0
    for where, made in sequential_at("" if op.line is None else op.line.file, before, "Linear") if before else ():
        if called(made.args[before - 1]) == "Linear":
            relu = expression(f"{dotted(made.func).rpartition('.')[0] or 'torch.nn'}.ReLU()")
            return where, exchanging(where, made, ast.Call(made.func, [*made.args[:before], relu, *made.args[before:]], made.keywords))
    return op.where, ()


def constant_gradients(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A term of a loss that is computed from what ``autograd.grad()`` returned without a graph: a constant."""
    events = [event for event in facts.course.events if isinstance(event, Backward) and event.constants]
    for seen in facts.course.backwards if events else ():
        constants: dict[int, Backward] = {}
        named: list[tuple[str, Line | None]] = []
        for op in sorted(facts.tape.ancestors(seen.loss, seen.index), key=lambda ancestor: ancestor.index):
            returned = {use.tensor for use, maker in op.sources if maker.in_backward}
            origins = [constants[maker.index] for maker in op.parents if maker.index in constants]
            origins += [event for event in events if op.index >= event.index and event.constants & returned]
            if origins and not any(use.requires_grad for use in op.reads):
                constants[op.index] = origins[0]
                named += [(ast.unparse(target), op.line) for target in targets_of(statement_at(op.where))]
            elif origins and op.name in {"add", "sub"} and op.makes and not op.makes[0].shape:
                name = next((name for name, line in reversed(named) if line is not op.line), None)
                yield _constant(origins, seen, name)
                return


def _constant(origins: Sequence[Backward], seen: Backward, name: str | None) -> AutogradFinding:
    asking = statement_at(origins[0].where)
    fix = f"`{with_options(asking, {'grad'}, 'create_graph', value=True)}`" if asking is not None else "pass `create_graph=True` to it"
    return finding(
        "no_gradient",
        f"{f'`{name}`' if name else 'a term of the loss'} is a constant: this call of `autograd.grad` keeps no graph",
        origins[0].where,
        fix,
        first_backward_at=seen.where,
        tensor=name,
        explanation="without it, the gradients that it returns have no graph, and what is computed from them trains nothing",
    )
