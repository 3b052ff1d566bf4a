"""What is told of an op that differs, and where."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.knowledge import repair
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.ops.seen_op import Empty, Op
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.report import Cause, On
    from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference
    from torchdebug_magics.report import Location

__all__ = ["Told", "drawn_from", "location_of", "name_of", "of_empty", "of_kernel", "raised_at"]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is said of an op."""

    cause: Cause
    explanation: str
    fix: str = ""
    op: str = ""
    """Where another one is to blame."""
    location: Location | None = None
    other: Location | None = None
    on: On | None = None
    further: tuple[Origin, ...] = ()


def raised_at(error: BaseException) -> Location | None:
    """The innermost line of the user's on its way."""
    found = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    return location(found[-1][0].co_filename, found[-1][1], found[-1][0].co_name) if found else None


def drawn_from(op: Op) -> torch.Generator:
    """The generator that an op takes its numbers from."""
    return next((one for one in (*op.args, *op.kwargs.values()) if isinstance(one, torch.Generator)), torch.default_generator)


def name_of(generator: Any, names: dict[str, Any]) -> str:
    """In an op it is wrapped anew: it is known by what is behind it."""
    held: list[tuple[str, Any]] = [(name, value) for name, value in names.items() if isinstance(value, torch.Generator)]
    return next((name for name, value in held if value._cdata == generator._cdata), "")


def of_empty(op: Op, empty: Empty, difference: Difference) -> Told:
    """It reads memory that another op has made."""
    made = None if empty.line is None else empty.line.location
    maker = "torch.empty" if empty.plan.base == "empty" else f"{empty.plan.base}"
    zeros = {
        "empty": "use `torch.zeros` instead of `torch.empty`, or ",
        "empty_like": "use `torch.zeros_like` instead of `torch.empty_like`, or ",
    }
    return Told(
        cause="uninitialized_memory",
        explanation=f"`{op.plan.name}` reads uninitialized memory from `{maker}`{f' ({made})' if made else ''}",
        fix=f"{zeros.get(empty.plan.base, '')}write every element before reading",
        op=empty.plan.name,
        location=made,
        other=location_of(difference),
    )


def of_kernel(op: Op) -> Told:
    """Its inputs agree."""
    if op.plan.is_view or op.plan.moves or op.plan.is_pointwise:
        said = f"`{op.plan.name}` gave different numbers on equal inputs, which it cannot do by itself: something else wrote to its memory"
        return Told(cause="unknown", explanation=said)
    fix = repair(op.plan.base)
    known = "as PyTorch's documentation says it may" if fix else "and no workaround is known"
    return Told(cause="nondeterministic_op", explanation=f"`{op.plan.name}` gave different numbers on equal inputs, {known}", fix=fix)


def location_of(difference: Difference) -> Location | None:
    """The user's line that it was seen at."""
    return None if difference.line is None else difference.line.location
