"""Suspects in the parameters: which are updated, and by which gradients."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import torch

from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import TrainingEvidence, each, itself, replaced
from torchdebug_magics.instruments.overfit.training.change import TrainingChange, Undo
from torchdebug_magics.instruments.overfit.training.observed_step import CutGraph
from torchdebug_magics.instruments.overfit.training.training import Training
from torchdebug_magics.probing.source.user_code import frames_above
from torchdebug_magics.probing.steps import parameters_of

_UP, _DOWN = (10.0, 100.0, 1e3, 1e4, 1e5), (0.1, 1e-2, 1e-3, 1e-4)
_DECAY = 0.02
_DECAYED, _SLOWER = 0.3, 0.1
_USUAL = {"SGD": 0.1, "Adagrad": 0.1, "LBFGS": 1.0}
_UNDONE = frozenset({"detach", "data", "round", "floor", "ceil", "trunc"})
"""Ops that a trial can skip by passing the value on."""


def suspects(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields changes for an optimizer that never steps, cut graphs, parameters without an optimizer, and gradients of earlier steps."""
    yield from _never_steps(seen)
    yield from _cut_graph(seen)
    yield from _unregistered(seen)
    if names := seen.base.not_updated:
        yield TrainingChange(
            suspect="stale_optimizer",
            text=f"{plural(len(names), 'parameter')} added to the optimizer",
            headline=f"The optimizer does not hold {_counted(names)}: {_shown(names)} {'is' if len(names) == 1 else 'are'} never updated",
            fix=f"create the optimizer after the model is complete, from `{seen.model}.parameters()`",
            parameters=names,
            on_update=_adding(seen, _named(names)),
        )
    if seen.base.accumulates:
        yield TrainingChange(
            suspect="zero_grad_missing",
            text="gradients zeroed before each step",
            headline="Gradients accumulate over the steps: zero_grad() is missing",
            fix=f"call `{seen.optimizer}.zero_grad()` before `loss.backward()`",
            on_update=lambda optimizer: optimizer.zero_grad,
        )
    if seen.base.is_zeroed:
        yield TrainingChange(
            suspect="zero_grad_missing",
            text="gradients kept until the update",
            headline="zero_grad() runs between backward() and step(): the update finds no gradients",
            fix=f"call `{seen.optimizer}.zero_grad()` before `loss.backward()`, not after it",
            keeps_gradients=True,
        )


