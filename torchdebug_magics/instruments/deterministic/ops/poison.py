"""Memory that nobody has written, filled with something else than torch fills it with: who reads it gets other numbers."""

from __future__ import annotations

import torch

__all__ = ["fill_otherwise"]


def fill_otherwise(tensor: torch.Tensor) -> None:
    """Torch fills with NaN, the largest integer and True, where it fills at all."""
    version = 0 if tensor.is_inference() else tensor._version
    with torch.no_grad():
        tensor.detach().fill_(False if tensor.dtype is torch.bool else 113)
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
