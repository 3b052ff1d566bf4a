"""Images with their channels first, taken apart by code that reads them as channels last: ``b, h, w, c = x.shape``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, OpEdit, method
from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, came_from, channels_first, steps
from torchdebug_magics.instruments.shapes.repair.source import site_at

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.follow.origins import Made
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Operand

__all__ = ["channels_last", "taken_apart"]

_IMAGES = 4
_LAST = (0, 2, 3, 1)
"""The order that puts the channels last."""


def taken_apart(x: Operand, wanted: int) -> tuple[str, tuple[Edit, ...]] | None:
    """Where the width of a picture became the features, and its channels are as many as were wanted: in words, and turned in time."""
    for step in steps(x.made):
        sizes, before = step.inputs[0] if step.inputs else ((), None)
        if step.op not in RESHAPES or len(sizes) != _IMAGES or before is None:
            continue
        if sizes[1] != wanted or sizes[-1] == wanted or step.shape[-1] != sizes[-1] or step.shape[:-1] == sizes[:-1]:
            return None
        if before.number and not channels_first(before):
            return None
        source = came_from(before)
        words = f": `{step.op}` split {shape(sizes)}{f' {source}' if source else ''} as if it were channels-last"
        return words, channels_last(before)
    return None


def channels_last(made: Made | None) -> tuple[Edit, ...]:
    """A picture with its channels last, from where it was made."""
    if made is None or len(made.shape) != _IMAGES:
        return ()
    turn = method("permute", *_LAST)
    why = "the channels last"
    if made.number == 0:
        return (Edit(f"{made.op} = {turn.text(made.op)}", why, 1, inputs={made.op: turn}),) if made.op.isidentifier() else ()
    if made.line is None:
        return ()
    site = site_at(*made.line)
    if not isinstance(site.expression, ast.Call):
        return ()

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return turn.apply(func(*args, **kwargs))

    return (Edit(turn.text(site.text), why, 1, ops=(OpEdit(site, made.op, run),)),)
