"""What looks at a step while it is run again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import FrameType

    import torch

__all__ = ["Observer"]


class Observer:
    """Looks at one rerun, and changes nothing. Each method may be left as it is."""

    def attach(self, stack: ExitStack) -> None:
        """Before the first statement: enter modes, register hooks; they are gone when the rerun ends."""

    def backward_begins(self, frame: FrameType, losses: tuple[torch.Tensor, ...], *, is_end: bool) -> None:
        """A backward (or grad) call, which runs below `frame`; `is_end`: the rerun is over with it."""

    def backward_ends(self, *, is_the_one: bool) -> None:
        """It has returned, or raised; `is_the_one`: it was the call that the rerun is to reach."""

    def stands_for(self, recorded: torch.Tensor, made: torch.Tensor) -> None:
        """A model is given the `recorded` argument, in place of the one `made` by the rerun, which is the same but for random numbers."""
