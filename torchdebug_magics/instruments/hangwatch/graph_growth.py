"""Whether backward passes go through the graphs of earlier steps, told without a walk: Python handles of many nodes end in a crash."""

from __future__ import annotations

import ast
import sys
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.probing.source.call_sites import enclosing, function_node, line_of, names_of, node_at
from torchdebug_magics.probing.source.code_owner import frames_above, is_user_code

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

__all__ = ["BackwardPass", "carried_graph"]

_LEAST = 3
_GROWS = 1.3
"""From one pass to the next but one."""


class BackwardPass:
    """One that looks have met."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.took_s = 0.0


def carried_graph(passes: Sequence[BackwardPass]) -> tuple[str, int] | None:
    """(variable, passes so far) where each pass takes longer than the one before, and keeps its graph for the next.

    Without ``retain_graph=True``, a pass through an earlier graph is an error. None where no pass runs, or the passes do not grow.
    """
    latest = [one.took_s for one in list(passes)[-_LEAST:]]
    grows = all(before < after for before, after in pairwise(latest))
    if len(latest) < _LEAST or not grows or latest[-1] < _GROWS * latest[0]:
        return None
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    user = next((one for one in frames_above(frame) if is_user_code(one.f_code)), None)
    node = node_at(user) if user is not None else None
    if user is None or not isinstance(node, ast.Call) or not _keeps_graph(node):
        return None
    name = _carrier(user)
    return (name, len(passes)) if name else None


def _keeps_graph(call: ast.Call) -> bool:
    return any(word.arg == "retain_graph" and getattr(word.value, "value", True) is not False for word in call.keywords)


def _carrier(frame: FrameType) -> str:
    """A tensor with a graph that the loop makes from itself: ``h = cell(x, h)``, ``total = total + loss``, ``total += loss``."""
    function = function_node(frame.f_code)
    loops = [one for one in enclosing(function, line_of(frame)) if isinstance(one, (ast.For, ast.While))] if function else []
    names = names_of(frame)
    for statement in ast.walk(loops[0]) if loops else ():
        if isinstance(statement, (ast.Assign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            stored = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            used = {one.id for one in ast.walk(statement.value) if isinstance(one, ast.Name)}
            used |= stored if isinstance(statement, ast.AugAssign) else set()
            for name in sorted(stored & used):
                value = names.get(name)
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    return name
    return ""
