"""Weights for a model on ``meta``: made, and initialized as the model does it itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import listed

__all__ = ["materialise"]


def materialise(model: nn.Module, device: str) -> tuple[str, ...]:
    """Replace each tensor on ``meta`` by one on `device`, ties kept; what nothing has initialized is noted by name."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tables: tuple[Any, ...] = module._parameters, module._buffers
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[name] = made.setdefault(id(tensor), _marked(tensor, device))
    _initialize(model)
    left = [name for name, tensor in _named(model) if any(tensor is one for one in made.values()) and _is_marked(tensor)]
    return (f"nothing initializes {listed([f'`{name}`' for name in left])}: set the values yourself",) if left else ()


def _initialize(model: nn.Module) -> None:
    initialize = getattr(model, "init_weights", None)
    if callable(initialize) and hasattr(model, "_init_weights"):  # a model of transformers, which does its buffers, too
        initialize()
        return
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(reset := getattr(module, name, None)):
                reset()


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _marked(tensor: torch.Tensor, device: str) -> Any:
    """Full of a value that no initialization leaves."""
    value = _mark(tensor)
    full = torch.empty_like(tensor, device=device).fill_(value) if value is not None else torch.zeros_like(tensor, device=device)
    return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _mark(tensor: torch.Tensor) -> float | int | None:
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return None if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _is_marked(tensor: torch.Tensor) -> bool:
    value = _mark(tensor)
    if value is None or not tensor.numel():
        return False
    first = tensor.detach().flatten()[:1]
    return bool(first.isnan()) if value != value else bool(first == value)  # noqa: PLR0124 - NaN alone differs from itself
