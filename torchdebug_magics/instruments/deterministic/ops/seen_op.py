"""An op that has run, as a recorder hands it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.deterministic.ops.op_plan import Plan
    from torchdebug_magics.probing.lines import Line

__all__ = ["Empty", "Op"]


class Empty(NamedTuple):
    """An op that made memory which nobody has written."""

    plan: Plan
    line: Line | None


class Op(NamedTuple):
    """One op that has just run."""

    place: int
    """How many ops ran before it."""
    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: Line | None
    result: Any
    written: list[torch.Tensor]
    empty: Empty | None
    """What made memory that nobody has written as a whole, and that it was given; None where there is none such."""
