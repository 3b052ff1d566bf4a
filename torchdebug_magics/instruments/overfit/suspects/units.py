"""Suspects in the layers: dead units, initial weights, batch statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import listed, number
from torchdebug_magics.instruments.overfit.suspects.loss_inputs import rows_of
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence, at_line
from torchdebug_magics.instruments.overfit.training.change import Change
from torchdebug_magics.instruments.overfit.training.observed_step import Activation
from torchdebug_magics.probing.rng import RandomState

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_CONSTANT = "with all weights"
_STANDARD = 0.02
_FAR = 5.0
"""How many times larger or smaller than by default weights are at the start that are looked at."""
_ALMOST = 0.98
_SMALL, _LARGE = 0.05, 20.0
"""Standard deviations of an input that are far from 1."""


def suspects(seen: Evidence) -> Iterator[Change]:
    """Yields changes of batch statistics over one value, of dead units and of initial weights."""
    yield from _one_value(seen)
    far = seen.unusual
    dead = next((one for one in seen.base.first.activations if one.is_dead and one.feeder), None)
    is_constant = dead is not None and far.get(dead.feeder, "").startswith(_CONSTANT)
    order = (_initial, _dead) if is_constant else (_dead, _initial)
    for part in order:
        yield from part(seen, far, dead)


def _one_value(seen: Evidence) -> Iterator[Change]:
    names = tuple(name for name, one in seen.base.named_modules().items() if isinstance(one, _NORMS) and one.training)
    raised = "more than 1 value per channel" in str(seen.base.error or "") or "more than 1 spatial element" in str(seen.base.error or "")
    if not names or not (raised or seen.base.first.samples == 1):
        return

    def evaluate(modules: Mapping[str, nn.Module], _parameters: Any) -> None:
        for name in names:
            if name in modules:
                modules[name].train(mode=False)

    yield Change(
        suspect="batchnorm_of_one",
        text="normalization layers in evaluation mode",
        headline=f"`{names[0]}` normalizes over a single sample: its output does not depend on the input",
        fix=f"train with at least 2 samples in a batch, or use `nn.GroupNorm` in place of `{names[0]}`",
        module=names[0],
        on_models=evaluate,
    )


def _dead(seen: Evidence, _far: Mapping[str, str], dead: Activation | None) -> Iterator[Change]:
    if dead is None:
        return
    is_saturated = dead.name in {"sigmoid", "tanh", "hardsigmoid", "hardtanh"}
    what = "is saturated for" if is_saturated else "is 0 for"
    share = {
        "suspect": "dead_units",
        "headline": f"{dead.name} after `{dead.feeder}` {what} all samples: no gradient passes",
        "location": dead.location,
        "module": dead.feeder,
        "parameters": _names(seen, [dead.feeder]),
    }
    last = seen.base.last
    stays = last is not None and any(one.is_dead and one.feeder == dead.feeder for one in last.activations)
    yield Change(
        **share,  # type: ignore[arg-type]
        is_evident=stays,
        text=f"`{dead.feeder}` initialized again",
        fix=f"initialize `{dead.feeder}` again: `{seen.model}.{dead.feeder}.reset_parameters()`",
        on_models=_reset([dead.feeder]),
    )
    if is_saturated:
        return
    is_it = at_line(dead.name, dead.location)
    yield Change(
        **share,  # type: ignore[arg-type]
        text="leaky_relu instead",
        fix=f"use `F.leaky_relu` in place of `{dead.name}` after `{dead.feeder}`",
        on_call=lambda function, args, _kwargs: (F.leaky_relu, args[:1], {}) if is_it(function) and args else None,
    )


def _initial(seen: Evidence, far: Mapping[str, str], _dead: Activation | None) -> Iterator[Change]:
    if not far:
        return
    names = list(far)
    first, what = next(iter(far.items()))
    yield Change(
        suspect="bad_init",
        text=f"{listed([f'`{name}`' for name in names])} initialized again",
        headline=f"`{first}` starts {what}: with the default initialization, the model learns {seen.subject}",
        fix=_repair(seen, names),
        parameters=_names(seen, names),
        module=first,
        on_models=_reset(names),
    )


def _repair(seen: Evidence, names: list[str]) -> str:
    modules = seen.base.named_modules()
    own = all(hasattr(modules[name], "reset_parameters") for name in names)
    call = ".reset_parameters()" if own else f".apply({seen.model}._init_weights)"
    if not own and not any(hasattr(one, "_init_weights") for one in seen.base.models.values()):
        return f"initialize the weights of {listed([f'`{name}`' for name in names])} with `nn.init.normal_(weight, std={_STANDARD})`"
    return f"initialize again: `for path in {names!r}: {seen.model}.get_submodule(path){call}`"


def unusual_weights(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Modules whose weights are constant, or far larger or smaller than their own initialization makes them."""
    found = {}
    with RandomState.kept():
        for name, module in modules.items():
            own = {key: one for key, one in module._parameters.items() if one is not None}
            if not own or not name or nn.parameter.is_lazy(next(iter(own.values()))):
                continue
            fresh = _fresh(module)
            difference = None if fresh is None else _difference(own, fresh)
            if difference:
                found[name] = difference
    return found


