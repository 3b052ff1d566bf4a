"""Whether what failed on fakes fails on real tensors too, and in which words."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException

from torchdebug_magics.instruments.shapes.follow.seen import Failed
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, rebuilt
from torchdebug_magics.probing.rng import RandomState

_LARGEST = 1 << 26
"""Elements that are allocated to get PyTorch's own message."""

_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm"})

_LIMITS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_LIMIT_NAMES = frozenset({"GuardOnDataDependentSymNode", "FakeTensorDeviceMismatchError", "PendingUnbackedSymbolNotFound", "UserError"})
_LIMIT_WORDS = ("not supported for tensor subclasses", "FakeTensor", "fake tensor", "FakeScriptObject", "meta tensor", "Meta")


def is_limit_of_fakes(error: BaseException) -> bool:
    """Whether the error speaks of tensors without data rather than of the model."""
    chain: BaseException | None = error
    while chain is not None:
        names = {kind.__name__ for kind in type(chain).__mro__}
        # Python names the types of what it cannot add: that they are fakes is not the reason.
        spoken = not (isinstance(chain, TypeError) and "unsupported operand" in str(chain))
        if isinstance(chain, _LIMITS) or names & _LIMIT_NAMES or (spoken and any(word in str(chain) for word in _LIMIT_WORDS)):
            return True
        chain = chain.__cause__
    return isinstance(error, NotImplementedError)


def real_error(failed: Failed) -> tuple[bool, Exception | None]:
    """(whether it was tried, the error) of the failed op on real zeros of the same shapes; no error where it works on real tensors."""
    size = sum(math.prod(tensor.shape) for _, tensor in named_tensors((failed.args, failed.kwargs)))
    if size > _LARGEST and not _is_refused(failed):
        return False, None
    real = _zeros if size <= _LARGEST else _without_memory
    try:
        # With gradients, products of more than two dimensions are taken apart otherwise, and refuse in other words.
        with RandomState.kept(), warnings.catch_warnings(), torch.set_grad_enabled(torch.is_grad_enabled() and _is_refused(failed)):
            warnings.simplefilter("ignore")
            failed.func(*rebuilt(failed.args, real), **rebuilt(failed.kwargs, real))
    except Exception as error:  # noqa: BLE001 - whatever torch says
        return True, error
    return True, None


def _is_refused(failed: Failed) -> bool:
    """A matrix product whose inner sizes differ: torch looks at the shapes before it computes anything."""
    if failed.op not in _PRODUCTS or len(failed.operands) < 2:  # noqa: PLR2004 - a product has two factors
        return False
    first, second = (tuple(tensor.shape) for _, tensor in failed.operands[:2])
    inner = -1 if failed.op == "linear" else -2
    return min(len(first), len(second)) > 1 and first[-1] != second[inner]


def _zeros(tensor: torch.Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, layout=tensor.layout, device=_place(tensor))
    made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=_place(tensor)).zero_()
    return made.requires_grad_() if tensor.requires_grad else made


def _without_memory(tensor: torch.Tensor) -> Any:
    """One zero, said to be as large."""
    return torch.zeros((), dtype=tensor.dtype, device=_place(tensor)).expand(tuple(tensor.shape))


def _place(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device
