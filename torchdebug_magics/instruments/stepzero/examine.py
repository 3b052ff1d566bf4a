"""``%stepzero``: keep, compare, restore or drop."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.stepzero import zero_state
from torchdebug_magics.instruments.stepzero.report import FROZEN, BufferRow, DataRow, ParameterRow, StepzeroReport
from torchdebug_magics.instruments.stepzero.zero_state import Trained, ZeroState, address, digest_of, steps_of
from torchdebug_magics.probing.storages import is_shard, local_of, shards_note

Rows = tuple[list[ParameterRow], list[ParameterRow], list[BufferRow], list[str]]


class _Kept(NamedTuple):
    """Step zero in this kernel; of what is trained, only weak references."""

    zero: ZeroState
    trained: Callable[[], Trained | None]


_kept: list[_Kept] = []
"""The latest, at most."""


def examine(context: CellContext, *values: Any, file: str = "", restore: bool = False, drop: bool = False) -> StepzeroReport:
    """Keep the state of the models and optimizers among `values`, the others being data; without values, compare with what was kept.

    With `file`, compare with the file where it exists, else write it. Raises `TorchDebugError` where there is nothing to compare with.
    """
    if drop:
        _dropped()
        return StepzeroReport(action="dropped")
    trained = _trained(values, context.names) if values else None
    if file:
        return _with_file(trained or _latest()[1], Path(file).expanduser(), restore=restore)
    if trained is not None and not restore:
        zero = ZeroState.of(trained)
        _kept[:] = [_Kept(zero, _weakly(trained))]
        return _kept_report(trained, zero)
    zero, known = _latest()
    return _restored(trained or known, zero) if restore else _compared(trained or known, zero)


def _with_file(trained: Trained, path: Path, *, restore: bool) -> StepzeroReport:
    if any(map(is_shard, trained.parameters().values())):
        msg = "--file writes what one process holds, and the model is sharded: leave it out, or save with `torch.distributed.checkpoint`"
        raise TorchDebugError(msg)
    if path.exists():
        zero = zero_state.read(path)
        return _restored(trained, zero, str(path)) if restore else _compared(trained, zero, str(path))
    if restore:
        msg = f"there is no file {path}: `%stepzero model optimizer --file {path}` writes it"
        raise TorchDebugError(msg)
    zero = ZeroState.of(trained)
    zero_state.write(zero, path)
    return _kept_report(trained, zero, str(path))


def _trained(values: Sequence[Any], names: Sequence[str]) -> Trained:
    named = list(zip([*names, *(f"value {place}" for place in range(len(names), len(values)))], values, strict=False))
    models = {name: value for name, value in named if isinstance(value, nn.Module)}
    optimizers = tuple(value for value in values if isinstance(value, torch.optim.Optimizer))
    if not models:
        msg = "name a model: `%stepzero model optimizer`"
        raise TorchDebugError(msg)
    data = {name: value for name, value in named if not isinstance(value, (nn.Module, torch.optim.Optimizer))}
    return Trained(models, optimizers, data)


def _weakly(trained: Trained) -> Callable[[], Trained | None]:
    """What is trained, unless a model or an optimizer of it is gone; data that is gone, or that takes no reference, is left out."""
    models = {name: weakref.ref(model) for name, model in trained.models.items()}
    optimizers = [weakref.ref(optimizer) for optimizer in trained.optimizers]
    data = {name: reference for name, value in trained.data.items() if (reference := _reference(value)) is not None}

    def now() -> Trained | None:
        alive = {name: model() for name, model in models.items()}
        stepping = [optimizer() for optimizer in optimizers]
        present = {name: found for name, reference in data.items() if (found := reference()) is not None}
        known = {name: model for name, model in alive.items() if model is not None}
        left = tuple(optimizer for optimizer in stepping if optimizer is not None)
        return Trained(known, left, present) if len(known) == len(models) and len(left) == len(optimizers) else None

    return now


def _reference(value: Any) -> Callable[[], Any] | None:
    if type(value) in {list, tuple, dict}:
        parts = [_reference(part) for part in (value.values() if isinstance(value, dict) else value)]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        keys = list(value) if isinstance(value, dict) else None
        return lambda: _all_of([part() for part in known], keys)
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _all_of(parts: list[Any], keys: list[Any] | None) -> list[Any] | dict[Any, Any] | None:
    if any(part is None for part in parts):
        return None
    return parts if keys is None else dict(zip(keys, parts, strict=True))


def _latest() -> tuple[ZeroState, Trained]:
    if not _kept:
        msg = "no step zero was kept: run `%stepzero model optimizer` before the first step"
        raise TorchDebugError(msg)
    zero, trained = _kept[0].zero, _kept[0].trained()
    if trained is None:
        _dropped()
        msg = "the model or the optimizer whose step zero was kept is gone: run `%stepzero model optimizer` for the new one"
        raise TorchDebugError(msg)
    return zero, trained


def _dropped() -> None:
    if not _kept:
        msg = "no step zero was kept: there is nothing to drop"
        raise TorchDebugError(msg)
    _kept.clear()


def _sizes(trained: Trained, zero: ZeroState) -> dict[str, Any]:
    parameters, shared = trained.parameters(), zero.shared_with(trained)
    elements = sum(parameter.numel() for parameter in parameters.values())
    return {
        "parameters_count": len(parameters),
        "elements_count": elements,
        "local_elements_count": sum(local_of(parameter).numel() for parameter in parameters.values()),
        "held_bytes": zero.bytes - shared,
        "shared_bytes": shared,
    }


def _kept_report(trained: Trained, zero: ZeroState, file: str = "") -> StepzeroReport:
    data = tuple(DataRow(data=name, digest=digest, changed=None) for name, digest in zero.digests.items())
    held = {"held_bytes": 0, "shared_bytes": 0} if file else {}
    return StepzeroReport(action="kept", data=data, file=file, steps=zero.steps, **{**_sizes(trained, zero), **held})


def _compared(trained: Trained, zero: ZeroState, file: str = "") -> StepzeroReport:
    moved, unmoved, buffers, problems = movement(trained, zero)
    steps = steps_of(trained.optimizers)
    return StepzeroReport(
        action="compared",
        steps=None if steps is None else steps - (zero.steps or 0),
        moved=tuple(moved),
        unmoved=tuple(unmoved),
        buffers=tuple(buffers),
        data=tuple(_data_row(name, digest, trained) for name, digest in zero.digests.items()),
        file=file,
        problems=tuple(problems),
        **_sizes(trained, zero),
    )


def _data_row(name: str, digest: str, trained: Trained) -> DataRow:
    if name not in trained.data:
        return DataRow(data=name, digest="", changed=None)
    now = digest_of(trained.data[name])
    return DataRow(data=name, digest=now, changed=now != digest)


def _restored(trained: Trained, zero: ZeroState, file: str = "") -> StepzeroReport:
    problems = zero.put_back(trained)
    return StepzeroReport(action="restored", file=file, problems=tuple(problems), **_sizes(trained, zero))


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
