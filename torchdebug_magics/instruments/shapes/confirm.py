"""Whether what failed on fakes fails for real too, and in which words."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException

from torchdebug_magics.instruments.shapes.leaves import named_tensors, rebuilt
from torchdebug_magics.probing.rng import RandomState

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.ops import Failed

__all__ = ["is_limit_of_fakes", "real_error"]

_LARGEST = 1 << 26
"""Elements that are made for real to hear torch's own words."""

_LIMITS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_LIMIT_NAMES = frozenset({"GuardOnDataDependentSymNode", "FakeTensorDeviceMismatchError", "PendingUnbackedSymbolNotFound", "UserError"})
_LIMIT_WORDS = ("not supported for tensor subclasses", "FakeTensor", "fake tensor", "FakeScriptObject", "meta tensor", "Meta")


def is_limit_of_fakes(error: BaseException) -> bool:
    """Whether the error speaks of tensors without data rather than of the model."""
    chain: BaseException | None = error
    while chain is not None:
        names = {kind.__name__ for kind in type(chain).__mro__}
        if isinstance(chain, _LIMITS) or names & _LIMIT_NAMES or any(word in str(chain) for word in _LIMIT_WORDS):
            return True
        chain = chain.__cause__
    return isinstance(error, NotImplementedError)


def real_error(failed: Failed) -> tuple[bool, Exception | None]:
    """(whether it was tried, the error) of the failed op on real zeros of the same shapes; no error where it works for real."""
    size = sum(math.prod(tensor.shape) for _, tensor in named_tensors((failed.args, failed.kwargs)))
    if size > _LARGEST:
        return False, None
    before = RandomState.take()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            failed.func(*rebuilt(failed.args, _real), **rebuilt(failed.kwargs, _real))
    except Exception as error:  # noqa: BLE001 - whatever torch says
        return True, error
    finally:
        before.put_back()
    return True, None


def _real(tensor: torch.Tensor) -> Any:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device).zero_()
