"""The stack of function modes: one of ours leaves it from wherever it stands, as the user's code may have put others above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode

__all__ = ["is_free", "take_off"]


def is_free() -> bool:
    """Whether no mode of others stands: when it ends, it would take off the uppermost one, whichever that is."""
    return not _get_current_function_mode_stack()


def take_off(mode: TorchFunctionMode) -> bool:
    """Off the stack, where it stands on it; whether it did."""
    if not any(one is mode for one in _get_current_function_mode_stack()):
        return False
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _push_mode(one)
    return True
