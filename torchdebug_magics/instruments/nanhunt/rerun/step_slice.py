"""The statements of a step, from the model call to `backward()`, as code that can run once more without side effects of its own."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import dropwhile, takewhile
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.rerun.attempt import Position, refuse
from torchdebug_magics.instruments.nanhunt.rerun.runnable_code import Batches, Drawn, drawn_by, draws, makers, runnable, written_into
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Step
from torchdebug_magics.probing.source.syntax import SIMPLE, bound_names, lists_around, names_in, read_before_bound, span_as_written, tree_of
from torchdebug_magics.probing.source.user_code import adopt_timed, local_values, location, owner
from torchdebug_magics.report import Location

_NO_SOURCE = "the source of the step is not at hand"


@dataclass(frozen=True)
class Slice:
    """Code to execute, and the names it runs with."""

    code: CodeType
    names: dict[str, Any]
    statements: tuple[ast.stmt, ...]
    made: dict[str, Any]
    """What the variables that the step binds held at its end."""


def cut(
    step: Step, sink: tuple[Position, ...], wanted: str = "", held: Mapping[str, Any] = MappingProxyType({}), *, graphs: bool = True
) -> Slice:
    """The slice of the deepest frame that stands both in the step's first model call and in its `backward()`.

    Without a model call: the statements before `backward()` that the loss depends on. `wanted` names a variable whose making, before
    the model call, is to be run again, too, as is with `graphs` that of each variable with a graph; `held` says what variables held before.
    """
    adopt_timed(position.frame for position in sink)
    if step.entries:
        start, end = _common(step, sink)
        body, first, last = _statements(start, end)
        statements = body[first : last + 1]
        early = dict(step.live_in.get(id(start.frame), {}))
        # What is filled in the step must begin empty again.
        remade = ({wanted} - {""}) | written_into(statements) | ((_with_graphs(end, statements) if graphs else set()) - early.keys())
        before, _ = makers(_ahead(start, body)[0], remade, frozenset(held))
        early.update(held)
    else:
        files = ((position, position.frame.f_code.co_filename) for position in sink)
        ends = (position for position, file in files if owner(file) in {"user", "library"} and tree_of(file) is not None)
        end = next(ends, None) or refuse(_NO_SOURCE)
        before, statements = [], _dependencies(end)
        early = {}
    now, together = {**end.frame.f_globals, **local_values(end.frame)}, [*before, *statements]
    code, given = runnable(together, end.frame, end.line, Drawn(together, now, end.line))
    made = {name: now[name] for name in bound_names(*statements) & now.keys()}
    return Slice(code, {**now, **early, **given}, tuple(together), made)


def overwritten(step: Step, sink: tuple[Position, ...], wanted: str, batches: Batches) -> tuple[list[dict[str, Any]], Location | None]:
    """Where `wanted` was made of something that it was written over: what that may have been, for `held` of `cut`, and the line."""
    start, end = _common(step, sink)
    ahead, loop = _ahead(start, _statements(start, end)[0])
    gone = makers(ahead, {wanted})[1]
    if not gone:
        return [], None
    target = drawn_by(ahead, gone) or (loop.target if isinstance(loop, (ast.For, ast.AsyncFor)) else None)
    code, line = end.frame.f_code, max((one.lineno for one in ahead if wanted in bound_names(one)), default=0)
    return [*batches.bound_by(target, gone)] if target is not None else [], location(code.co_filename, line, code.co_name)


def _ahead(start: Position, body: list[ast.stmt]) -> tuple[list[ast.stmt], ast.stmt | None]:
    """All statements before the model call, back to the start of the innermost loop, also those before a `with` that holds it; the loop."""
    ahead: list[ast.stmt] = []
    for inner, place in dropwhile(lambda one: one[0] is not body, _lists(start)):
        if inner is not body and isinstance(inner[place], (ast.For, ast.AsyncFor, ast.While)):
            return ahead, inner[place]
        ahead = [*inner[:place], *ahead]
    return ahead, None


def _with_graphs(end: Position, statements: list[ast.stmt]) -> set[str]:
    """Variables from before the statements that hold a part of the graph: a backward() goes on into what made them."""
    now = {**end.frame.f_globals, **local_values(end.frame)}
    values = ((name, now.get(name)) for name in read_before_bound(statements))
    return {name for name, value in values if isinstance(value, torch.Tensor) and value.grad_fn is not None}


def _common(step: Step, sink: tuple[Position, ...]) -> tuple[Position, Position]:
    ends = {id(position.frame): position for position in sink}
    for start in step.chain:
        end = ends.get(id(start.frame))
        if end is not None:
            return start, end
    for start, end in ((start, end) for start in step.chain[-1:] for end in sink if _one_cell(start.frame, end.frame)):
        return start, end
    return refuse("the model call and backward() share no running function")


def _one_cell(one: FrameType, other: FrameType) -> bool:
    """Whether two frames run top-level statements of the same cell: IPython compiles each of those by itself."""
    return (
        one.f_globals is other.f_globals
        and one.f_code.co_filename == other.f_code.co_filename
        and not (one.f_code.co_flags | other.f_code.co_flags) & CO_OPTIMIZED
    )


def _where(position: Position) -> tuple[int, int, int, int]:
    code = position.frame.f_code
    return span_as_written(code, position.instruction, position.line) or (position.line, -1, position.line, -1)


def _lists(position: Position) -> list[tuple[list[ast.stmt], int]]:
    tree = tree_of(position.frame.f_code.co_filename)
    return refuse(_NO_SOURCE) if tree is None else lists_around(tree, _where(position))


def _statements(start: Position, end: Position) -> tuple[list[ast.stmt], int, int]:
    ends = {id(body): place for body, place in _lists(end)}
    for body, first in _lists(start):
        last = ends.get(id(body))
        if last is not None:
            return (body, first, last) if last >= first else refuse("backward() stands before the model call")
    return refuse("no statements hold both the model call and backward()")


def _dependencies(end: Position) -> list[ast.stmt]:
    """The statements that `backward()` needs, back to the start of the innermost list, without those nothing depends on."""
    lists = _lists(end)
    if not lists:
        refuse(_NO_SOURCE)
    body, last = lists[0]
    undrawn = [*takewhile(lambda statement: not draws(statement), reversed(body[:last]))][::-1]
    made, lost = makers(undrawn, read_before_bound([body[last]]))
    kept = [*made, body[last]]
    if not isinstance(body[last], SIMPLE):
        lost |= read_before_bound(kept) & bound_names(body[last])  # a simple one binds its own names after the backward()
    if lost:
        refuse(f"the earlier value of {', '.join(sorted(lost))} is gone")
    return kept


def values_in(part: Slice | None) -> list[object]:
    """What the names in the statements stand for: all that they can reach begins there."""
    if part is None:
        return []
    return [part.names[name] for name in names_in(*part.statements) & part.names.keys()]


def cut_graphs(part: Slice) -> dict[int, torch.Tensor]:
    """Variables whose graph was made before the statements, and is gone since the backward(): leaves in their place."""
    cut: dict[int, torch.Tensor] = {}
    for name in read_before_bound(list(part.statements)):
        value = part.names.get(name)
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            leaf = part.names[name] = value.detach().requires_grad_()
            cut[id(leaf)] = leaf
    return cut
