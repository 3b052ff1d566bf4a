"""The calls inside a failing expression, made again without data: ``torch.stack([model(x), x])`` needs the shape of ``model(x)``.

Modules and functions of torch's alone are called; they compute nothing, and leave nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.faking import Fakes
from torchdebug_magics.instruments.shapes.forward import forward
from torchdebug_magics.instruments.shapes.inputs import Inputs
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.rng import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Replay"]


class _Call(torch.nn.Module):
    """A function as the forward of a module, so that it is followed, and all is put back, as in any forward."""

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__()
        self._func = func

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*args, **kwargs)


class Replay:
    """One fake world for the parts of one expression."""

    def __init__(self) -> None:
        self._fakes = Fakes()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What it gives, without data. Raises LookupError where it is not torch's, or cannot be told."""
        if not _is_torchs(func):
            msg = f"{func} is not called again"
            raise LookupError(msg)
        model = unwrapped(func) if isinstance(func, torch.nn.Module) else _Call(func)
        before = RandomState.take()
        try:
            run = forward(model, Inputs(args, kwargs), self._fakes, trial=True, saves=False)
        except Exception as error:
            msg = f"{func} cannot be followed"
            raise LookupError(msg) from error
        finally:
            before.put_back()
        if run.error is not None:
            msg = f"{func} raises, too"
            raise LookupError(msg) from run.error
        return run.output

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor: of one without data where they are known."""
        return self._fakes.value(tensor) if isinstance(tensor, torch._subclasses.FakeTensor) else tensor.detach()


def _is_torchs(func: Any) -> bool:
    if isinstance(func, torch.nn.Module):
        return True
    if isinstance(func, type) or not callable(func):
        return False
    if getattr(torch.Tensor, getattr(func, "__name__", ""), None) is func:
        return True
    module = getattr(func, "__module__", None) or ""
    return module == "torch" or module.startswith("torch.") or getattr(torch, getattr(func, "__name__", ""), None) is func
