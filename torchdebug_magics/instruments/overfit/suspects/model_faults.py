"""Suspects in the model: which parameters are updated, and by which gradients; dead units, initial weights, batch statistics."""

from __future__ import annotations

import copy
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instruments.overfit.suspects.loss_inputs import each, itself, replaced, rows_of
from torchdebug_magics.instruments.overfit.training.observed_step import Activation, CutGraph, TrainingChange, Undo
from torchdebug_magics.instruments.overfit.training.training import Training, TrainingEvidence
from torchdebug_magics.probing.source.user_code import frames_above
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.steps import NEVER_ZEROED, never_held, never_zeroed, parameters_of, zeroed_too_early

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_CONSTANT = "with all weights"
_STANDARD = 0.02
_FAR = 5.0
"""How many times larger or smaller than by default weights are at the start that are looked at."""
_ALMOST = 0.98
_SMALL, _LARGE = 0.05, 20.0
"""Standard deviations of an input that are far from 1."""
_UP, _DOWN = (10.0, 100.0, 1e3, 1e4, 1e5), (0.1, 1e-2, 1e-3, 1e-4)
_DECAY = 0.02
_DECAYED, _SLOWER = 0.3, 0.1
_USUAL = {"SGD": 0.1, "Adagrad": 0.1, "LBFGS": 1.0}
_UNDONE = frozenset({"detach", "data", "round", "floor", "ceil", "trunc"})
"""Ops that a trial can skip by passing the value on."""


