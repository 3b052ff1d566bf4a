"""How fast a counted loop of the user's goes, how far it has come, and how long it will take."""

from __future__ import annotations

import ast
from collections import deque
from types import FrameType
from typing import Any

from torchdebug_magics.probing.source.call_sites import enclosing, function_node, line_of, names_of, value_of
from torchdebug_magics.probing.source.code_owner import frames_above, is_user_code

__all__ = ["LoopRate", "loop_progress"]

_MOST_COUNTS = 40
_BUILT_IN = frozenset({list, tuple, dict, set, str, range})


class LoopRate:
    """From the values of the loop's variable at the latest looks."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque(maxlen=_MOST_COUNTS)
        self._bound: int | None = None

    def look(self, frame: FrameType | None, now_s: float) -> None:
        """Note how far the loop around a frame has come."""
        found = loop_progress(frame)
        if found is None:
            return
        count, self._bound = found
        if self._counts and count < self._counts[-1][1]:
            self._counts.clear()
        self._counts.append((now_s, count))

    def pace(self) -> tuple[float, float | None] | None:
        """(iterations per second, seconds to the end of the loop); None where it was not seen to move."""
        if not self._counts:
            return None
        (first_s, first), (last_s, last) = self._counts[0], self._counts[-1]
        if last <= first or last_s <= first_s:
            return None
        pace = (last - first) / (last_s - first_s)
        return pace, (self._bound - last) / pace if self._bound is not None else None


def loop_progress(frame: FrameType | None) -> tuple[int, int | None] | None:
    """(iterations begun, bound) of the innermost counted loop of the user's around the frame; None where there is none."""
    for one in frames_above(frame):
        if not is_user_code(one.f_code):
            continue
        function = function_node(one.f_code)
        around = [] if function is None else [loop for loop in enclosing(function, line_of(one)) if isinstance(loop, ast.For)]
        for loop in reversed(around):
            if (found := _counted(loop, one)) is not None:
                return found
    return None


def _counted(loop: ast.For, frame: FrameType) -> tuple[int, int | None] | None:
    names = names_of(frame)
    iterated = _unwrapped(loop.iter)
    target: ast.expr = loop.target
    is_enumerated = isinstance(iterated, ast.Call) and getattr(iterated.func, "id", "") == "enumerate"
    if is_enumerated and isinstance(target, ast.Tuple):
        target = target.elts[0]
    count = names.get(target.id) if isinstance(target, ast.Name) else None
    if type(count) is not int or not isinstance(iterated, ast.Call) or getattr(iterated.func, "id", "") not in {"range", "enumerate"}:
        return None
    if is_enumerated:
        return count, _length(value_of(iterated.args[0], frame, names)) if iterated.args else None
    ends = [value_of(argument, frame, names) for argument in iterated.args]
    if not all(type(end) is int for end in ends):
        ends = [_length_call(argument, frame, names) for argument in iterated.args]
    if not ends or not all(type(end) is int for end in ends):
        return count, None
    whole = range(*ends)
    return (whole.index(count), len(whole)) if count in whole else (count, None)


def _unwrapped(node: ast.expr) -> ast.expr:
    """What is inside ``tqdm(...)``."""
    while (
        isinstance(node, ast.Call) and node.args and getattr(node.func, "id", getattr(node.func, "attr", "")) in {"tqdm", "track", "trange"}
    ):
        node = node.args[0]
    return node


def _length_call(node: ast.expr, frame: FrameType, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len" and node.args:
        return _length(value_of(node.args[0], frame, names))
    return value_of(node, frame, names)


def _length(value: Any) -> int | None:
    """Of what is built in; of a DataLoader over such: a Dataset of the user's has code of its own for it."""
    if type(value) in _BUILT_IN:
        return len(value)
    data = getattr(value, "dataset", None) if type(value).__module__.startswith("torch.utils.data") else None
    return len(value) if data is not None and (type(data) in _BUILT_IN or type(data).__name__ == "TensorDataset") else None
