"""The error that ended a cell, as a finding."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchdebug_magics.format import byte_size, plural
from torchdebug_magics.instruments.autograd.errors.at_the_line import at_the_line
from torchdebug_magics.instruments.autograd.errors.cut import cut_graph
from torchdebug_magics.instruments.autograd.errors.inplace import modified_in_place
from torchdebug_magics.instruments.autograd.errors.raised import Raised, parts_of_value, statement_at
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import carried_names, earlier_backward, loop_around, simple_statements
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape
from torchdebug_magics.instruments.autograd.training_course import Backward, Course, Step
from torchdebug_magics.probing.syntax import FUNCTIONS, LOOPS, bound_names, enclosing, nodes, parsed, targets_of, tree_of
from torchdebug_magics.probing.where import excerpt, location
from torchdebug_magics.report import Location


@dataclass(frozen=True)
class _Twice:
    """How two backward passes share a graph."""

    how: str
    """``"whole"``: the same loss; ``"carried"``: from the step before; ``"shared"``: two losses of one step."""
    name: str | None = None
    first_at: Location | None = None
    shared_from: Location | None = None
    same_line: bool = False
    made: RecordedOp | None = None
    is_between_models: bool = False
    """Whether, between the two, an optimizer updated parameters that the shared part does not use: each loss trains a model of its own."""
    kept_bytes: int = 0
    """Memory that the shared part of the graph holds, without parameters."""


def second_time(raised: Raised) -> AutogradFinding:
    """The ops that an earlier backward() went through are those that the two share."""
    graph = [op for root in raised.roots for op in raised.tape.graph_of(id(root))]
    first = _first_backward(raised, {op.index for op in graph})
    return _from_text(raised) if first is None else _from_tape(raised, graph, first)


def _from_tape(raised: Raised, graph: list[RecordedOp], first: Backward) -> AutogradFinding:
    shared = {op.index: op for op in graph if op.index in first.ops}
    is_whole = bool(graph) and graph[0].index in shared
    edges = [
        (maker, op) for op in graph if op.index not in shared for use, maker in op.sources if use.requires_grad and maker.index in shared
    ]
    made, consumer = (graph[0], None) if is_whole else max(edges, key=lambda edge: edge[0].index)
    shared_from = made.line.location if made.line is not None else None
    first_at = first.line.location if first.line is not None else None
    same_line = first_at is not None and raised.here is not None and (first_at.file, first_at.line) == (raised.here.file, raised.here.line)
    name = _root_name(raised) if is_whole else _carried_name(shared_from, consumer)
    is_carried = same_line and any(op.index >= first.index for op in graph)  # else both losses were there before the first call
    how = "whole" if is_whole else "carried" if is_carried else "shared"
    apart = how == "shared" and _trains_another(raised, first, shared.values())
    return _told(raised, _Twice(how, name, first_at, shared_from, same_line, made, apart, _saved_bytes(shared.values())))


def _from_text(raised: Raised) -> AutogradFinding:
    """From the source: what the loop carries over, or an earlier call of backward()."""
    if raised.here is None:
        return _told(raised, _Twice("shared"))
    loop = loop_around(raised.here)
    values = dict(reversed(list(raised.variables())))
    carried = [
        (name, line)
        for name, line in (carried_names(loop) if loop is not None else ())
        if any(tensor.grad_fn is not None for tensor in parts_of_value(values.get(name)))
    ]
    if carried:
        where = location(raised.here.file, carried[0][1], raised.here.function)
        return _told(raised, _Twice("carried", ", ".join(name for name, _ in carried), raised.here, where, same_line=True))
    earlier, name = earlier_backward(raised.here), _root_name(raised)
    in_loop = loop is not None and (earlier is None or earlier.line < loop.lineno)
    first_at = raised.here if in_loop else earlier
    same = earlier is not None and earlier.source.partition(".backward")[0] == raised.here.source.partition(".backward")[0]
    how = "whole" if in_loop or same or earlier is None else "shared"
    return _told(raised, _Twice(how, name if how == "whole" else None, first_at, same_line=in_loop))


def _told(raised: Raised, twice: _Twice) -> AutogradFinding:
    headline, fix, why = _words(raised, twice)
    if twice.how == "shared":
        cost = f" (keeps {byte_size(twice.kept_bytes)} until the second call)" if twice.kept_bytes else ""
        fix += f"; or pass `retain_graph=True` to the first call{cost}"
    return AutogradFinding(
        kind="second_backward",
        raised=True,
        headline=headline,
        location=raised.here,
        op=twice.made.name if twice.made is not None else None,
        first_backward_at=twice.first_at,
        shared_from=twice.shared_from,
        tensor=twice.name,
        module=twice.made.module if twice.made is not None else None,
        fix=fix,
        explanation=why,
        excerpt=excerpt(raised.here) if raised.here is not None else (),
    )


def _words(raised: Raised, twice: _Twice) -> tuple[str, str, str]:
    name, how = twice.name, twice.how
    called = f"`{name}`" if name else "a part of the graph"
    if how == "whole":
        called = f"`{name}`" if name else "the same loss"
        again = f"compute {called} inside the loop, before each backward()"
        fix = again if twice.same_line else "delete the second call, or compute the loss again before it"
        return f"backward() was called twice on {called}", fix, "the first call has freed the tensors that the graph had saved"
    if how == "carried":
        names = [one for one in (name or "").split(", ") if one]
        cure = "; ".join(_detached(one, raised) for one in names)
        fix = (
            f"run `{cure}` at the {_place_of(names, raised)} of each step"
            if names
            else "call `.detach()` on what is carried over to the next step"
        )
        return (
            f"{plural(len(names), 'variable')} carry the graph of the previous step into backward()"
            if len(names) > 1
            else f"{called} carries the graph of the previous step into backward()",
            fix,
            "the previous step's backward() has freed its part of the graph",
        )
    sources = [where.source for where in (twice.first_at, raised.here) if where is not None]
    losses = [loss for source in sources if (loss := _loss_of(source))]
    if twice.same_line:
        return f"several losses share {called}", _all_at_once(raised), "the first call has freed the part that they share"
    if len(losses) > 1 and losses[0] == losses[1]:
        again = f"reset `{losses[0]} = 0` before the next sum, or run `{losses[0]} = {losses[0]}.detach()` to keep its value"
        return f"`{losses[0]}` still holds the loss of the first backward()", again, "the first call has freed the graph of that part"
    shared = f"the graph of {called}" if name else called
    if twice.is_between_models and name:
        detached = ", ".join(f"`{one}.detach()`" for one in name.split(", "))
        first = f"`{losses[0]}`" if losses else "the first loss"
        return (
            f"two backward calls share {shared}",
            f"compute {first} from {detached}",
            "the first loss trains other parameters, and frees that graph",
        )
    both = f"replace both calls with `({' + '.join(losses)}).backward()`" if len(losses) > 1 else "add the losses and call backward() once"
    return f"two backward calls share {shared}", both, "the first call has freed the part that both share"


def _loss_of(source: str) -> str:
    """What a line calls backward() on; empty where that is not its own text."""
    functions = (call.func for call in nodes(ast.Call, parsed(source)))
    return next((ast.unparse(one.value) for one in functions if isinstance(one, ast.Attribute) and one.attr == "backward"), "")


def _detached(name: str, raised: Raised) -> str:
    """Code that cuts a variable off its graph, by what it holds."""
    value = dict(reversed(list(raised.variables()))).get(name)
    if type(value) in {tuple, list}:
        parts = f"part.detach() for part in {name}"
        return f"{name} = [{parts}]" if type(value) is list else f"{name} = tuple({parts})"
    return f"{name} = {name}.detach()"


def _place_of(names: list[str], raised: Raised) -> str:
    """Where in a step the variables can be detached: at its end, if the first step begins with another value than a tensor."""
    loop = loop_around(raised.here)
    tree = tree_of(raised.here.file) if raised.here is not None else None
    if loop is None or tree is None:
        return "start"
    functions = [one for one in enclosing(tree, loop.lineno) if isinstance(one, FUNCTIONS)]
    before = [one.statement for one in simple_statements(functions[-1] if functions else tree) if one.statement.lineno < loop.lineno]
    begun = {name: one.value for one in before if isinstance(one, ast.Assign) for name in bound_names(one)}
    return "end" if any(isinstance(begun.get(name), ast.Constant) for name in names) else "start"


def _trains_another(raised: Raised, first: Backward, shared: Iterable[RecordedOp]) -> bool:
    events = raised.course.events if raised.course is not None else []
    after = events[events.index(first) + 1 :] if first in events else []
    used = {use.tensor for op in shared for use in op.reads if use.is_leaf}
    return any(isinstance(one, Step) and one.parameters and not one.parameters & used for one in after)


def _all_at_once(raised: Raised) -> str:
    """One call for all losses that a loop goes through."""
    name = _root_name(raised)
    inner = nodes(ast.comprehension, raised.statement)
    looped = [(one.target, one.iter) for one in (*inner, loop_around(raised.here)) if isinstance(one, (ast.comprehension, ast.For))]
    losses = next((ast.unparse(whole) for target, whole in looped if ast.unparse(target) == name), None)
    return f"replace the loop with `sum({losses}).backward()`" if losses else "add the losses and call backward() once"


def _first_backward(raised: Raised, ops: set[int]) -> Backward | None:
    """The earlier backward pass that went through most of these ops."""
    events = raised.course.events if raised.course is not None else []
    passed = [one for one in events if isinstance(one, Backward) and one.ops & ops and not one.failed]
    return max(passed, key=lambda one: len(one.ops & ops), default=None)


def _carried_name(shared_from: Location | None, consumer: RecordedOp | None) -> str | None:
    """The variables that the one line binds and the other reads."""
    made = statement_at(shared_from)
    used = statement_at(consumer.line.location) if consumer is not None and consumer.line is not None else None
    if made is None:
        return None
    targets = targets_of(made) if not isinstance(made, LOOPS) else []
    bound = [node.id for node in nodes(ast.Name, *targets)] + [ast.unparse(node) for node in nodes(ast.Attribute, *targets)]
    read = {ast.unparse(node) for node in nodes((ast.Name, ast.Attribute), used)}
    both = [one for one in bound if one in read]
    loop = loop_around(shared_from)
    carried = {name for name, _ in carried_names(loop)} if loop is not None else set()
    return ", ".join([one for one in both if one in carried] or both) or (bound[0] if len(bound) == 1 else None)


def _root_name(raised: Raised) -> str | None:
    return raised.name_of(raised.roots[0]) if raised.roots else None


def _saved_bytes(ops: Iterable[RecordedOp]) -> int:
    """Memory of the inputs and outputs of the shared ops, without leaves."""
    spans: dict[int, int] = {}
    for op in ops:
        for use in (*(one for one in op.reads if not one.is_leaf), *op.makes):
            spans[use.memory] = max(spans.get(use.memory, 0), use.span[1])
    return sum(spans.values())


_FROM_THE_GRAPH = {"inplace": modified_in_place, "second_backward": second_time, "cut": cut_graph}


def explained(error: BaseException, tape: Tape | None = None, course: Course | None = None) -> AutogradFinding | None:
    """Of an error, or of the one that it was raised from; None where autograd raised neither. Nothing of the user's runs again."""
    for one in _chain(error):
        raised = Raised.of(one, tape, course)
        if raised is not None:
            return _FROM_THE_GRAPH.get(raised.kind, at_the_line)(raised)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those while which it was raised."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield inner
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
