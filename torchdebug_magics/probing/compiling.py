"""Keeps torch's compiler away from what is ours."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._guards import TracingContext

_CALLED = "__compiled_fn_"
"""How the compiler names what such code calls."""
_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, key) for key in ("PROXY", "FAKE", "FUNCTIONAL"))

C = TypeVar("C", bound="Callable[..., Any]")


def not_compiled(*, nor_what_it_calls: bool) -> Callable[[C], C]:
    """A compiled function that runs a part of itself as plain Python has each function called from there compiled, ours too."""
    inside = _FrameAction.SKIP if nor_what_it_calls else _FrameAction.DEFAULT

    def mark(call: C) -> C:
        set_code_exec_strategy(call.__code__, _FrameExecStrategy(_FrameAction.SKIP, inside))
        return call

    return mark


def is_rewritten(code: CodeType) -> bool:
    """Whether torch's compiler put it in the place of a function of the user's: its lines are all the first one."""
    return any(name.startswith(_CALLED) for name in code.co_names)


def is_being_compiled() -> bool:
    """Whether torch's compiler works here now: what runs then is no step of the user's, but a trial by the compiler."""
    return TracingContext.try_get() is not None


def is_being_traced() -> bool:
    """Whether ops are written down, or only tried out, here and now: what we compute would stand in the user's trace."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING))
    )
