"""The model whose call failed, and what it was called with, from the frames of an error."""

from __future__ import annotations

import ast
import dis
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.cell_error.side_effects import UNKNOWN, value_named
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.probing.where import is_user_code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType, TracebackType

    from torchdebug_magics.instruments.shapes.repair.source import Site

__all__ = ["Called", "outermost_call"]


@dataclass(frozen=True, eq=False)
class Called:
    """An outermost module call that did not return."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: Site | None = None
    """The user's own call of it."""


def outermost_call(error: BaseException) -> Called | None:
    """The first one among the frames; None where no module was running."""
    outer: TracebackType | None = None
    user: TracebackType | None = None
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        user = step if is_user_code(frame.f_code) else user
        if frame.f_code.co_name == "_call_impl" and isinstance(model := frame.f_locals.get("self"), torch.nn.Module):
            site = site_at(user.tb_frame.f_code, user.tb_lineno, user.tb_lasti, dict(user.tb_frame.f_locals)) if user is not None else None
            return Called(model, tuple(frame.f_locals.get("args", ())), dict(frame.f_locals.get("kwargs", {})), site)
        if (found := _yielding(frame, outer)) is not None:
            return found
        outer, step = step, step.tb_next
    return None


def _yielding(frame: FrameType, outer: TracebackType | None) -> Called | None:
    """A forward that is a generator: its call has returned when it runs, and stands in the line above, or was made before."""
    model = frame.f_locals.get("self")
    if not frame.f_code.co_flags & inspect.CO_GENERATOR or not isinstance(model, torch.nn.Module):
        return None
    if getattr(type(model).forward, "__code__", None) is not frame.f_code:
        return None
    return _written(model, outer) or _as_taken(model, frame)


def _written(model: torch.nn.Module, outer: TracebackType | None) -> Called | None:
    if outer is None:
        return None
    frame = outer.tb_frame
    statement = site_at(frame.f_code, outer.tb_lineno, outer.tb_lasti).statement
    names = {**frame.f_globals, **frame.f_locals}
    for node in ast.walk(statement) if statement is not None else ():
        if isinstance(node, ast.Call) and value_named(node.func, names) is model:
            args = tuple(value_named(one, names) for one in node.args)
            kwargs = {one.arg: value_named(one.value, names) for one in node.keywords if one.arg is not None}
            if all(one is not UNKNOWN for one in (*args, *kwargs.values())) and len(kwargs) == len(node.keywords):
                return Called(model, args, kwargs)
    return None


def _as_taken(model: torch.nn.Module, frame: FrameType) -> Called | None:
    """With its arguments as they stand in the frame, where none was given anew since then."""
    taken = inspect.getargvalues(frame)
    names = taken.args[1:]
    if taken.varargs or taken.keywords or any(name in set(_given_anew(frame.f_code)) for name in names):
        return None
    return Called(model, (), {name: taken.locals[name] for name in names if name in taken.locals})


def _given_anew(code: CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname.startswith(("STORE_FAST", "DELETE_FAST", "STORE_DEREF")):
            yield from one.argval if isinstance(one.argval, tuple) else (one.argval,)
