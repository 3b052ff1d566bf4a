"""Sees every call of torch's functions in a step, with the user's line, and may make another call in its place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from torchdebug_magics.instruments.overfit.training.loss_calls import LOSSES
from torchdebug_magics.probing.where import frames_above, locate, owner

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.training.change import OnCall
    from torchdebug_magics.instruments.overfit.training.observed_step import ObservedStep
    from torchdebug_magics.report import Location

__all__ = ["FunctionCalls", "called_name", "line_of_step"]


class FunctionCalls(TorchFunctionMode):
    """Sees every call of torch's functions in a step, and may answer one in its place."""

    def __init__(self, seen: ObservedStep | None, on_call: OnCall | None) -> None:
        super().__init__()
        self._seen = seen
        self._on_call = on_call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        instead = None if self._on_call is None else self._on_call(func, args, kwargs)
        if instead is not None:
            func, args, kwargs = instead
        try:
            result = func(*args, **kwargs)
        except Exception:
            if self._seen is not None and func in LOSSES:
                self._seen.called(func, args, kwargs, None)
            raise
        if self._seen is not None:
            self._seen.called(func, args, kwargs, result)
        return result


def line_of_step() -> Location | None:
    """The innermost line of the user's code inside the step; None where a module of PyTorch's own is called by us."""
    is_inside = False
    for frame in frames_above(sys._getframe(1)):
        whose = owner(frame.f_code.co_filename)
        if whose == "user":
            return locate(frame)
        if whose == "own" and is_inside:
            return None
        is_inside = is_inside or whose != "own"
    return None


def called_name(function: Any) -> str:
    """``relu``; of an attribute of a tensor, its name."""
    name = str(getattr(function, "__name__", ""))
    return (
        str(getattr(getattr(function, "__self__", None), "__name__", name))
        if name == "__get__"
        else name.rstrip("_")
        if not name.startswith("__")
        else name
    )