def _is_constant(values: torch.Tensor) -> bool:
    return bool(values.max() == values.min())


def _fresh(module: nn.Module) -> dict[str, torch.Tensor] | None:
    try:
        made: Any = copy.deepcopy(module)
        _initialized(made)
    except Exception:  # noqa: BLE001 - a module that cannot be copied is not judged
        return None
    return {key: one.detach() for key, one in made._parameters.items() if one is not None}


def _difference(own: Mapping[str, nn.Parameter], fresh: Mapping[str, torch.Tensor]) -> str:
    for key, parameter in own.items():
        values, usual = parameter.detach().float(), fresh[key].float()
        size, expected = float(values.square().mean().sqrt()), float(usual.square().mean().sqrt())
        if values.dim() > 1 and values.numel() > 1 and _is_constant(values) and not _is_constant(usual):
            return f"{_CONSTANT} {number(float(values.flatten()[0]))}"
        if (expected and size > _FAR * expected) or (values.dim() > 1 and size < expected / _FAR):
            what = "weights" if values.dim() > 1 else key
            return f"with {what} {size / expected:.3g} times their usual size"
    return ""


def _reset(names: list[str]) -> Callable[[Mapping[str, nn.Module], Any], None]:
    def initialize(modules: Mapping[str, nn.Module], _parameters: Any) -> None:
        for name in names:
            if name in modules:
                _initialized(modules[name])

    return initialize


def _initialized(module: nn.Module) -> None:
    """As the module does it; where it has no method for that, weights as transformers draws them."""
    reset: Any = getattr(module, "reset_parameters", None)
    with torch.no_grad():
        if reset is not None:
            reset()
            return
        for one in module._parameters.values():
            if one is not None and one.dim() > 1:
                nn.init.normal_(one, std=_STANDARD)


def _names(seen: Evidence, modules: list[str]) -> tuple[str, ...]:
    """Of the parameters that the modules hold themselves."""
    return tuple(name for name in seen.base.named_parameters() if name.rpartition(".")[0] in modules)


def sample_suspects(seen: Evidence) -> Iterator[Change]:
    """Equal samples with different labels; inputs far from unit scale."""
    yield from _conflicts(seen)
    yield from _scale(seen)


def _conflicts(seen: Evidence) -> Iterator[Change]:
    groups = conflicting_rows(seen)
    if not groups:
        return
    assert seen.samples is not None
    rows = tuple(sorted(row for group in groups for row in group))
    dropped = {row for group in groups for row in group[1:]}
    keep = torch.tensor([row for row in range(seen.samples) if row not in dropped])
    yield Change(
        suspect="conflicting_labels",
        text=f"without row{'s' if len(dropped) > 1 else ''} {', '.join(map(str, sorted(dropped)))}",
        headline=f"Rows {listed([*map(str, rows)])} are equal inputs with different labels",
        fix=f"correct the labels of rows {', '.join(map(str, rows))}, or keep one of each group",
        rows=rows,
        on_call=rows_of(seen, keep),
        is_evident=True,
    )


def conflicting_rows(seen: Evidence) -> list[list[int]]:
    """Groups of samples with equal inputs whose targets differ."""
    samples, first = seen.base.first.samples, seen.base.first
    targets = [call.target for call in first.losses]
    inputs = [one for one in first.inputs if one.dim() and len(one) == samples and not any(one is other for other in targets)]
    if samples is None or samples < 2 or not inputs or not targets or any(len(one) % samples for one in targets if one.dim()):  # noqa: PLR2004
        return []
    labels = torch.cat([one.detach().reshape(samples, -1).double() for one in targets if one.dim()], 1)
    values = torch.cat([one.detach().reshape(samples, -1).double() for one in inputs if not one.is_complex()], 1)
    _, group = values.unique(dim=0, return_inverse=True)
    found = []
    for number_of_group in group.unique().tolist():
        rows = (group == number_of_group).nonzero().flatten()
        if len(rows) > 1 and bool((labels[rows] != labels[rows[:1]]).any()):
            found.append([int(row) for row in rows])
    return found


