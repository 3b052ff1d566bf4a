"""One dispatched op of a replayed step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torchdebug_magics.probing.modules import Call

__all__ = ["Line", "Op"]

Line = tuple[str, int, str]
"""File, line and function."""


@dataclass(eq=False)
class Op:
    """What was called, where, and what belongs to it."""

    index: int
    name: str
    func: Any
    call: Call | None
    line: Line | None
    """Of the user's frame; inside a backward that of a user's own backward code, else None."""
    place: tuple[CodeType, int] | None
    """The instruction of that line."""
    sequence: int | None
    """Of the autograd node this op made."""
    node_sequence: int | None
    """Of the autograd node that runs this op, in a backward."""
    node_name: str | None
    backward: bool
    is_dual: bool = False
    """Whether forward-mode AD was on: beside what the user wrote, ops of its derivative run."""
    late: bool = False
    """Whether it ran after the backward()."""
    parents: tuple[int, ...] = ()
    """Indices of the ops that made its inputs."""
    is_bad: bool = False
    """Whether an output is non-finite."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What it was called with, before it ran; only where its output is non-finite."""
    outputs: tuple[torch.Tensor, ...] = ()
    written: tuple[torch.Tensor, ...] = ()

    def inputs(self) -> list[torch.Tensor]:
        """Its tensor arguments, as they were before it ran."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]
