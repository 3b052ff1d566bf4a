"""``%stepzero``: keep, compare, restore or drop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.stepzero import zero_file
from torchdebug_magics.instruments.stepzero.data_digest import digest_of
from torchdebug_magics.instruments.stepzero.movement import movement
from torchdebug_magics.instruments.stepzero.report import DataRow, StepzeroReport
from torchdebug_magics.instruments.stepzero.zero_state import Trained, ZeroState, steps_of
from torchdebug_magics.probing.shards import is_shard, local_of

__all__ = ["examine"]


class _Kept(NamedTuple):
    """Step zero in this kernel; of what is trained, only weak references."""

    zero: ZeroState
    trained: Callable[[], Trained | None]


_kept: list[_Kept] = []
"""The latest, at most."""


def examine(*values: Any, names: Sequence[str] = (), file: str = "", restore: bool = False, drop: bool = False) -> StepzeroReport:
    """Keep the state of the models and optimizers among `values`, the others being data; without values, compare with what was kept.

    With `file`, compare with the file where it exists, else write it. Raises `TorchDebugError` where there is nothing to compare with.
    """
    if drop:
        _dropped()
        return StepzeroReport(action="dropped")
    trained = _trained(values, names) if values else None
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
        zero = zero_file.read(path)
        return _restored(trained, zero, str(path)) if restore else _compared(trained, zero, str(path))
    if restore:
        msg = f"there is no file {path}: `%stepzero model optimizer --file {path}` writes it"
        raise TorchDebugError(msg)
    zero = ZeroState.of(trained)
    zero_file.write(zero, path)
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
