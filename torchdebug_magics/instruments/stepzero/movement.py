"""How far each parameter and buffer is from step zero, and why some are where they were."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchdebug_magics.instruments.stepzero.report import FROZEN, BufferRow, ParameterRow
from torchdebug_magics.instruments.stepzero.zero_state import Trained, ZeroState, address
from torchdebug_magics.probing.shards import local_of, shards_note

__all__ = ["movement"]

Rows = tuple[list[ParameterRow], list[ParameterRow], list[BufferRow], list[str]]


def movement(trained: Trained, zero: ZeroState) -> Rows:
    """(parameters that moved, the furthest first; those that did not; buffers that changed; what cannot be compared)."""
    parameters, buffers = trained.parameters(), trained.buffers()
    problems = [f"`{name}` is no longer in the model" for name in zero.tensors if name not in parameters and name not in buffers]
    problems += filter(None, [shards_note(parameters.values(), "distances are")])
    distances = {name: _distance(name, tensor, zero, problems) for name, tensor in {**parameters, **buffers}.items()}
    reasons = _Reasons(trained, zero, stepped=any(distances[name] for name in parameters))
    moved: list[ParameterRow] = []
    unmoved: list[ParameterRow] = []
    for name, parameter in parameters.items():
        if (distance := distances[name]) is None:
            continue
        norm = _norm(_wide(zero.tensors[name]))
        row = ParameterRow(
            parameter=name,
            distance=distance,
            relative=distance / norm if norm else None,
            learning_rates=reasons.in_learning_rates(parameter, distance),
            why=reasons.why_moved(name, parameter) if distance else reasons.why_not(parameter),
        )
        (moved if distance else unmoved).append(row)
    moved.sort(key=lambda row: -(row.relative if row.relative is not None and not math.isnan(row.relative) else math.inf))
    changed = [BufferRow(buffer=name, distance=distance) for name in buffers if (distance := distances[name])]
    return moved, unmoved, changed, problems


class _Reasons:
    """What the optimizers know of each parameter; `stepped`: whether any parameter moved."""

    def __init__(self, trained: Trained, zero: ZeroState, *, stepped: bool) -> None:
        self._zero = zero
        self._groups = {id(one): group for optimizer in trained.optimizers for group in optimizer.param_groups for one in group["params"]}
        self._states = {id(one): state for optimizer in trained.optimizers for one, state in optimizer.state.items() if state}
        self._knows = bool(trained.optimizers)
        self._stepped = stepped or bool(self._states)

    def in_learning_rates(self, parameter: torch.Tensor, distance: float) -> float | None:
        """The root mean square change of an element."""
        rate = float(self._groups.get(id(parameter), {}).get("lr", 0.0))
        count = local_of(parameter).numel()
        return distance / math.sqrt(count) / rate if rate and count else None

    def why_moved(self, name: str, parameter: torch.Tensor) -> str:
        """What is odd in that it did; nothing for what is trained."""
        if name not in self._zero.frozen:
            return ""
        if parameter.requires_grad:
            return "it requires a gradient now"
        return "the optimizer updates it" if id(parameter) in self._states else "something other than the optimizer writes to it"

    def why_not(self, parameter: torch.Tensor) -> str:
        """The first reason that holds."""
        if not parameter.requires_grad:
            return FROZEN
        group = self._groups.get(id(parameter), {})
        if self._knows and not group:
            return "not in the optimizer"
        if "lr" in group and float(group["lr"]) == 0:
            return "learning rate 0"
        return self._why_still(parameter) if self._stepped else "no step was taken"

    def _why_still(self, parameter: torch.Tensor) -> str:
        """Of one that is trained, after a step."""
        state = self._states.get(id(parameter))
        if parameter.grad is not None:
            if not bool(local_of(parameter.grad).detach().any()):
                return "zero gradient"
            return "first gradient after the last step" if self._states and state is None else "updates round to zero"
        if state is not None:
            return "updates round to zero" if any(map(_holds_something, state.values())) else "zero gradients"
        return "no gradient" if self._states else "no gradient, or a zero gradient"


def _holds_something(value: Any) -> bool:
    """Whether it is a moment of an optimizer that is not zero; a count of steps is none."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and bool(local_of(value).any())


def _distance(name: str, tensor: torch.Tensor, zero: ZeroState, problems: list[str]) -> float | None:
    """None where there is nothing to compare with."""
    kept, tensor = zero.tensors.get(name), local_of(tensor)
    if kept is None or kept.shape != tensor.shape:
        problems.append(f"`{name}` {'is new' if kept is None else 'has another shape than at step zero'}: not compared")
        return None
    if tensor.is_meta or kept.is_meta:
        return None
    return 0.0 if address(kept) == address(tensor) != 0 else _norm(_wide(tensor.detach().cpu()) - _wide(kept))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return (plain if plain.layout is torch.strided else plain.to_dense()).to(torch.complex128 if plain.is_complex() else torch.float64)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
