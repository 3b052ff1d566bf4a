"""Whether the graph that a backward pass goes through reaches back into earlier steps, and by which variable."""

from __future__ import annotations

import sys
import threading
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.source.call_sites import names_of
from torchdebug_magics.probing.source.frames import frames_above, is_user_code

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["carried_graph"]

_MOST_NODES = 60_000
_LEAST = 2
"""A state that is carried over once, and then detached, reaches back to one."""
_BACKWARD = "_engine_run_backward"
_NOT_COUNTED = "AccumulateGrad"


def carried_graph(marks: Sequence[int]) -> tuple[str, int] | None:
    """(variable, passes) whose graph goes back furthest, of the main thread's pass; `marks` are the newest nodes of the passes so far.

    None unless a pass runs and goes back through at least two earlier ones.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    backward = next((one for one in frames_above(frame) if one.f_code.co_name == _BACKWARD), None)
    if backward is None:
        return None
    outputs = list(names_of(backward).get("t_outputs", ()))
    reached = max((_passes(tensor, marks) for tensor in outputs), default=0)
    if reached < _LEAST:
        return None
    carriers: list[str] = []
    for frame in frames_above(backward):
        if is_user_code(frame.f_code):
            held = names_of(frame)
            names = frame.f_code.co_names if frame.f_code.co_name == "<module>" else tuple(held)
            tensors = {name: held[name] for name in names if isinstance(held.get(name), torch.Tensor)}
            whole = [name for name, value in tensors.items() if _passes(value, marks) >= reached - 1]
            # What was differentiated reaches back because of what it was made from: that is to be detached.
            carriers += sorted(whole, key=lambda name: any(tensors[name] is tensor for tensor in outputs))
    return (carriers[0], reached) if carriers else None


def _passes(tensor: torch.Tensor, marks: Sequence[int]) -> int:
    """How many earlier backward passes had newer nodes than the oldest that this tensor was made from."""
    if tensor.grad_fn is None:
        return 0
    oldest = _oldest(tensor.grad_fn)
    return sum(mark > oldest for mark in list(marks)[:-1])


def _oldest(root: Any) -> int:
    """The number of the oldest node that can be reached from it, looked for from the oldest known on."""
    oldest: int = root._sequence_nr()
    seen, waiting = {root}, [(oldest, 0, root)]
    while waiting and len(seen) < _MOST_NODES:
        _, _, node = heappop(waiting)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                if parent.name().rpartition("::")[2] != _NOT_COUNTED:
                    number = parent._sequence_nr()
                    oldest = min(oldest, number)
                    heappush(waiting, (number, len(seen), parent))
    return oldest
