"""``%stepzero``: keep, compare, restore or drop."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.stepzero import zero_state
from torchdebug_magics.instruments.stepzero.report import FROZEN, BufferRow, DataRow, ParameterRow, StepzeroReport
from torchdebug_magics.instruments.stepzero.zero_state import Trained, ZeroState, address, digest_of, steps_of
from torchdebug_magics.probing.steps import ParameterFacts, facts_of
from torchdebug_magics.probing.storages import is_shard, local_of, shards_note

Rows = tuple[list[ParameterRow], list[ParameterRow], list[BufferRow], list[str]]


class _Kept(NamedTuple):
    """Step zero in this kernel; of what is trained, only weak references."""

    zero: ZeroState
    references: Mapping[str, Callable[[], Any]]
    """To what was named, by name."""


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
        _kept[:] = [_Kept(zero, {name: _reference(value) for name, value in trained.values.items()})]
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
    trained = Trained(dict(zip([*names, *(f"value {place}" for place in range(len(names), len(values)))], values, strict=False)))
    if not trained.models:
        msg = "name a model: `%stepzero model optimizer`"
        raise TorchDebugError(msg)
    return trained


def _reference(value: Any) -> Callable[[], Any]:
    """Gives the value, with all its parts, as long as they are there; else None, as for what takes no reference."""
    if type(value) in {list, tuple, dict}:
        named = value if isinstance(value, dict) else dict(enumerate(value))
        parts, is_dict, kind = {name: _reference(part) for name, part in named.items()}, isinstance(value, dict), type(value)

        def whole() -> Any:
            alive = {name: part() for name, part in parts.items()}
            return None if any(part is None for part in alive.values()) else alive if is_dict else kind(alive.values())

        return whole
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


def _latest() -> tuple[ZeroState, Trained]:
    if not _kept:
        msg = "no step zero was kept: run `%stepzero model optimizer` before the first step"
        raise TorchDebugError(msg)
    zero, references = _kept[0]
    present = {name: value for name, reference in references.items() if (value := reference()) is not None}
    if references.keys() - present.keys() - zero.digests.keys():  # data may be gone, or take no reference
        _dropped()
        msg = "the model or the optimizer whose step zero was kept is gone: run `%stepzero model optimizer` for the new one"
        raise TorchDebugError(msg)
    return zero, Trained(present)


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
    steps, now = steps_of(trained.optimizers), {name: digest_of(value) for name, value in trained.data.items()}
    return StepzeroReport(
        action="compared",
        steps=None if steps is None else steps - (zero.steps or 0),
        moved=tuple(moved),
        unmoved=tuple(unmoved),
        buffers=tuple(buffers),
        data=tuple(
            DataRow(data=name, digest=now.get(name, ""), changed=now[name] != digest if name in now else None)
            for name, digest in zero.digests.items()
        ),
        file=file,
        problems=tuple(problems),
        **_sizes(trained, zero),
    )


def _restored(trained: Trained, zero: ZeroState, file: str = "") -> StepzeroReport:
    problems = zero.put_back(trained)
    return StepzeroReport(action="restored", file=file, problems=tuple(problems), **_sizes(trained, zero))


def movement(trained: Trained, zero: ZeroState) -> Rows:
    """(parameters that moved, the furthest first; those that did not; buffers that changed; what cannot be compared)."""
    parameters, buffers = trained.parameters(), trained.buffers()
    problems = [f"`{name}` is no longer in the model" for name in zero.tensors if name not in parameters and name not in buffers]
    problems += filter(None, [shards_note(parameters.values(), "distances are")])
    distances = {name: _distance(name, tensor, zero, problems) for name, tensor in trained.tensors().items()}
    facts = facts_of(parameters, trained.optimizers)
    is_known = any(fact.state for fact in facts.values())
    has_stepped = is_known or any(distances[name] for name in parameters)
    moved: list[ParameterRow] = []
    unmoved: list[ParameterRow] = []
    for name, parameter in parameters.items():
        if (distance := distances[name]) is None:
            continue
        norm, rate, count = _norm(_wide(zero.tensors[name])), facts[name].rate, local_of(parameter).numel()
        if distance:
            why = "the optimizer updates it" if facts[name].state else "something other than the optimizer writes to it"
            why = "" if name not in zero.frozen else "it requires a gradient now" if parameter.requires_grad else why
        else:
            why = _why_not(facts[name], has_optimizers=bool(trained.optimizers), has_stepped=has_stepped, is_known=is_known)
        row = ParameterRow(
            parameter=name,
            distance=distance,
            relative=distance / norm if norm else None,
            learning_rates=distance / math.sqrt(count) / rate if rate and count else None,
            why=why,
        )
        (moved if distance else unmoved).append(row)
    moved.sort(key=lambda row: -(row.relative if row.relative is not None and not math.isnan(row.relative) else math.inf))
    changed = [BufferRow(buffer=name, distance=distance) for name in buffers if (distance := distances[name])]
    return moved, unmoved, changed, problems


def _why_not(facts: ParameterFacts, *, has_optimizers: bool, has_stepped: bool, is_known: bool) -> str:
    """The first reason that holds; `is_known`: whether any optimizer keeps a state of what it has updated."""
    kept = [] if facts.state is None else [value for value in facts.state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    has_moments = any(bool(local_of(value).any()) for value in kept)  # a count of steps is no moment
    reasons = (
        (not facts.parameter.requires_grad, FROZEN),
        (has_optimizers and facts.group is None, "not in the optimizer"),
        (facts.rate == 0, "learning rate 0"),
        (not has_stepped, "no step was taken"),
        (facts.gradient is False, "zero gradient"),
        (facts.gradient and is_known and facts.state is None, "first gradient after the last step"),
        (facts.gradient or has_moments, "updates round to zero"),
        (facts.state is not None, "zero gradients"),
        (is_known, "no gradient"),
    )
    return next((reason for holds, reason in reasons if holds), "no gradient, or a zero gradient")


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