def _never_steps(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    own = {id(parameter) for parameter in seen.base.named_parameters().values()}
    idle = (optimizer for optimizer in seen.optimizers if not own.isdisjoint(map(id, parameters_of(optimizer))))
    optimizer = None if seen.base.optimizers or seen.base.error is not None else next(idle, None)
    if optimizer is not None:
        yield TrainingChange(
            suspect=None,
            text="optimizer.step() at the end of each step",
            headline="The optimizer never steps: no parameter changes",
            fix=f"call `{seen.optimizer}.step()` after `loss.backward()`",
            on_end=optimizer.step,
        )


def _cut_graph(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    untouched = {name: one for name, one in seen.base.facts.items() if one.parameter.requires_grad and not one.gradient}
    lost, first = {id(one.parameter): name for name, one in untouched.items()}, seen.base.first
    relevant = [first.cuts[place] for place in sorted(first.lost) if first.cuts[place].sources & lost.keys()]
    if not relevant:  # the loss was made anew of plain numbers
        unreached = {id(one.parameter) for one in untouched.values() if one.gradient is None}
        relevant = [cut for cut in first.cuts[: first.before_backward] if cut.sources & unreached]
    if not relevant:
        return
    cut = max(relevant, key=lambda one: len(one.sources & lost.keys()))
    names = tuple(lost[one] for one in lost if one in cut.sources)
    where = f" at {cut.location}" if cut.location is not None else ""
    source = f": `{cut.location.source}`" if cut.location is not None and cut.location.source else ""
    written = {"data": ".data", "__get__": "an attribute"}.get(cut.name, f".{cut.name}()")
    what, fix = f"`{written}`", f"compute the loss from tensors that require grad, without `{written}`"
    if cut.no_grad:
        what, fix = "torch.no_grad()", "run this line outside `torch.no_grad()`"
    elif cut.name in _UNDONE:
        fix = f"remove `{written}` from {cut.location}"
    yield TrainingChange(
        suspect="cut_graph",
        text=f"connected{where}",
        headline=f"{what}{where} cuts the graph: no gradient reaches {_shown(names)}",
        fix=f"{fix}{source}",
        parameters=names,
        location=cut.location,
        on_call=_connected(cut),
        is_evident=True,
    )


def _connected(cut: CutGraph) -> Any:
    """The value itself for what detaches it; gradients switched on for what runs without them."""
    if not cut.no_grad:
        return replaced(cut.name, cut.location, itself) if cut.name in _UNDONE else None

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # An optimizer changes parameters without gradients, as it should.
        is_own = torch.is_grad_enabled() or any(
            isinstance(frame.f_locals.get("self"), torch.optim.Optimizer) for frame in frames_above(sys._getframe(1))
        )
        return None if is_own else (torch.enable_grad()(function), args, kwargs)

    return call


def _unregistered(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields modules that are not registered, such as those in a plain list."""
    inside = seen.base.first.unregistered
    held = {id(parameter) for optimizer in seen.base.optimizers for parameter in parameters_of(optimizer)}
    if not any(id(parameter) not in held and parameter.requires_grad for parameter in _own_parameters(seen.base)):
        return
    yield TrainingChange(
        suspect="stale_optimizer",
        text=f"{plural(len(inside), 'module')} added to the optimizer",
        headline=f"{plural(len(inside), 'module')} not registered as submodules: the optimizer does not hold the parameters of "
        f"{listed(list(inside))}",
        fix=f"register the modules: keep them in an `nn.ModuleList` before the optimizer is created from `{seen.model}.parameters()`",
        on_update=_adding(seen, _own_parameters),
    )


def _own_parameters(training: Training) -> list[torch.nn.Parameter]:
    return [parameter for module in training.first.unregistered.values() for parameter in module.parameters(recurse=False)]


def frozen(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Parameters that are not trained, perhaps on purpose."""
    names = tuple(name for name, one in seen.base.facts.items() if not one.parameter.requires_grad)
    if not names:
        return
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    module = ".".join(same[0] for same in takewhile(lambda same: len(set(same)) == 1, parts))
    some = f"`{module}` is" if module else f"{_counted(names).capitalize()} {'is' if len(names) == 1 else 'are'}"
    whose = "" if module or len(names) == 1 else f" for {_shown(names)}"
    code = f"for name in {list(names)!r}: {seen.model}.get_parameter(name).requires_grad_(True)"
    if module and {name for name in seen.base.named_parameters() if name.startswith(f"{module}.")} == set(names):
        code = f"{seen.model}.get_submodule({module!r}).requires_grad_(True)"
    yield TrainingChange(
        suspect="frozen",
        text=f"{plural(len(names), 'parameter')} unfrozen",
        headline=f"{some} frozen: with `requires_grad=True`{whose} the model learns {seen.subject}",
        fix=f"run `{code}` before the optimizer is created from `{seen.model}.parameters()`",
        parameters=names,
        on_models=each(names, torch.Tensor.requires_grad_),
        on_update=_adding(seen, _named(names)),
    )


def _named(names: Iterable[str]) -> Callable[[Training], list[torch.nn.Parameter]]:
    def parameters(training: Training) -> list[torch.nn.Parameter]:
        known = training.named_parameters()
        return [known[name] for name in names if name in known]

    return parameters


def _adding(seen: TrainingEvidence, parameters: Callable[[Training], list[torch.nn.Parameter]]) -> Any:
    """An optimizer that updates these parameters, too."""

    def add(optimizer: torch.optim.Optimizer) -> Undo | None:
        held = set(map(id, parameters_of(optimizer)))
        missing = [parameter for parameter in parameters(seen.trial[-1]) if id(parameter) not in held]
        if missing and optimizer is seen.trial[-1].optimizers[0]:
            optimizer.add_param_group({**optimizer.param_groups[0], "params": missing})
        return None

    return add


def _counted(names: tuple[str, ...]) -> str:
    return f"parameter `{names[0]}`" if len(names) == 1 else plural(len(names), "parameter")


def _shown(names: tuple[str, ...]) -> str:
    return listed([f"`{name}`" for name in names])


def update_suspects(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields training without clipping, and without weight decay."""
    if seen.base.clipped is not None and not seen.base.is_zeroed:
        before, after = seen.base.clipped
        yield TrainingChange(
            suspect="clipping",
            text="no clipping",
            headline=f"Clipping shrinks the gradient norm from {number(before)} to {number(after)}: too small to learn from",
            fix=f"clip at a larger norm, such as `max_norm={max(1.0, float(f'{2 * before:.1g}')):g}`, or not at all",
            factor=after / before if before else None,
            keeps_gradients=True,
        )
    decay = max(seen.decays, default=0.0)
    if decay >= _DECAY:
        yield TrainingChange(
            suspect="weight_decay",
            text="weight_decay=0",
            headline=f"Weight decay {decay:g} is too large: without it, the model learns {seen.subject}",
            fix=f'`for group in {seen.optimizer}.param_groups: group["weight_decay"] = 0.0`',
            factor=decay,
            on_update=_with(weight_decay=lambda _: 0.0),
        )


def learning_rates(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields slower schedules, then learning rates changed by powers of ten, the likelier direction first."""
    losses, rate, last = seen.base.losses, max(seen.rates, default=0.0), seen.base.last_rate
    if last is not None and rate and last <= _DECAYED * rate:  # the scheduler lowers the learning rate too early
        for text, change in (
            (f"learning rate kept at {rate:g}", lambda _: rate),
            ("learning rate lowered a tenth as fast", lambda now: rate * (now / rate) ** _SLOWER if now > 0 else 0.0),
        ):
            headline = f"The scheduler lowers the learning rate from {rate:g} to {last:.2g} in {len(losses)} steps: too early"
            fix = f"call `scheduler.step()` less often: the learning rate falls to {last:.2g} before the model learns {seen.subject}"
            yield _rate(text, headline, fix, rate / last if last else math.inf, on_update=_with(lr=change))
    group = f"for group in {seen.optimizer}.param_groups"
    if seen.rates and not rate:
        usual = _USUAL.get(type(seen.base.optimizers[0]).__name__, 1e-3)
        headline = f"The learning rate is 0: with {usual:g} the model learns {seen.subject}"
        yield _rate(f"lr={usual:g}", headline, f'`{group}: group["lr"] = {usual:g}`', math.inf, on_update=_with(lr=lambda _: usual))
        return
    tail = losses[len(losses) // 2 :]
    rises = not all(map(math.isfinite, losses)) or (len(tail) > 1 and max(tail) > 1.2 * losses[0])
    jumps = len(tail) > 2 and sum(later > earlier for earlier, later in pairwise(tail)) > 0.3 * len(tail)  # noqa: PLR2004
    for factor in (*_DOWN, *_UP) if rises else (10.0, 0.1, 100.0, 0.01, *_UP[2:], *_DOWN[2:]) if jumps else (*_UP, *_DOWN):
        text, word = f"learning rate x{factor:g}", "small" if factor > 1 else "large"
        if not seen.base.optimizers:  # the user's own code updates: in plain gradient descent, larger gradients are a larger learning rate
            headline = f"The learning rate is too {word}: multiplied by {factor:g}, the model learns {seen.subject}"
            yield _rate(text, headline, f"multiply the learning rate by {factor:g}", factor, backward_scale=factor)
            continue
        new = rate * factor if seen.rates else math.nan
        code = f'group["lr"] = {new:g}' if len(set(seen.rates)) <= 1 else f'group["lr"] *= {factor:g}'
        headline = f"The learning rate {new / factor:g} is too {word}: with {new:g} the model learns {seen.subject}"
        yield _rate(text, headline, f"`{group}: {code}`", factor, on_update=_with(lr=partial(operator.mul, factor)))


def _rate(text: str, headline: str, fix: str, factor: float, **how: Any) -> TrainingChange:
    return TrainingChange(suspect="learning_rate", text=text, headline=headline, fix=fix, factor=factor, **how)


def _with(**settings: Callable[[Any], Any]) -> Any:
    """Every group of parameters with changed settings, for the length of one update."""

    def change(optimizer: torch.optim.Optimizer) -> Undo:
        before = [{name: group[name] for name in settings if name in group} for group in optimizer.param_groups]
        for group, held in zip(optimizer.param_groups, before, strict=True):
            group.update({name: settings[name](value) for name, value in held.items()})

        def undo() -> None:
            for group, held in zip(optimizer.param_groups, before, strict=False):
                group.update(held)

        return undo

    return change
