"""Suspects in the parameters: which are updated, and by which gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.overfit.training.change import Change, Undo
from torchdebug_magics.instruments.overfit.training.function_calls import called_name, line_of_step
from torchdebug_magics.probing.where import frames_above

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence
    from torchdebug_magics.instruments.overfit.training.observed_step import Cut

__all__ = ["frozen", "suspects"]


def suspects(seen: Evidence) -> Iterator[Change]:
    """Yields changes for cut graphs, parameters missing from the optimizer, and gradients of earlier steps."""
    yield from _cut_graph(seen)
    yield from _unregistered(seen)
    yield from _stale(seen)
    if seen.base.accumulates:
        yield Change(
            suspect="zero_grad_missing",
            text="gradients zeroed before each step",
            headline="Gradients accumulate over the steps: zero_grad() is missing",
            fix=f"call `{seen.optimizer}.zero_grad()` before `loss.backward()`",
            on_first_backward=_zero,
        )
    if seen.base.is_zeroed:
        yield Change(
            suspect="zero_grad_missing",
            text="gradients kept until the update",
            headline="zero_grad() runs between backward() and step(): the update finds no gradients",
            fix=f"call `{seen.optimizer}.zero_grad()` before `loss.backward()`, not after it",
            keeps_gradients=True,
        )


def _zero(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    for one in parameters.values():
        one.grad = None


def _cut_graph(seen: Evidence) -> Iterator[Change]:
    lost = {id(one): name for name, one in seen.base.named_parameters().items() if name in seen.base.without_gradient}
    first = seen.base.first
    relevant = [first.cuts[place] for place in sorted(first.lost) if first.cuts[place].sources & lost.keys()]
    if not relevant:  # the loss was made anew of plain numbers
        unreached = seen.base.unconnected & lost.keys()
        relevant = [cut for cut in first.cuts[: first.before_backward] if cut.sources & unreached]
    if not lost or not relevant:
        return
    cut = max(relevant, key=lambda one: len(one.sources & lost.keys()))
    names = tuple(lost[one] for one in lost if one in cut.sources)
    what = "torch.no_grad()" if cut.no_grad else f"`{_written(cut)}`"
    where = f" at {cut.location}" if cut.location is not None else ""
    can_be_undone = cut.no_grad or cut.name in _UNDONE
    yield Change(
        suspect="cut_graph",
        text=f"connected at {cut.location}" if cut.location is not None else "connected",
        headline=f"{what}{where} cuts the graph: no gradient reaches {_shown(names)}",
        fix=_repair(cut),
        parameters=names,
        location=cut.location,
        on_call=_connected(cut) if can_be_undone else None,
        is_evident=True,
    )


def _written(cut: Cut) -> str:
    return {"data": ".data", "__get__": "an attribute"}.get(cut.name, f".{cut.name}()")


def _repair(cut: Cut) -> str:
    source = f": `{cut.location.source}`" if cut.location is not None and cut.location.source else ""
    if cut.no_grad:
        return f"run this line outside `torch.no_grad()`{source}"
    if cut.name in _UNDONE:
        return f"remove `{_written(cut)}` from {cut.location}{source}"
    return f"compute the loss from tensors that require grad, without `{_written(cut)}`{source}"


_UNDONE = frozenset({"detach", "data", "round", "floor", "ceil", "trunc"})
"""Ops that a trial can skip by passing the value on."""


def _connected(cut: Cut) -> Any:
    """The value itself for what detaches it; gradients switched on for what runs without them."""

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cut.no_grad:
            is_own = torch.is_grad_enabled() or _is_in_update(sys._getframe(1))
            return None if is_own else (_with_grad, (function, args, kwargs), {})
        if called_name(function) != cut.name or not args:
            return None
        return (_itself, args[:1], {}) if line_of_step() == cut.location else None

    return call


def _is_in_update(frame: FrameType) -> bool:
    """Whether an optimizer is at work, which changes parameters without gradients as it should."""
    return any(isinstance(one.f_locals.get("self"), torch.optim.Optimizer) for one in frames_above(frame))


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
        headline=f"The optimizer does not hold {_counted(names)}: {_shown(names)} {'is' if len(names) == 1 else 'are'} never updated",
        fix=f"create the optimizer after the model is complete, from `{seen.model}.parameters()`",
        parameters=names,
        on_update=_holding(seen, names),
    )


def _unregistered(seen: Evidence) -> Iterator[Change]:
    """Yields modules that are not registered, such as those in a plain list."""
    inside = seen.base.first.unregistered
    held = {id(one) for optimizer in seen.base.optimizers for group in optimizer.param_groups for one in group["params"]}
    if not any(id(one) not in held and one.requires_grad for module in inside.values() for one in module.parameters(recurse=False)):
        return
    names = listed(list(inside))

    def add(optimizer: torch.optim.Optimizer) -> Undo | None:
        known = {id(one) for group in optimizer.param_groups for one in group["params"]}
        own = [one for module in seen.running().first.unregistered.values() for one in module.parameters(recurse=False)]
        _add(optimizer, [one for one in own if id(one) not in known])
        return None

    yield Change(
        suspect="stale_optimizer",
        text=f"{plural(len(inside), 'module')} added to the optimizer",
        headline=f"{plural(len(inside), 'module')} not registered as submodules: the optimizer does not hold the parameters of {names}",
        fix=f"register the modules: keep them in an `nn.ModuleList` before the optimizer is created from `{seen.model}.parameters()`",
        on_update=add,
    )


def frozen(seen: Evidence) -> Iterator[Change]:
    """Parameters that are not trained, perhaps on purpose."""
    names = seen.base.frozen
    if not names:
        return

    def unfreeze(_modules: Mapping[str, torch.nn.Module], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name in names:
            if name in parameters:
                parameters[name].requires_grad_()

    module = _common(names)
    some = f"`{module}` is" if module else f"{_counted(names).capitalize()} {'is' if len(names) == 1 else 'are'}"
    each = "" if module or len(names) == 1 else f" for {_shown(names)}"
    whole = {name for name in seen.base.named_parameters() if name.startswith(f"{module}.")} == set(names) if module else False
    code = (
        f"{seen.model}.get_submodule({module!r}).requires_grad_(True)"
        if whole
        else f"for name in {list(names)!r}: {seen.model}.get_parameter(name).requires_grad_(True)"
    )
    yield Change(
        suspect="frozen",
        text=f"{plural(len(names), 'parameter')} unfrozen",
        headline=f"{some} frozen: with `requires_grad=True`{each} the model learns {seen.subject}",
        fix=f"run `{code}` before the optimizer is created from `{seen.model}.parameters()`",
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
        if optimizer is seen.running().optimizers[0]:
            _add(optimizer, missing)
        return None

    return add


def _add(optimizer: torch.optim.Optimizer, missing: list[torch.nn.Parameter]) -> None:
    if missing:
        template = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        optimizer.add_param_group({**template, "params": missing})


def _counted(names: tuple[str, ...]) -> str:
    return f"parameter `{names[0]}`" if len(names) == 1 else plural(len(names), "parameter")


def _shown(names: tuple[str, ...]) -> str:
    return listed([f"`{name}`" for name in names])


def _common(names: tuple[str, ...]) -> str:
    """The module that all are in; empty where there is none."""
    parts = [name.split(".")[:-1] for name in names]
    same = 0
    while all(len(one) > same and one[same] == parts[0][same] for one in parts):
        same += 1
    return ".".join(parts[0][:same])
