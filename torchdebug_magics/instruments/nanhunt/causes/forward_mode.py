"""Derivatives that forward-mode AD (``jvp``, ``jacfwd``) computes beside what the user wrote, by ops that stand in nobody's code."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.nanhunt.fixes.source_edits import called, expression_at, is_named

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op, Trace

__all__ = ["primal_of"]


def primal_of(op: Op, trace: Trace) -> Op | None:
    """The op that the user called, of whose derivative this one is a part; None where it is no such part, or that is not known.

    Both run in one and the same call of the user's, and only the first has the name of the function that is called there.
    """
    expression = expression_at(op.place, {}) if op.is_dual and not op.backward else None
    name = "" if expression is None else called(expression.node)
    if not name or is_named(name, op.name):
        return None
    together = list(itertools.takewhile(lambda one: one.place == op.place, reversed(trace.ops[: op.index])))
    return next((one for one in reversed(together) if is_named(name, one.name)), None)
