"""Inside ``torch.func``: which transforms run, the numbers behind the tensors that they wrap, and a way out of them for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch._C import _functorch as functorch

if TYPE_CHECKING:
    import torch

__all__ = ["base_of", "is_outermost_gradient", "outside_transforms"]


def is_outermost_gradient() -> bool:
    """Whether the one ``grad`` that runs is the innermost transform, in nothing but ``vmap``: what it returns is a gradient to be used."""
    if functorch.peek_interpreter_stack() is None:
        return False
    kinds = [one.key() for one in functorch.get_interpreter_stack() or ()]
    around = {functorch.TransformType.Vmap}
    return bool(kinds) and kinds[-1] == functorch.TransformType.Grad and around.issuperset(kinds[:-1])


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that all transforms have wrapped; any other one itself."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def outside_transforms() -> AbstractContextManager[None]:
    """As if none ran; afterwards they go on."""
    return _NOWHERE if functorch.peek_interpreter_stack() is None else _outside()


_NOWHERE = nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    left = []
    try:
        while functorch.peek_interpreter_stack() is not None:
            left.append(functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while left:
            functorch.push_dynamic_layer_stack(left.pop())