def _scale(seen: Evidence) -> Iterator[Change]:
    inputs = [one.detach().float() for one in seen.base.first.inputs if one.is_floating_point() and one.numel() > 1]
    far = next((one for one in inputs if _is_far(one)), None)
    if far is None:
        return
    mean, deviation = float(far.mean()), float(far.std())
    name = seen.names.get("batch", "inputs")
    yield Change(
        suspect="input_scale",
        text="inputs with mean 0 and standard deviation 1",
        headline=f"The inputs have mean {number(mean)} and standard deviation {number(deviation)}: normalize them",
        fix=f"normalize the inputs of `{name}`: `x = (x - {mean:.6g}) / {max(deviation, 1e-12):.6g}`",
        factor=deviation,
        on_input=_normalized,
    )


def _is_far(values: Tensor) -> bool:
    columns = values.reshape(len(values), -1) if values.dim() > 1 else values.reshape(-1, 1)
    deviation, mean = float(values.std()), abs(float(values.mean()))
    spread = columns.std(0) if len(columns) > 1 else values.std().reshape(1)
    is_uneven = values.dim() == 2 and float(spread.max()) > _LARGE * max(float(spread.median()), 1e-12)  # noqa: PLR2004 - a table
    return not _SMALL <= deviation <= _LARGE or mean > _LARGE * max(deviation, _SMALL) or is_uneven


def _normalized(values: Tensor) -> Tensor:
    if values.numel() < 2 or not _is_far(values.detach().float()):  # noqa: PLR2004 - of one number there is no deviation
        return values
    if values.dim() == 2 and len(values) > 1:  # noqa: PLR2004 - a table: by column
        deviation = values.std(0)
        return (values - values.mean(0)) / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return (values - values.mean()) / values.std().clamp_min(1e-12)


def constant_output(seen: Evidence) -> Iterator[Change]:
    """The same output for all samples, at the first step and at the last one."""
    first, last = seen.base.first, seen.base.last
    if last is None or not first.last_is_same or not _differ(first.inputs) or not (last.last_is_same or _is_by_chance(seen)):
        return
    place, module = first.same_rows or (None, "")
    where = f" from {place} on" if place is not None else ""
    yield Change(
        suspect="output_ignores_input",
        text="",
        headline=f"The output is the same for all samples{where}: it does not depend on the input",
        fix=f"make `{place.source}` depend on the input" if place is not None and place.source else "make the output depend on the input",
        location=place,
        module=module,
        is_evident=True,
    )


def _is_by_chance(seen: Evidence) -> bool:
    """Whether the loss has come no lower than the shares of the labels explain."""
    entropies = [call.entropy() for call in seen.base.first.losses if call.is_classes]
    return bool(entropies) and len(entropies) == len(seen.base.first.losses) and seen.base.losses[-1] >= _ALMOST * sum(entropies) > 0


def _differ(inputs: list[Tensor]) -> bool:
    """Whether any two samples do."""
    within = any(one.dim() and len(one) == len(inputs[0]) and bool((one != one[:1]).any()) for one in inputs if inputs[0].dim())
    return within or any(one.shape == inputs[0].shape and bool((one != inputs[0]).any()) for one in inputs[1:])


def capacity(seen: Evidence) -> Iterator[Change]:
    """Fewer samples: that the model learns these alone shows that nothing else is wrong."""
    samples = seen.samples
    if samples is None or samples <= 2 or seen.base.first.samples != samples:  # noqa: PLR2004 - the trial has two
        return
    change = rows_of(seen, torch.arange(2))
    if change is not None:
        yield replace(
            too_small(seen),
            text="the first 2 samples only",
            headline=f"The model is too small: it learns 2 samples, but not {samples}",
            on_call=change,
        )


def too_small(seen: Evidence) -> Change:
    """What is left where nothing else helps."""
    return Change(
        suspect="capacity",
        text="",
        headline=f"The model is likely too small for {seen.subject}: no other change helps",
        fix=f"give `{seen.model}` more units or layers",
    )
