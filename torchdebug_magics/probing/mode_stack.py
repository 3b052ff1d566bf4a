"""The stack of dispatch modes: one of ours leaves it from wherever it stands, as sessions may end in another order than they began."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

__all__ = ["enter", "modes", "put_unnoticed", "take_off"]

modes: Callable[[], list[TorchDispatchMode]] = _get_current_dispatch_mode_stack
"""Those that stand, the lowest first."""


def enter(stack: ExitStack, mode: TorchDispatchMode) -> None:
    """``stack.enter_context(mode)``, which would take off whichever mode stands on top in the end."""
    stack.callback(take_off, mode)
    mode.__enter__()


def put_unnoticed(stack: ExitStack, mode: TorchDispatchMode, height: int) -> None:
    """`enter`, with so many below it; torch's compiler is not told that a mode stands there."""
    stack.callback(take_off, mode)
    back = _taken_off(modes()[height:])
    _push_mode(mode)
    _put(back)


def take_off(mode: TorchDispatchMode) -> bool:
    """Off the stack, from where it stands last; whether it stood there."""
    standing = modes()
    place = next((place for place in reversed(range(len(standing))) if standing[place] is mode), None)
    if place is None:
        return False
    back = _taken_off(standing[place:])
    _put(back[:-1])
    return True


def _taken_off(above: list[TorchDispatchMode]) -> list[Callable[[], object]]:
    """Take these off, the uppermost first; what puts each back."""
    return [_off(mode) for mode in reversed(above)]


def _put(back: list[Callable[[], object]]) -> None:
    for put in reversed(back):
        put()


def _off(mode: TorchDispatchMode) -> Callable[[], object]:
    # What torch notes of the modes below, each keeps while it stands. A user's own `__exit__` may do more, which is not for us to call.
    if getattr(mode, "old_dispatch_mode_flags", None):
        TorchDispatchMode.__exit__(mode, None, None, None)
        return functools.partial(TorchDispatchMode.__enter__, mode)
    _pop_mode()
    return functools.partial(_push_mode, mode)
