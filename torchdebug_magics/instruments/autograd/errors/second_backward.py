"""*Backward through the graph a second time*: both backward calls, and the part of the graph that they share."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size
from torchdebug_magics.instruments.autograd.errors.broken_node import freed_nodes, nodes_of
from torchdebug_magics.instruments.autograd.errors.raised import Raised, statement_at
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from typing import Any

    from torchdebug_magics.instruments.autograd.course import Backward
    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp
    from torchdebug_magics.report import Location

__all__ = ["second_time"]


def second_time(raised: Raised) -> Finding:
    """The nodes that an earlier backward() went through are those that the two share."""
    nodes = list(nodes_of(raised.roots))
    first = _first_backward(raised, nodes)
    # The pass that raised has freed what it went through, too: only where no earlier one is known, the freed nodes have to tell.
    freed = {id(node) for node in freed_nodes(raised.roots)} if first is None else set()
    shared = {id(node): node for node in nodes if id(node) in freed or (first is not None and _number(node) in first.nodes)}
    roots = {id(tensor.grad_fn) for tensor in raised.roots}
    is_whole = bool(shared) and roots <= shared.keys()
    frontier = _frontier(nodes, shared)
    made = raised.tape.by_node.get(_number(frontier[0])) if frontier else None
    if is_whole:
        made = next((op for tensor in raised.roots if (op := raised.tape.by_node.get(_number(tensor.grad_fn))) is not None), None)
    consumer = raised.tape.by_node.get(_number(frontier[1])) if frontier else None
    shared_from = made.line.location if made is not None and made.line is not None else None
    first_at = first.line.location if first is not None and first.line is not None else None
    name = _carried_name(shared_from, consumer) if not is_whole else _root_name(raised)
    carried = not is_whole and (first_at is None or raised.here is None or (first_at.file, first_at.line) == (raised.here.file, raised.here.line))
    headline, fix, why = _words(raised, name, shared_from, first_at, is_whole=is_whole, carried=carried)
    if not is_whole and not carried:
        cost = _saved_bytes(raised, shared.values())
        keeps = f" (keeps {byte_size(cost)} until the second call)" if cost else ""
        fix += f"; or `retain_graph=True` in the first call{keeps}"
    where = _line_to_change(raised, shared_from, carried=carried)
    return Finding(
        kind="second_backward",
        raised=True,
        headline=headline,
        location=where,
        op=made.name if made is not None else None,
        first_backward_at=first_at,
        shared_from=shared_from,
        tensor=name,
        module=made.module if made is not None else None,
        fix=fix,
        explanation=why,
        excerpt=excerpt(where) if where is not None else (),
    )


def _line_to_change(raised: Raised, _shared_from: Location | None, *, carried: bool) -> Location | None:
    del carried
    return raised.here


def _words(
    raised: Raised, name: str | None, shared_from: Location | None, first_at: Location | None, *, is_whole: bool, carried: bool
) -> tuple[str, str, str]:
    called = f"`{name}`" if name else "a part of the graph"
    if is_whole:
        same_line = first_at is not None and raised.here is not None and first_at.line == raised.here.line
        fix = (
            f"compute {called} inside the loop, before each backward()"
            if same_line
            else "delete the second call, or compute the loss again before it"
        )
        return f"backward() was called twice on {'the same loss' if not name else called}", fix, "the first call has freed what the graph had saved"
    if carried:
        fix = f"`{name} = {name}.detach()` at the start of each step" if name and name.isidentifier() else "detach what is carried over to the next step: `.detach()`"
        if name and "," in name:
            fix = "; ".join(f"`{one} = {one}.detach()`" for one in name.split(", ")) + " at the start of each step"
        return (
            f"{called} carries the graph of the step before into this backward()",
            fix,
            "the step before has freed its part of the graph in its own backward()",
        )
    sources = [where.source for where in (first_at, raised.here) if where is not None]
    losses = [source.partition(".backward")[0] for source in sources if ".backward" in source]
    both = f"`({' + '.join(losses)}).backward()` in place of both calls" if len(losses) == 2 else "add the losses and call backward() once"  # noqa: PLR2004
    return f"two backward calls share the graph of {called}", both, "the first call has freed the part that both share"


def _first_backward(raised: Raised, nodes: list[Any]) -> Backward | None:
    """The earlier backward pass that went through most of these nodes."""
    if raised.course is None:
        return None
    numbers = {_number(node) for node in nodes}
    passed = [one for one in raised.course.backwards if one.nodes & numbers and not one.failed]
    return max(passed, key=lambda one: len(one.nodes & numbers), default=None)


def _frontier(nodes: list[Any], shared: dict[int, Any]) -> tuple[Any, Any] | None:
    """(the shared node nearest to the loss, the node that used it)."""
    edges = [
        (inner, node)
        for node in nodes
        if id(node) not in shared
        for inner, _ in node.next_functions
        if inner is not None and id(inner) in shared
    ]
    return max(edges, key=lambda edge: edge[0]._sequence_nr(), default=None)


def _number(node: Any) -> int:
    number: int = node._sequence_nr() if node is not None else -1
    return number if number < 1 << 62 else -1


def _carried_name(shared_from: Location | None, consumer: RecordedOp | None) -> str | None:
    """The variables that the one line binds and the other reads."""
    made = statement_at(shared_from)
    used = statement_at(consumer.line.location) if consumer is not None and consumer.line is not None else None
    if made is None:
        return None
    bound = [node.id for target in _targets(made) for node in ast.walk(target) if isinstance(node, ast.Name)]
    bound += [ast.unparse(node) for target in _targets(made) for node in ast.walk(target) if isinstance(node, ast.Attribute)]
    read = {ast.unparse(node) for node in ast.walk(used) if isinstance(node, (ast.Name, ast.Attribute))} if used is not None else set()
    return ", ".join(one for one in bound if one in read) or (bound[0] if len(bound) == 1 else None)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, (ast.AugAssign, ast.AnnAssign)) else []


def _root_name(raised: Raised) -> str | None:
    return raised.name_of(raised.roots[0]) if raised.roots else None


def _saved_bytes(raised: Raised, nodes: Any) -> int:
    """Of the tensors that the ops of the shared part were given and made, those that are no leaves."""
    spans: dict[int, int] = {}
    for node in nodes:
        op = raised.tape.by_node.get(_number(node))
        for use in (*op.reads, *op.makes) if op is not None else ():
            if not use.is_leaf or use in op.makes:  # type: ignore[union-attr]
                spans[use.memory] = max(spans.get(use.memory, 0), use.span[1])
    return sum(spans.values())
