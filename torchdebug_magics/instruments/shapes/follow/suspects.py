"""What ran without an error and is probably unintended: sizes that broadcast by accident, dimensions that a view reads in another order.

Two questions are asked of the ops in the user's own lines. Do two tensors of as many numbers, the one with a dimension of one more, give
more numbers, and is the op a difference or a loss, or are all those numbers averaged into one? Then every sample met every other one:
whoever wants that writes the dimension there, and is left alone. And does a dimension keep its size in a view, but not its stride? Then the
view read other numbers into it: a permute was meant.
"""

from __future__ import annotations

import linecache
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchdebug_magics.instruments.shapes.follow.broadcasts import DIFFERENCES, PAIRED_LOSSES, REDUCES, Side, averaged, broadcast
from torchdebug_magics.instruments.shapes.follow.misread_views import misread
from torchdebug_magics.instruments.shapes.repair.source import site_in
from torchdebug_magics.probing.dry_runs.leaves import sizes
from torchdebug_magics.probing.where import locate, owner, part_of_line, span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from torchdebug_magics.instruments.shapes.follow.origins import Made
    from torchdebug_magics.instruments.shapes.report import Failure

    History: TypeAlias = Callable[[torch.Tensor], Made | None]

__all__ = ["Suspects"]

_VIEWS = frozenset(["view", "reshape"])
_HANDS_ON = ("nn/functional.py", "torch/overrides.py", "nn/modules/loss.py", "nn/modules/module.py")
"""Torch's own code between the user's line and a loss."""


class Suspects:
    """Looks at ops that ran without an error, until the first suspicious one."""

    def __init__(self) -> None:
        self.first: Failure | None = None

    def look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, module: str | None, made: History) -> None:
        """One op, from the function mode that followed it."""
        if self.first is not None or not (name in _VIEWS or name in PAIRED_LOSSES or name in DIFFERENCES or name in REDUCES):
            return
        if name in REDUCES:
            is_whole = isinstance(out, torch.Tensor) and not out.dim() and args and isinstance(args[0], torch.Tensor)
            self.first = averaged(made(args[0])) if is_whole else None
            return
        frame = _asking(sys._getframe(3), through_loss=name in PAIRED_LOSSES)
        if frame is None or not args or not isinstance(args[0], torch.Tensor):
            return
        if name in _VIEWS:
            self.first = misread(name, args[0], out, frame, module)
        else:
            pair = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)][: 2 if name in PAIRED_LOSSES else None]
            if len(pair) == 2 and all(type(size) is int for one in pair for size in one.shape):  # noqa: PLR2004 - a pair
                sides = [Side(sizes(one), made(one), one) for one in pair]
                self.first = broadcast(name, sides, site_in(frame), module, locate(frame))
        if self.first is not None:
            self.first = replace(self.first, underlined=_underlined(frame))


def _underlined(frame: FrameType) -> tuple[int, int] | None:
    found = span(frame.f_code, frame.f_lasti)
    return None if found is None else part_of_line(linecache.getline(frame.f_code.co_filename, frame.f_lineno), frame.f_lineno, found)


def _asking(frame: FrameType, *, through_loss: bool) -> FrameType | None:
    """The user's frame that called the op itself, or the module of the loss."""
    if owner(frame.f_code.co_filename) == "user":
        return frame
    outer: FrameType | None = frame
    while through_loss and outer is not None and owner(outer.f_code.co_filename) != "user":
        if owner(outer.f_code.co_filename) != "own" and not outer.f_code.co_filename.replace("\\", "/").endswith(_HANDS_ON):
            return None
        outer = outer.f_back
    return outer if through_loss else None
