"""The statements of a step, from the model call to `backward()`, as code that can run once more without side effects of its own."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torchdebug_magics.instruments.nanhunt.attempt import CannotReplay
from torchdebug_magics.instruments.nanhunt.editing import runnable
from torchdebug_magics.instruments.nanhunt.livein import lists_around, local_values, parse, read_before_written, written
from torchdebug_magics.instruments.nanhunt.standins import Drawn
from torchdebug_magics.instruments.nanhunt.statements import draws, makers, starts, writes_into, written_into
from torchdebug_magics.probing.where import adopt_timed, owner, span

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.step import Position, Step

__all__ = ["Slice", "cut"]


@dataclass(frozen=True)
class Slice:
    """Code to execute, and the names it runs with."""

    code: CodeType
    names: dict[str, Any]
    statements: tuple[ast.stmt, ...]


def cut(step: Step, sink: tuple[Position, ...], wanted: str = "") -> Slice:
    """The slice of the deepest frame that stands both in the step's first model call and in its `backward()`.

    Without a model call: the statements before `backward()` that the loss depends on. `wanted` names a variable whose making, before
    the model call, is to be run again, too.
    """
    adopt_timed(position.frame for position in sink)
    if step.entries:
        start, end = _common(step, sink)
        body, first, last = _statements(start, end)
        statements = body[first : last + 1]
        statements = [*makers(body[:first], wanted), *starts(body[:first], written_into(statements)), *statements]
        early = dict(step.live_in.of(start.frame)) if step.live_in is not None else {}
    else:
        end = next((position for position in sink if _replayable(position.frame)), None) or _no_source()
        statements = _dependencies(end)
        early = {}
    return _compiled(end, statements, early)


def _replayable(frame: FrameType) -> bool:
    return owner(frame.f_code.co_filename) in {"user", "library"} and parse(frame.f_code.co_filename) is not None


def _no_source() -> NoReturn:
    msg = "the source of the step is not at hand"
    raise CannotReplay(msg)


def _common(step: Step, sink: tuple[Position, ...]) -> tuple[Position, Position]:
    ends = {id(position.frame): position for position in sink}
    for start in step.chain:
        end = ends.get(id(start.frame))
        if end is not None:
            return start, end
    for start, end in ((start, end) for start in step.chain[-1:] for end in sink if _one_cell(start.frame, end.frame)):
        return start, end
    msg = "the model call and backward() share no running function"
    raise CannotReplay(msg)


def _one_cell(one: FrameType, other: FrameType) -> bool:
    """Whether two frames run top-level statements of the same cell: IPython compiles each of those by itself."""
    return (
        one.f_globals is other.f_globals
        and one.f_code.co_filename == other.f_code.co_filename
        and not (one.f_code.co_flags | other.f_code.co_flags) & CO_OPTIMIZED
    )


def _where(position: Position) -> tuple[int, int, int, int]:
    return span(position.frame.f_code, position.instruction) or (position.line, -1, position.line, -1)


def _lists(position: Position) -> list[tuple[list[ast.stmt], int]]:
    tree = parse(position.frame.f_code.co_filename)
    return _no_source() if tree is None else lists_around(tree, _where(position))


def _statements(start: Position, end: Position) -> tuple[list[ast.stmt], int, int]:
    ends = {id(body): place for body, place in _lists(end)}
    for body, first in _lists(start):
        last = ends.get(id(body))
        if last is not None:
            if last < first:
                msg = "backward() stands before the model call"
                raise CannotReplay(msg)
            return body, first, last
    msg = "no statements hold both the model call and backward()"
    raise CannotReplay(msg)


def _dependencies(end: Position) -> list[ast.stmt]:
    """The statements that `backward()` needs, back to the start of the innermost list, without those nothing depends on."""
    lists = _lists(end)
    if not lists:
        _no_source()
    body, last = lists[0]
    kept = [body[last]]
    needed = read_before_written(kept)
    for statement in reversed(body[:last]):
        if written([statement]) & needed or writes_into(statement, needed):
            if draws(statement):
                break
            kept.insert(0, statement)
            needed = read_before_written(kept)
    lost = needed & written(kept)
    if lost:
        msg = f"the earlier value of {', '.join(sorted(lost))} is gone"
        raise CannotReplay(msg)
    return kept


def _compiled(end: Position, statements: list[ast.stmt], early: dict[str, Any]) -> Slice:
    now = {**end.frame.f_globals, **local_values(end.frame)}
    code, given = runnable(statements, end.frame, end.line, Drawn(statements, now, end.line))
    return Slice(code, {**now, **early, **given}, tuple(statements))
