"""One dispatched op of a replayed step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from torchdebug_magics.instruments.nanhunt.knowledge import HIDDEN_WRITES, argument_of, op_name

if TYPE_CHECKING:
    from torchdebug_magics.probing.modules import Call

__all__ = ["Line", "Op", "written_by"]

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
    sequence: int | None
    """Of the autograd node this op made."""
    node_sequence: int | None
    """Of the autograd node that runs this op, in a backward."""
    node_name: str | None
    backward: bool
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


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an op writes in place, also those its schema does not admit."""
    found: list[torch.Tensor] = []
    hidden_names = HIDDEN_WRITES.get(op_name(func), ()) if argument_of(func, args, kwargs, "training") is not False else ()
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        hidden = argument.name in hidden_names
        if hidden or (argument.alias_info is not None and argument.alias_info.is_write):
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
