"""Whether backward passes go through the graphs of earlier steps: autograd numbers its nodes in the order in which they are created."""

from __future__ import annotations

import ast
import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
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
_MOST_HOPS, _MOST_HELD = 60_000, 64
_MOST_PASSES = 16
_BREAKS = frozenset({"detach", "detach_", "data", "item"})
"""Attributes of a tensor that leave its graph behind."""


class BackwardPasses:
    """Those that looks have met."""

    def __init__(self) -> None:
        self.began_s = 0.0
        """When the one that runs was met first; 0 while none runs."""
        self.carrier: tuple[str, str] | None = None
        """(variable that keeps the graphs of earlier steps, how to detach it), once a pass goes through them."""
        self.carried_at: Location | None = None
        """The line that called backward then."""
        self._numbers: dict[object, deque[int]] = {}
        """By the line that calls backward: the number of the last node of each pass."""
        self._looked_s = 0.0

    def look(self, backward: FrameType | None, now_s: float) -> None:
        """Note the pass that runs: `backward` is the frame that waits for the engine."""
        held = {} if backward is None else names_of(backward)
        outputs = () if _goes_further(held.get("args", ())) else held.get("t_outputs", ())
        with torch._C.DisableTorchFunctionSubclass():  # nothing of the user's is called
            roots = [root for one in outputs if (root := getattr(one, "grad_fn", None)) is not None]
        user = next((one for one in frames_above(backward) if is_user_code(one.f_code)), None)
        if not roots or user is None:
            self.began_s = 0.0
            return
        root = max(roots, key=_number)
        numbers = self._numbers.setdefault((id(user.f_code), user.f_lasti), deque(maxlen=_MOST_PASSES))
        if not numbers or numbers[-1] != _number(root) or not self.began_s:
            self.began_s = now_s
            numbers.append(_number(root))
        is_time = now_s - self.began_s >= _LONG_S and now_s - self._looked_s >= _EVERY_S
        if self.carrier is None and is_time:
            self._looked_s = now_s
            if goes_through_earlier(root, sorted(numbers)[:-1]):
                self.carrier, self.carried_at = _carrier(user), locate(user)


def _goes_further(arguments: Sequence[Any]) -> bool:
    """Whether it is for gradients of gradients, or of some inputs alone: then earlier steps may be gone through on purpose."""
    _, _, create_graph, inputs = (*arguments, *[None] * 4)[:4]
    return bool(create_graph) or bool(inputs)


def goes_through_earlier(root: Any, earlier: Sequence[int]) -> bool:
    """Whether a graph holds nodes of at least two earlier steps; `earlier` are the numbers with which those ended, ascending.

    Goes on to the oldest node that is known, and holds few at a time: handles of Python's on many nodes end in a crash when the graph is
    freed.
    """
    steps: set[int] = set()
    met = {_number(root)}
    known = [(_number(root), root)]
    for _ in range(_MOST_HOPS):
        if not known or len(steps) >= _LEAST_STEPS:
            break
        number, node = heapq.heappop(known)
        steps |= {step} if 0 < (step := bisect_left(earlier, number)) < len(earlier) else set()
        for inner, _ in node.next_functions:
            if inner is not None and number > (its := _number(inner)) not in met:  # what accumulates a gradient has the highest number
                met.add(its)
                heapq.heappush(known, (its, inner))
        if len(known) > 2 * _MOST_HELD:
            known = heapq.nsmallest(_MOST_HELD, known)
    return len(steps) >= _LEAST_STEPS


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _carrier(frame: FrameType) -> tuple[str, str]:
    """The variable that the loop around a frame makes from itself, or the attribute of a module that holds a graph; its repair."""
    names = names_of(frame)
    held = [*((name, names.get(name)) for name in _carried(frame)), *_held_by_modules(names)]
    for name, value in held:
        if _has_graph(value):
            return name, f"`{name} = {name}.detach()`"
        if isinstance(value, (tuple, list)) and any(map(_has_graph, value)):
            return name, f"`{name} = {type(value).__name__}(one.detach() for one in {name})`"
    return "", "`h = h.detach()` for what one step hands to the next"


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