def suspects(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields changes for an optimizer that never steps, cut graphs, parameters without an optimizer, and gradients of earlier steps."""
    own = {id(parameter) for parameter in seen.base.named_parameters().values()}
    reachable = seen.start.of_kind(torch.optim.Optimizer)
    idle = (optimizer for optimizer in reachable if not own.isdisjoint(map(id, parameters_of(optimizer))))
    if not seen.base.optimizers and seen.base.error is None and (optimizer := next(idle, None)) is not None:
        fix = f"call `{seen.optimizer}.step()` after `loss.backward()`"
        yield TrainingChange(None, "The optimizer never steps: no parameter changes", fix, on_end=optimizer.step)
    yield from _cut_graph(seen)
    inside = seen.base.first.unregistered  # such as modules in a plain list
    held = {id(parameter) for optimizer in seen.base.optimizers for parameter in parameters_of(optimizer)}
    if any(id(parameter) not in held and parameter.requires_grad for parameter in _own_parameters(seen.base)):
        headline = f"{plural(len(inside), 'module')} not registered as submodules: the optimizer does not hold the parameters of "
        fix = f"register the modules: keep them in an `nn.ModuleList` before the optimizer is created from `{seen.model}.parameters()`"
        yield TrainingChange("stale_optimizer", f"{headline}{listed(list(inside))}", fix, on_update=_adding())
    if names := seen.base.not_updated:
        fix = f"create the optimizer after the model is complete, from `{seen.model}.parameters()`"
        yield TrainingChange("stale_optimizer", never_held(names), fix, parameters=names, on_update=_adding(names))
    if seen.base.accumulates:
        fix = never_zeroed(seen.optimizer)
        yield TrainingChange("zero_grad_missing", NEVER_ZEROED, fix, on_update=lambda _, optimizer: optimizer.zero_grad)
    if seen.base.zeroed is not None:
        fix, place = f"{never_zeroed(seen.optimizer)}, not after it", seen.base.zeroed.location
        yield TrainingChange("zero_grad_missing", zeroed_too_early(seen.optimizer), fix, location=place, keeps_gradients=True)


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
    place, names = cut.location, tuple(lost[one] for one in lost if one in cut.sources)
    where, source = f" at {place}" if place is not None else "", f": `{place.source}`" if place is not None and place.source else ""
    written = {"data": ".data", "__get__": "an attribute"}.get(cut.name, f".{cut.name}()")
    what, fix = f"`{written}`", f"compute the loss from tensors that require grad, without `{written}`"
    if cut.no_grad:
        what, fix = "torch.no_grad()", "run this line outside `torch.no_grad()`"
    elif cut.name in _UNDONE:
        fix = f"remove `{written}` from {place}"
    headline = f"{what}{where} cuts the graph: no gradient reaches {_shown(names)}"
    of_cut = {"text": f"connected{where}", "parameters": names, "location": place, "on_call": _connected(cut)}
    yield TrainingChange("cut_graph", headline, f"{fix}{source}", is_evident=True, **of_cut)


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


def _own_parameters(training: Training) -> list[nn.Parameter]:
    return [parameter for module in training.first.unregistered.values() for parameter in module.parameters(recurse=False)]


def frozen(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Parameters that are not trained, perhaps on purpose."""
    names = tuple(name for name, one in seen.base.facts.items() if not one.parameter.requires_grad)
    if not names:
        return
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    module = ".".join(same[0] for same in takewhile(lambda same: len(set(same)) == 1, parts))
    some = f"`{module or names[0]}` is" if module or len(names) == 1 else f"{plural(len(names), 'parameter')} are"
    whose = "" if module or len(names) == 1 else f" for {_shown(names)}"
    code = f"for name in {list(names)!r}: {seen.model}.get_parameter(name).requires_grad_(True)"
    if module and {name for name in seen.base.named_parameters() if name.startswith(f"{module}.")} == set(names):
        code = f"{seen.model}.get_submodule({module!r}).requires_grad_(True)"
    headline = f"{some} frozen: with `requires_grad=True`{whose} the model learns {seen.subject}"
    fix = f"run `{code}` before the optimizer is created from `{seen.model}.parameters()`"
    text, thaw = f"{plural(len(names), 'parameter')} unfrozen", each(names, Tensor.requires_grad_)
    yield TrainingChange("frozen", headline, fix, text=text, parameters=names, on_models=thaw, on_update=_adding(names))


def _adding(names: Iterable[str] = ()) -> Any:
    """An optimizer that updates these parameters, too; without names, those of the modules that are not registered."""

    def add(training: Training, optimizer: torch.optim.Optimizer) -> None:
        held, known = set(map(id, parameters_of(optimizer))), training.named_parameters()
        wanted = [known[name] for name in names if name in known] if names else _own_parameters(training)
        missing = [parameter for parameter in wanted if id(parameter) not in held]
        if missing and optimizer is training.optimizers[0]:
            optimizer.add_param_group({**optimizer.param_groups[0], "params": missing})

    return add


def _shown(names: Iterable[str]) -> str:
    return listed([f"`{name}`" for name in names])


def update_suspects(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields training without clipping, and without weight decay."""
    if seen.base.clipped is not None and seen.base.zeroed is None:
        before, after = seen.base.clipped
        headline = f"Clipping shrinks the gradient norm from {number(before)} to {number(after)}: too small to learn from"
        fix = f"clip at a larger norm, such as `max_norm={max(1.0, float(f'{2 * before:.1g}')):g}`, or not at all"
        yield TrainingChange("clipping", headline, fix, text="no clipping", factor=after / before, keeps_gradients=True)
    if seen.decay >= _DECAY:
        headline = f"Weight decay {seen.decay:g} is too large: without it, the model learns {seen.subject}"
        fix = f'`for group in {seen.optimizer}.param_groups: group["weight_decay"] = 0.0`'
        update = _with(weight_decay=lambda _: 0.0)
        yield TrainingChange("weight_decay", headline, fix, text="weight_decay=0", factor=seen.decay, on_update=update)


def learning_rates(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields slower schedules, then learning rates changed by powers of ten, the likelier direction first."""
    losses, rate, last = seen.base.losses, max(seen.rates, default=0.0), seen.base.last_rate
    change = partial(TrainingChange, "learning_rate")
    if last is not None and rate and last <= _DECAYED * rate:  # the scheduler lowers the learning rate too early
        headline = f"The scheduler lowers the learning rate from {rate:g} to {last:.2g} in {len(losses)} steps: too early"
        fix = f"call `scheduler.step()` less often: the learning rate falls to {last:.2g} before the model learns {seen.subject}"
        line = next((line for _, line in seen.base.events.scheduled.values() if line is not None), None)
        place = None if line is None else line.location
        kept = change(headline, fix, text=f"learning rate kept at {rate:g}", factor=rate / last if last else math.inf, location=place)
        yield replace(kept, on_update=_with(lr=lambda _: rate))
        slower = _with(lr=lambda now: rate * (now / rate) ** _SLOWER if now > 0 else 0.0)
        yield replace(kept, text="learning rate lowered a tenth as fast", on_update=slower)
    group = f"for group in {seen.optimizer}.param_groups"
    if seen.rates and not rate:
        usual = _USUAL.get(type(seen.base.optimizers[0]).__name__, 1e-3)
        headline = f"The learning rate is 0: with {usual:g} the model learns {seen.subject}"
        yield change(headline, f'`{group}: group["lr"] = {usual:g}`', factor=math.inf, on_update=_with(lr=lambda _: usual))
        return
    tail = losses[len(losses) // 2 :]
    rises = not all(map(math.isfinite, losses)) or (len(tail) > 1 and max(tail) > 1.2 * losses[0])
    jumps = len(tail) > 2 and sum(later > earlier for earlier, later in pairwise(tail)) > 0.3 * len(tail)  # noqa: PLR2004
    for factor in (*_DOWN, *_UP) if rises else (10.0, 0.1, 100.0, 0.01, *_UP[2:], *_DOWN[2:]) if jumps else (*_UP, *_DOWN):
        text, word = f"learning rate x{factor:g}", "small" if factor > 1 else "large"
        if not seen.base.optimizers:  # the user's own code updates: in plain gradient descent, larger gradients are a larger learning rate
            headline = f"The learning rate is too {word}: multiplied by {factor:g}, the model learns {seen.subject}"
            yield change(headline, f"multiply the learning rate by {factor:g}", text=text, factor=factor, backward_scale=factor)
            continue
        new = rate * factor if seen.rates else math.nan
        code = f'group["lr"] = {new:g}' if len(set(seen.rates)) <= 1 else f'group["lr"] *= {factor:g}'
        headline = f"The learning rate {new / factor:g} is too {word}: with {new:g} the model learns {seen.subject}"
        yield change(headline, f"`{group}: {code}`", text=text, factor=factor, on_update=_with(lr=partial(operator.mul, factor)))


def _with(**settings: Callable[[Any], Any]) -> Any:
    """Every group of parameters with changed settings, for the length of one update."""

    def change(_: Training, optimizer: torch.optim.Optimizer) -> Undo:
        before = [{name: group[name] for name in settings if name in group} for group in optimizer.param_groups]
        for group, held in zip(optimizer.param_groups, before, strict=True):
            group.update({name: settings[name](value) for name, value in held.items()})

        def undo() -> None:
            for group, held in zip(optimizer.param_groups, before, strict=False):
                group.update(held)

        return undo

    return change


def suspects_of_layers(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields changes of samples, of inputs, of batch statistics over one value, of dead units and of initial weights."""
    yield from _conflicts(seen)
    yield from _scale(seen)
    yield from _one_value(seen)
    dead = next((activation for activation in seen.base.first.activations if activation.is_dead and activation.feeder), None)
    of_dead = [] if dead is None else list(_dead(seen, dead))
    is_constant = dead is not None and seen.unusual.get(dead.feeder, "").startswith(_CONSTANT)
    yield from (*_initial(seen), *of_dead) if is_constant else (*of_dead, *_initial(seen))


def _one_value(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    names = tuple(name for name, one in seen.base.named_modules().items() if isinstance(one, _NORMS) and one.training)
    raised = re.search(r"more than 1 (value per channel|spatial element)", str(seen.base.error))
    if names and (raised or seen.base.first.samples == 1):
        headline = f"`{names[0]}` normalizes over a single sample: its output does not depend on the input"
        fix = f"train with at least 2 samples in a batch, or use `nn.GroupNorm` in place of `{names[0]}`"
        yield TrainingChange("batchnorm_of_one", headline, fix, module=names[0], on_models=each(names, nn.Module.eval))


def _dead(seen: TrainingEvidence, dead: Activation) -> Iterator[TrainingChange]:
    is_saturated = dead.name in {"sigmoid", "tanh", "hardsigmoid", "hardtanh"}
    feeder, late = dead.feeder, () if seen.base.last is None else seen.base.last.activations
    headline = f"`{dead.name}` after `{feeder}` {'is saturated for' if is_saturated else 'is 0 for'} all samples: no gradient passes"
    named = TrainingChange("dead_units", headline, location=dead.location, module=feeder, parameters=_own_names(seen, [feeder]))
    is_dead = any(activation.is_dead and activation.feeder == feeder for activation in late)
    fix = f"initialize `{feeder}` again: `{seen.model}.{feeder}.reset_parameters()`"
    yield replace(named, fix=fix, on_models=each([feeder], _initialized), is_evident=is_dead)
    if not is_saturated:
        fix, leaky = f"use `F.leaky_relu` in place of `{dead.name}` after `{feeder}`", replaced(dead.name, dead.location, F.leaky_relu)
        yield replace(named, fix=fix, on_call=leaky)


def _initial(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    names, modules = list(seen.unusual), seen.base.named_modules()
    if not names:
        return
    quoted = listed([f"`{name}`" for name in names])
    own = all(hasattr(modules[name], "reset_parameters") for name in names)
    fix = f"initialize the weights of {quoted} with `nn.init.normal_(weight, std={_STANDARD})`"
    if own or any(hasattr(model, "_init_weights") for model in seen.base.models.values()):
        call = ".reset_parameters()" if own else f".apply({seen.model}._init_weights)"
        fix = f"initialize again: `for path in {names!r}: {seen.model}.get_submodule(path){call}`"
    headline = f"`{names[0]}` starts {seen.unusual[names[0]]}: with the default initialization, the model learns {seen.subject}"
    of_names = {"parameters": _own_names(seen, names), "module": names[0], "on_models": each(names, _initialized)}
    yield TrainingChange("bad_init", headline, fix, **of_names)  # type: ignore[arg-type]


def unusual_weights(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Modules whose weights are constant, or far larger or smaller than their own initialization makes them."""
    unusual = {}
    with RandomState.kept():
        for name, module in modules.items():
            own = {key: one for key, one in module._parameters.items() if one is not None}
            if not own or not name or nn.parameter.is_lazy(next(iter(own.values()))):
                continue
            try:
                fresh: Any = copy.deepcopy(module)
                _initialized(fresh)
            except Exception:  # noqa: BLE001, S112 - a module that cannot be copied is not judged
                continue
            for key, parameter in reversed(own.items()):  # the first that is unusual is named
                values, usual = parameter.detach().float(), fresh._parameters[key].detach().float()
                size, expected = float(values.square().mean().sqrt()), float(usual.square().mean().sqrt())
                if values.dim() > 1 and values.numel() > 1 and values.min() == values.max() and usual.min() < usual.max():
                    unusual[name] = f"{_CONSTANT} {number(float(values.flatten()[0]))}"
                elif (expected and size > _FAR * expected) or (values.dim() > 1 and size < expected / _FAR):
                    unusual[name] = f"with {'weights' if values.dim() > 1 else key} {size / expected:.3g} times their usual size"
    return unusual


def _initialized(module: nn.Module) -> None:
    """As the module does it; where it has no method for that, weights as transformers draws them."""
    reset: Any = getattr(module, "reset_parameters", None)
    with torch.no_grad():
        if reset is not None:
            reset()
            return
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dim() > 1:
                nn.init.normal_(parameter, std=_STANDARD)


def _own_names(seen: TrainingEvidence, modules: list[str]) -> tuple[str, ...]:
    """Of the parameters that the modules hold themselves."""
    return tuple(name for name in seen.base.named_parameters() if name.rpartition(".")[0] in modules)


def _conflicts(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields the batch without samples whose inputs equal those of another with other targets."""
    first, samples = seen.base.first, seen.base.first.samples or 0
    targets = [call.target for call in first.losses if call.target.dim()]
    inputs = [tensor for tensor in first.inputs if tensor.dim() and len(tensor) == samples and not tensor.is_complex()]
    if samples < 2 or not inputs or not targets or any(len(target) % samples for target in targets):  # noqa: PLR2004
        return
    labels = torch.cat([target.reshape(samples, -1).double() for target in targets], 1)
    values = torch.cat([tensor.detach().reshape(samples, -1).double() for tensor in inputs], 1)
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(values.unique(dim=0, return_inverse=True)[1].tolist()):
        groups.setdefault(group, []).append(row)
    conflicts = [rows for rows in groups.values() if bool((labels[rows] != labels[rows[:1]]).any())]
    if not conflicts:
        return
    rows, dropped = sorted(chain.from_iterable(conflicts)), sorted(row for rows in conflicts for row in rows[1:])
    headline = f"Rows {listed([*map(str, rows)])} are equal inputs with different labels"
    fix = f"correct the labels of rows {', '.join(map(str, rows))}, or keep one of each group"
    others = rows_of(seen, torch.tensor([row for row in range(samples) if row not in dropped]))
    text = f"without row{'s' if len(dropped) > 1 else ''} {', '.join(map(str, dropped))}"
    yield TrainingChange("conflicting_labels", headline, fix, text=text, rows=tuple(rows), on_call=others, is_evident=True)


def _scale(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    inputs = [tensor.detach().float() for tensor in seen.base.first.inputs if tensor.is_floating_point() and tensor.numel() > 1]
    far = next((tensor for tensor in inputs if _is_far(tensor)), None)
    if far is None:
        return
    mean, deviation = float(far.mean()), float(far.std())
    headline = f"The inputs have mean {number(mean)} and standard deviation {number(deviation)}: normalize them"
    fix = f"normalize the inputs of `{seen.names.get('batch', 'inputs')}`: `x = (x - {mean:.6g}) / {max(deviation, 1e-12):.6g}`"
    yield TrainingChange("input_scale", headline, fix, factor=deviation, on_input=_normalized)


def _is_far(values: Tensor) -> bool:
    columns = values.reshape(len(values), -1) if values.dim() > 1 else values.reshape(-1, 1)
    deviation, mean = float(values.std()), abs(float(values.mean()))
    spread = columns.std(0) if len(columns) > 1 else values.std().reshape(1)
    is_uneven = values.dim() == 2 and float(spread.max()) > _LARGE * max(float(spread.median()), 1e-12)  # noqa: PLR2004 - a table
    return not _SMALL <= deviation <= _LARGE or mean > _LARGE * max(deviation, _SMALL) or is_uneven


def _normalized(values: Tensor) -> Tensor:
    if values.numel() < 2 or not _is_far(values.detach().float()):  # noqa: PLR2004 - of one number there is no deviation
        return values
    over = (0,) if values.dim() == 2 and len(values) > 1 else tuple(range(values.dim()))  # noqa: PLR2004 - a table: by column
    deviation = values.std(over)
    return (values - values.mean(over)) / torch.where(deviation > 0, deviation, 1.0)


def constant_output(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """The same output for all samples, at the first step and at the last one."""
    first, last, inputs = seen.base.first, seen.base.last, seen.base.first.inputs
    if last is None or not first.last_is_same:
        return
    differ = any(
        tensor.dim() and inputs[0].dim() and len(tensor) == len(inputs[0]) and bool((tensor != tensor[:1]).any()) for tensor in inputs
    )
    differ = differ or any(tensor.shape == inputs[0].shape and bool((tensor != inputs[0]).any()) for tensor in inputs[1:])
    entropies = [call.entropy() for call in first.losses if call.is_classes]
    # Whether the loss has come no lower than the shares of the labels explain.
    is_by_chance = len(entropies) == len(first.losses) and seen.base.losses[-1] >= _ALMOST * sum(entropies) > 0
    if not differ or not (last.last_is_same or is_by_chance):
        return
    place, module = first.same_rows or (None, "")
    where = f" from {place} on" if place is not None else ""
    headline = f"The output is the same for all samples{where}: it does not depend on the input"
    fix = f"make `{place.source}` depend on the input" if place is not None and place.source else "make the output depend on the input"
    yield TrainingChange("output_ignores_input", headline, fix, location=place, module=module, is_evident=True)


def capacity(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Fewer samples: that the model learns these alone shows that nothing else is wrong."""
    samples = seen.samples
    if samples is None or samples <= 2 or seen.base.first.samples != samples:  # noqa: PLR2004 - the trial has two
        return
    change = rows_of(seen, torch.arange(2))
    if change is not None:
        headline = f"The model is too small: it learns 2 samples, but not {samples}"
        yield replace(too_small(seen), text="the first 2 samples only", headline=headline, on_call=change)


def too_small(seen: TrainingEvidence) -> TrainingChange:
    """What is left where nothing else helps."""
    headline = f"The model is likely too small for {seen.subject}: no other change helps"
    return TrainingChange("capacity", headline, f"give `{seen.model}` more units or layers")
