"""Suspects in the parameters: which are updated, and by which gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence
from torchdebug_magics.instruments.overfit.training.change import Change, Undo
from torchdebug_magics.instruments.overfit.training.observed_step import Cut, called_name, line_of_step
from torchdebug_magics.probing.source.code_owner import frames_above

_UP, _DOWN = (10.0, 100.0, 1e3, 1e4, 1e5), (0.1, 1e-2, 1e-3, 1e-4)
_DECAY = 0.02
_DECAYED, _SLOWER = 0.3, 0.1
_USUAL = {"SGD": 0.1, "Adagrad": 0.1, "LBFGS": 1.0}


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


def update_suspects(seen: Evidence) -> Iterator[Change]:
    """Yields training without clipping, and without weight decay."""
    if seen.base.clipped is not None and not seen.base.is_zeroed:
        before, after = seen.base.clipped
        yield Change(
            suspect="clipping",
            text="no clipping",
            headline=f"Clipping shrinks the gradient norm from {number(before)} to {number(after)}: too small to learn from",
            fix=f"clip at a larger norm, such as `max_norm={max(1.0, _round(before)):g}`, or not at all",
            factor=after / before if before else None,
            keeps_gradients=True,
        )
    if any(decay >= _DECAY for decay in seen.decays):
        yield Change(
            suspect="weight_decay",
            text="weight_decay=0",
            headline=f"Weight decay {max(seen.decays):g} is too large: without it, the model learns {seen.subject}",
            fix=f'`for group in {seen.optimizer}.param_groups: group["weight_decay"] = 0.0`',
            factor=max(seen.decays),
            on_update=_with(weight_decay=lambda _: 0.0),
        )


def never_steps(seen: Evidence) -> Iterator[Change]:
    """Yields a call of `step` for an optimizer of the model's parameters that is never stepped."""
    if seen.base.optimizers or seen.base.error is not None:
        return
    own = {id(one) for one in seen.base.named_parameters().values()}
    optimizer = next((one for one in seen.optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])), None)
    if optimizer is not None:
        yield Change(
            suspect=None,
            text="optimizer.step() at the end of each step",
            headline="The optimizer never steps: no parameter changes",
            fix=f"call `{seen.optimizer}.step()` after `loss.backward()`",
            on_end=optimizer.step,
        )


def _decaying(seen: Evidence) -> Iterator[Change]:
    """Yields slower schedules, where the scheduler lowers the learning rate too early."""
    first, last = max(seen.rates, default=0.0), seen.base.last_rate
    if last is None or not first or last > _DECAYED * first:
        return
    for text, change in (
        (f"learning rate kept at {first:g}", lambda _: first),
        ("learning rate lowered a tenth as fast", lambda now: first * (now / first) ** _SLOWER if now > 0 else 0.0),
    ):
        yield Change(
            suspect="learning_rate",
            text=text,
            headline=f"The scheduler lowers the learning rate from {first:g} to {last:.2g} in {len(seen.base.losses)} steps: too early",
            fix=f"call `scheduler.step()` less often: the learning rate falls to {last:.2g} before the model learns {seen.subject}",
            factor=first / last if last else math.inf,
            on_update=_with(lr=change),
        )


def learning_rates(seen: Evidence) -> Iterator[Change]:
    """Yields learning rates changed by powers of ten, the likelier direction first."""
    yield from _decaying(seen)
    if seen.rates and not any(seen.rates):
        usual = _USUAL.get(type(seen.base.optimizers[0]).__name__, 1e-3)
        yield _rate(
            seen,
            f"lr={usual:g}",
            f"The learning rate is 0: with {usual:g} the model learns {seen.subject}",
            usual,
            math.inf,
            lambda _: usual,
        )
        return
    losses = seen.base.losses
    tail = losses[len(losses) // 2 :]
    rises = not all(map(math.isfinite, losses)) or (len(tail) > 1 and max(tail) > 1.2 * losses[0])
    jumps = len(tail) > 2 and sum(one > other for one, other in zip(tail[1:], tail, strict=False)) > 0.3 * len(tail)  # noqa: PLR2004
    order = (*_DOWN, *_UP) if rises else (10.0, 0.1, 100.0, 0.01, *_UP[2:], *_DOWN[2:]) if jumps else (*_UP, *_DOWN)
    for factor in order:
        if not seen.base.optimizers:
            yield _by_hand(seen, factor)
            continue
        rate = max(seen.rates) if seen.rates else math.nan
        is_low = factor > 1
        new = rate * factor
        word = "small" if is_low else "large"
        headline = f"The learning rate {rate:g} is too {word}: with {new:g} the model learns {seen.subject}"
        yield _rate(seen, f"learning rate x{factor:g}", headline, new, factor, lambda old, by=factor: old * by)


def _by_hand(seen: Evidence, factor: float) -> Change:
    """Where the user's own code updates: for plain gradient descent, larger gradients are a larger learning rate."""
    word = "small" if factor > 1 else "large"
    return Change(
        suspect="learning_rate",
        text=f"learning rate x{factor:g}",
        headline=f"The learning rate is too {word}: multiplied by {factor:g}, the model learns {seen.subject}",
        fix=f"multiply the learning rate by {factor:g}",
        factor=factor,
        backward_scale=factor,
    )


def _rate(seen: Evidence, text: str, headline: str, new: float, factor: float, change: Any) -> Change:
    is_one = len(set(seen.rates)) <= 1
    code = f'group["lr"] = {new:g}' if is_one or not math.isfinite(factor) else f'group["lr"] *= {factor:g}'
    return Change(
        suspect="learning_rate",
        text=text,
        headline=headline,
        fix=f"`for group in {seen.optimizer}.param_groups: {code}`",
        factor=factor,
        on_update=_with(lr=change),
    )


def _with(**settings: Any) -> Any:
    """Every group of parameters with changed settings, for the length of one update."""

    def change(optimizer: torch.optim.Optimizer) -> Undo:
        before = [{name: group[name] for name in settings if name in group} for group in optimizer.param_groups]
        for group, held in zip(optimizer.param_groups, before, strict=True):
            group.update({name: settings[name](value) for name, value in held.items()})

        def undo() -> None:
            for group, held in zip(optimizer.param_groups, before, strict=True):
                group.update(held)

        return undo

    return change


def _round(value: float) -> float:
    return float(f"{2 * value:.1g}")
