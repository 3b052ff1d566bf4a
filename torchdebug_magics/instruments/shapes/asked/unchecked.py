"""Ops that refuse some values: on tensors whose values are not known, nobody can tell whether they would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.dry_runs.leaves import named_tensors

if TYPE_CHECKING:
    from torchdebug_magics.probing.dry_runs.faking import Fakes

__all__ = ["is_unchecked"]

_BY_VALUE = frozenset(
    [
        *("one_hot", "multi_margin_loss", "multilabel_margin_loss", "binary_cross_entropy", "ctc_loss", "multinomial", "bernoulli"),
        *("cholesky", "linalg_cholesky", "linalg_inv", "inverse", "linalg_solve"),
    ]
)
"""Refuse values of any dtype, or look at them in ways that are not followed beside the fakes."""
_BY_INDEX = frozenset(
    [
        *("embedding", "embedding_bag", "gather", "take", "take_along_dim", "index_select", "__getitem__", "__setitem__", "select"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_add", "index_add_", "index_copy", "index_copy_"),
        *("cross_entropy", "nll_loss", "nll_loss_nd"),
    ]
)
_INDICES = frozenset([torch.int64, torch.int32])


def is_unchecked(name: str, values: Any, fakes: Fakes) -> bool:
    """Whether a real op of this name might refuse what the fake one took."""
    if name in _BY_VALUE:
        return True
    if name not in _BY_INDEX:
        return False
    return any(tensor.dtype in _INDICES and tensor.numel() and fakes.value(tensor) is None for _, tensor in named_tensors(values))
