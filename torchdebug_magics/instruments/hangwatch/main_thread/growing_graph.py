"""Whether backward passes go through the graphs of earlier steps: autograd numbers its nodes in the order in which they are created."""

from __future__ import annotations

import ast
import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.source.call_sites import enclosing, function_node, line_of, names_of
from torchdebug_magics.probing.source.code_owner import frames_above, is_user_code
from torchdebug_magics.probing.where import locate

if TYPE_CHECKING:
    from types import FrameType

    from torchdebug_magics.report import Location

__all__ = ["BackwardPasses", "goes_through_earlier"]

_LONG_S, _EVERY_S = 0.5, 2.0
"""A pass that takes so long is looked at, and again after so long."""
_LEAST_STEPS = 2
_LEAST_PASSES = 3
_GROWS, _GROWS_S, _SAME = 1.5, 0.75, 0.1
"""Over the median of the passes before, and over the shortest, as looks measure each to half a second; while steps are as large."""
_MOST_NODES, _MOST_HELD = 5_000, 64
_MOST_PASSES = 16
_BREAKS = frozenset({"detach", "detach_", "data", "item"})
"""Attributes of a tensor that leave its graph behind."""


@dataclass
class _Pass:
    number: int
    """Of the node in which the graph ends."""
    began_s: float
    """When a look met it first."""
    took_s: float = 0.0


class BackwardPasses:
    """Those that looks have met."""

    def __init__(self) -> None:
        self.began_s = 0.0
        """When the one that runs was met first; 0 while none runs."""
        self.carrier: tuple[str, str] | None = None
        """(variable that keeps the graphs of earlier steps, how to detach it), once a pass goes through them."""
        self.carried_at: Location | None = None
        """The line that called backward then."""
        self._met: dict[object, deque[_Pass]] = {}
        """By the line that calls backward."""
        self._looked_s = 0.0

    def look(self, backward: FrameType | None, now_s: float) -> None:
        """Note the pass that runs: `backward` is the frame that waits for the engine."""
        held = {} if backward is None else names_of(backward)
        _, keeps_graph, create_graph, inputs = (*held.get("args", ()), *[None] * 4)[:4]
        with torch._C.DisableTorchFunctionSubclass():  # nothing of the user's is called
            roots = [root for one in held.get("t_outputs", ()) if (root := getattr(one, "grad_fn", None)) is not None]
        user = next((one for one in frames_above(backward) if is_user_code(one.f_code)), None)
        if not roots or user is None or create_graph or inputs:  # gradients of gradients, or of some inputs: earlier steps on purpose
            self.began_s = 0.0
            return
        root = max(roots, key=_number)
        met = self._met.setdefault((id(user.f_code), user.f_lasti), deque(maxlen=_MOST_PASSES))
        if not met or met[-1].number != _number(root) or not self.began_s:
            met.append(_Pass(_number(root), now_s))
        self.began_s, met[-1].took_s = met[-1].began_s, now_s - met[-1].began_s
        is_time = met[-1].took_s >= _LONG_S and now_s - self._looked_s >= _EVERY_S
        if self.carrier is None and keeps_graph and is_time:
            self._looked_s, where, carrier = now_s, locate(user), _carrier(user)  # before the pass may end
            found = goes_through_earlier(root, [one.number for one in met][:-1])
            if found or (found is None and carrier[0] and _take_longer(met)):
                self.carrier, self.carried_at = carrier, where


def goes_through_earlier(root: Any, earlier: Sequence[int]) -> bool | None:
    """Whether a graph holds nodes of at least two earlier steps; `earlier` are the numbers with which those ended, ascending.

    None where the graph is too large for an answer: PyTorch keeps a handle for each node that Python has seen, and the kernel crashes when
    a graph with many of them is freed. Always goes on to the oldest node that is known.
    """
    steps: set[int] = set()
    met = {_number(root)}
    known = [(_number(root), root)]
    while known and len(met) < _MOST_NODES and len(steps) < _LEAST_STEPS:
        number, node = heapq.heappop(known)
        steps |= {step} if 0 < (step := bisect_left(earlier, number)) < len(earlier) else set()
        for inner, _ in node.next_functions:
            if inner is not None and number > (its := _number(inner)) not in met:  # what accumulates a gradient has the highest number
                met.add(its)
                heapq.heappush(known, (its, inner))
        if len(known) > 2 * _MOST_HELD:
            known = heapq.nsmallest(_MOST_HELD, known)
    return True if len(steps) >= _LEAST_STEPS else None if known else False


def _take_longer(passes: Sequence[_Pass]) -> bool:
    """Whether a pass takes longer than those before, though each step has created as many nodes."""
    *before, latest = [one.took_s for one in passes] or [0.0]
    sizes = [after.number - one.number for one, after in pairwise(passes)]
    if len(before) < _LEAST_PASSES - 1 or any(size % min(sizes) > _SAME * min(sizes) for size in sizes):
        return False
    return latest >= max(_GROWS * median(before), min(before) + _GROWS_S, *before)


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _carrier(frame: FrameType) -> tuple[str, str]:
    """The variable that the loop around a frame makes from itself, or the attribute of a module that holds a graph; its repair."""
    names = names_of(frame)
    held = [*((name, names.get(name)) for name in _carried(frame)), *_held_by_modules(names)]
    for name, value in held:
        if _has_graph(value):
            return name, f"write `{name} = {name}.detach()`"
        if isinstance(value, (tuple, list)) and any(map(_has_graph, value)):
            return name, f"write `{name} = {type(value).__name__}(one.detach() for one in {name})`"
    return "", "detach what one step passes to the next, as in `h = h.detach()`,"


def _carried(frame: FrameType) -> Iterator[str]:
    """Names to which the loop gives a value made from the same name, and no other: ``h = cell(x, h)``, ``total += loss``."""
    function = function_node(frame.f_code)
    loops = [one for one in enclosing(function, line_of(frame)) if isinstance(one, (ast.For, ast.While))] if function else []
    carried: dict[str, bool] = {}
    for statement in ast.walk(loops[0]) if loops else ():
        if isinstance(statement, (ast.Assign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            used = {one.id for one in ast.walk(statement.value) if isinstance(one, ast.Name)}
            is_cut = any(isinstance(one, ast.Attribute) and one.attr in _BREAKS for one in ast.walk(statement.value))
            for name in {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}:
                goes_on = isinstance(statement, ast.AugAssign) or (name in used and not is_cut)
                carried[name] = carried.get(name, True) and goes_on
    return (name for name in sorted(carried) if carried[name])


def _held_by_modules(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if isinstance(value, torch.nn.Module):
            for path, module in list(torch.nn.Module.named_modules(value)):
                for attribute, held in list(vars(module).items()):
                    if not attribute.startswith("_"):
                        yield ".".join(filter(None, (name, path, attribute))), held


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
