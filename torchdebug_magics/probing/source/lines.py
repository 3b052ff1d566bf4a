"""Lines of the user's code, met millions of times: each is one object, and becomes a `Location` in a report."""

from __future__ import annotations

import sys
from functools import cached_property
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import torch

from torchdebug_magics.probing.dispatch import is_rewritten
from torchdebug_magics.probing.graphs import MOST_NODES, NodeMakers
from torchdebug_magics.probing.source.user_code import adopt_timed, is_user_code, location
from torchdebug_magics.report import Location


class Line:
    """A line; who counts things by the line adds to it."""

    def __init__(self, file: str, line: int, function: str) -> None:
        self.file = file
        self.line = line
        self.function = function

    @cached_property
    def location(self) -> Location:
        """The place of the line as the user sees it."""
        return location(self.file, self.line, self.function)


LineT = TypeVar("LineT", bound=Line)


class Lines(Generic[LineT]):
    """Where an op was asked for: its line, and in a backward pass the line and the module of the forward that it belongs to."""

    def __init__(self, kind: type[LineT]) -> None:
        self._kind = kind
        self._known: dict[tuple[str, int, str], LineT] = {}
        self._is_user: dict[int, tuple[CodeType, bool]] = {}
        """Whether code is the user's, by its id; it is held for that: what a compiler has written may hold constants without a hash."""
        self.nodes: NodeMakers[tuple[LineT | None, str]] = NodeMakers()
        """The line and the module that made each."""
        self._task, self._asked = -1, 0
        """The backward pass that asked last, and for how many nodes."""

    @property
    def files(self) -> list[str]:
        """The files of the user's code that was met, the latest first."""
        return list(dict.fromkeys(code.co_filename for code, is_user in reversed(self._is_user.values()) if is_user))

    def here(self, frame: FrameType | None) -> LineT | None:
        """The innermost line of the user's own code."""
        frame = self.user_frame(frame)
        if frame is None:
            return None
        key = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        line = self._known.get(key)
        if line is None:
            adopt_timed([frame])
            line = self._known[key] = self._kind(key[0], frame.f_lineno or frame.f_code.co_firstlineno, key[2])
        return line

    def user_frame(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of the user's own code; of a compiled function, whoever calls it."""
        is_user = self._is_user
        while frame is not None:
            code = frame.f_code
            known = is_user.get(id(code))
            if known is None:
                known = is_user[id(code)] = (code, is_user_code(code) and not is_rewritten(code))
            if known[1]:
                return frame
            frame = frame.f_back
        return None

    def of_node(self) -> tuple[LineT | None, str] | None:
        """Of the autograd node that runs now in this thread: what made it; None where that is not known, as in a very large graph.

        One whose backward the user has written is at the line of that.
        """
        task = torch._C._current_graph_task_id()
        self._task, self._asked = task, self._asked + 1 if task == self._task else 1
        node = torch._C._current_autograd_node() if self._asked <= MOST_NODES else None
        made = None if node is None else self.nodes.of(node._sequence_nr())
        return (self.here(sys._getframe()), made[1]) if made is not None and _is_written_by_user(node) else made


def _is_written_by_user(node: Any) -> bool:
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    code = getattr(backward, "__code__", None)
    return code is not None and is_user_code(code)
