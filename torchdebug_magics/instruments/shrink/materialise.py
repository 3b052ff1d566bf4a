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
    places: list[tuple[nn.Module, dict[str, Any], str, torch.Tensor]] = [
        (module, table, name, tensor)
        for module in model.modules()
        for table in _tables(module)
        for name, tensor in table.items()
        if tensor is not None and tensor.is_meta
    ]
    if not places:
        return ("no parameter or buffer is on `meta`: nothing was initialized",)
    made: dict[int, torch.Tensor] = {}
    is_whole = all(one.is_meta for one in model.parameters())
    try:
        for _, table, name, tensor in places:
            table[name] = made.setdefault(id(tensor), _marked(tensor, device))
        _initialize(model, None if is_whole else list(dict.fromkeys(module for module, _, _, _ in places)))
    except BaseException:
        for _, table, name, tensor in places:
            table[name] = tensor
        raise
    left = [name for name, tensor in _named(model) if any(tensor is one for one in made.values()) and _is_marked(tensor)]
    return (f"nothing initializes {listed([f'`{name}`' for name in left])}: set the values yourself",) if left else ()


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _initialize(model: nn.Module, parts: list[nn.Module] | None) -> None:
    """All of it, or only these modules, as the others have their weights."""
    initialize, of_part = getattr(model, "init_weights", None), getattr(model, "_init_weights", None)
    if callable(initialize) and callable(of_part):  # a model of transformers, which does its buffers, too
        for module in parts or ():
            of_part(module)
        if parts is None:
            initialize()
        return
    for module in model.modules() if parts is None else parts:
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
