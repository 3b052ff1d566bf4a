"""A dispatch mode that shows every op to a listener and changes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OpListener", "Run"]

Run = Callable[[], Any]


class OpListener(TorchDispatchMode):
    """Calls ``listener(func, args, kwargs, run)`` for each op; the listener calls `run` once and returns what it gave.

    Fake tensors and tensor subclasses are passed through untouched.
    """

    _torchdebug_owner = None

    def __init__(self, listener: Callable[[Any, tuple[Any, ...], dict[str, Any], Run], Any]) -> None:
        super().__init__()
        self._listener = listener

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by the compiler."""
        # False: what is compiled runs eagerly under this mode, op by op, which is what a replay is for.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        keywords = kwargs or {}

        def run() -> Any:
            return func(*args, **keywords)

        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)):
            return run()
        return self._listener(func, args, keywords, run)
