"""Suspects that concern which parameters are updated, and by which gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.overfit.change import Change, Undo
from torchdebug_magics.instruments.overfit.observed_step import Cut, called_name
from torchdebug_magics.instruments.overfit.suspects.evidence import Evidence
from torchdebug_magics.probing.where import locate, user_frame

__all__ = ["suspects"]

_GRADIENT_LOST = 1e-2
"""Of the gradient norm: what clipping to 1 leaves of a usual one is more."""


def suspects(seen: Evidence) -> Iterator[Change]:
    """Connection, optimizer, frozen parameters, gradients of earlier steps."""
    yield from _cut_graph(seen)
    yield from _stale(seen)
    yield from _frozen(seen)
    if seen.base.accumulates:
        yield Change(
            suspect="zero_grad_missing",
            text="gradients set to zero before each step",
            headline="Gradients add up from step to step: zero_grad() is missing",
            fix=f"call `{seen.optimizer}.zero_grad()` before `loss.backward()`",
            on_first_backward=_zero,
        )


def _zero(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    for one in parameters.values():
        one.grad = None


def _cut_graph(seen: Evidence) -> Iterator[Change]:
    lost = {id(one): name for name, one in seen.base.named_parameters().items() if name in seen.base.without_gradient}
    relevant = [cut for cut in seen.base.first.cuts if cut.sources & lost.keys() and cut.name not in {"argmax"}] or [
        cut for cut in seen.base.first.cuts if cut.sources & lost.keys()
    ]
    if not lost or not relevant:
        return
    cut = max(relevant, key=lambda one: len(one.sources & lost.keys()))
    names = tuple(lost[one] for one in lost if one in cut.sources)
    what = "torch.no_grad()" if cut.no_grad else f"`{_written(cut)}`"
    where = f" at {cut.location}" if cut.location is not None else ""
    can_be_undone = cut.no_grad or cut.name in {"detach", "data"}
    yield Change(
        suspect="cut_graph",
        text=f"connected at {cut.location}" if cut.location is not None else "connected",
        headline=f"{what}{where} cuts the graph: no gradient reaches {_shown(names)}",
        fix=_repair(cut),
        parameters=names,
        location=cut.location,
        on_call=_connected(cut) if can_be_undone else None,
        is_certain=not can_be_undone,
    )


def _written(cut: Cut) -> str:
    return {"data": ".data", "__get__": "an attribute"}.get(cut.name, f".{cut.name}()")


def _repair(cut: Cut) -> str:
    source = f": `{cut.location.source}`" if cut.location is not None and cut.location.source else ""
    if cut.no_grad:
        return f"run this line outside `torch.no_grad()`{source}"
    if cut.name in {"detach", "data"}:
        return f"remove `{_written(cut)}` from {cut.location}{source}"
    return f"compute the loss from tensors that require grad, without `{_written(cut)}`{source}"


def _connected(cut: Cut) -> Any:
    """The value itself for what detaches it; gradients switched on for what runs without them."""

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cut.no_grad:
            return None if torch.is_grad_enabled() else (_with_grad, (function, args, kwargs), {})
        if called_name(function) != cut.name or not args:
            return None
        frame = user_frame(__import__("sys")._getframe(1))
        return (_itself, args[:1], {}) if frame is None or locate(frame) == cut.location else None

    return call


def _with_grad(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.enable_grad():
        return function(*args, **kwargs)


def _itself(value: Any) -> Any:
    return value


def _stale(seen: Evidence) -> Iterator[Change]:
    names = seen.base.not_updated
    if not names:
        return
    yield Change(
        suspect="stale_optimizer",
        text=f"{plural(len(names), 'parameter')} added to the optimizer",
        headline=f"The optimizer does not hold {_shown(names)}: these parameters are never updated",
        fix=f"create the optimizer after the model is complete, from `{seen.model}.parameters()`",
        parameters=names,
        on_update=_holding(seen, names),
    )


def _frozen(seen: Evidence) -> Iterator[Change]:
    names = seen.base.frozen
    if not names:
        return

    def unfreeze(_modules: Mapping[str, torch.nn.Module], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name in names:
            if name in parameters:
                parameters[name].requires_grad_(True)

    some = f"`{_common(names)}`" if _common(names) else _shown(names)
    code = f"for name, p in {seen.model}.named_parameters(): p.requires_grad_(True)"
    yield Change(
        suspect="frozen",
        text=f"{plural(len(names), 'parameter')} unfrozen",
        headline=f"{some} is frozen: with requires_grad=True the model learns {seen.subject}",
        fix=f"`{code}` before the optimizer is created from `{seen.model}.parameters()`",
        parameters=names,
        on_models=unfreeze,
        on_update=_holding(seen, names),
    )


def _holding(seen: Evidence, names: tuple[str, ...]) -> Any:
    """An optimizer that updates these parameters, too."""

    def add(optimizer: torch.optim.Optimizer) -> Undo | None:
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        named = seen.running().named_parameters()
        missing = [named[name] for name in names if name in named and id(named[name]) not in held]
        if missing and optimizer is seen.running().optimizers[0]:
            template = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            optimizer.add_param_group({**template, "params": missing})
        return None

    return add


def _shown(names: tuple[str, ...]) -> str:
    return listed([f"`{name}`" for name in names])


def _common(names: tuple[str, ...]) -> str:
    """The module that all are in; empty where there is none."""
    parts = [name.split(".")[:-1] for name in names]
    same = 0
    while all(len(one) > same and one[same] == parts[0][same] for one in parts):
        same += 1
    return ".".join(parts[0][:same])
