"""Suspects in the layers: dead units, initial weights, batch statistics."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import listed, number
from torchdebug_magics.instruments.overfit.suspects.loss_inputs import rows_of
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import TrainingEvidence, each, replaced
from torchdebug_magics.instruments.overfit.training.change import TrainingChange
from torchdebug_magics.instruments.overfit.training.observed_step import Activation
from torchdebug_magics.probing.state.rng import RandomState

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_CONSTANT = "with all weights"
_STANDARD = 0.02
_FAR = 5.0
"""How many times larger or smaller than by default weights are at the start that are looked at."""
_ALMOST = 0.98
_SMALL, _LARGE = 0.05, 20.0
"""Standard deviations of an input that are far from 1."""


def suspects(seen: TrainingEvidence) -> Iterator[TrainingChange]:
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
    raised = "more than 1 value per channel" in str(seen.base.error or "") or "more than 1 spatial element" in str(seen.base.error or "")
    if not names or not (raised or seen.base.first.samples == 1):
        return

    yield TrainingChange(
        suspect="batchnorm_of_one",
        text="normalization layers in evaluation mode",
        headline=f"`{names[0]}` normalizes over a single sample: its output does not depend on the input",
        fix=f"train with at least 2 samples in a batch, or use `nn.GroupNorm` in place of `{names[0]}`",
        module=names[0],
        on_models=each(names, nn.Module.eval),
    )


def _dead(seen: TrainingEvidence, dead: Activation) -> Iterator[TrainingChange]:
    is_saturated = dead.name in {"sigmoid", "tanh", "hardsigmoid", "hardtanh"}
    last, path = seen.base.last, f"{seen.model}.{dead.feeder}"
    again = TrainingChange(
        suspect="dead_units",
        text=f"`{dead.feeder}` initialized again",
        headline=f"{dead.name} after `{dead.feeder}` {'is saturated for' if is_saturated else 'is 0 for'} all samples: no gradient passes",
        fix=f"initialize `{dead.feeder}` again: `{path}.reset_parameters()`",
        location=dead.location,
        module=dead.feeder,
        parameters=_names(seen, [dead.feeder]),
        on_models=each([dead.feeder], _initialized),
        is_evident=last is not None and any(activation.is_dead and activation.feeder == dead.feeder for activation in last.activations),
    )
    yield again
    if not is_saturated:
        yield replace(
            again,
            is_evident=False,
            text="leaky_relu instead",
            fix=f"use `F.leaky_relu` in place of `{dead.name}` after `{dead.feeder}`",
            on_models=None,
            on_call=replaced(dead.name, dead.location, F.leaky_relu),
        )


def _initial(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    names, modules = list(seen.unusual), seen.base.named_modules()
    if not names:
        return
    quoted = listed([f"`{name}`" for name in names])
    own = all(hasattr(modules[name], "reset_parameters") for name in names)
    if own or any(hasattr(model, "_init_weights") for model in seen.base.models.values()):
        call = ".reset_parameters()" if own else f".apply({seen.model}._init_weights)"
        fix = f"initialize again: `for path in {names!r}: {seen.model}.get_submodule(path){call}`"
    else:
        fix = f"initialize the weights of {quoted} with `nn.init.normal_(weight, std={_STANDARD})`"
    yield TrainingChange(
        suspect="bad_init",
        text=f"{quoted} initialized again",
        headline=f"`{names[0]}` starts {seen.unusual[names[0]]}: with the default initialization, the model learns {seen.subject}",
        fix=fix,
        parameters=_names(seen, names),
        module=names[0],
        on_models=each(names, _initialized),
    )


def unusual_weights(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Modules whose weights are constant, or far larger or smaller than their own initialization makes them."""
    found = {}
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
            if difference := _difference(own, fresh._parameters):
                found[name] = difference
    return found


def _difference(own: Mapping[str, nn.Parameter], fresh: Mapping[str, torch.Tensor]) -> str:
    for key, parameter in own.items():
        values, usual = parameter.detach().float(), fresh[key].detach().float()
        size, expected = float(values.square().mean().sqrt()), float(usual.square().mean().sqrt())
        if values.dim() > 1 and values.numel() > 1 and values.min() == values.max() and usual.min() < usual.max():
            return f"{_CONSTANT} {number(float(values.flatten()[0]))}"
        if (expected and size > _FAR * expected) or (values.dim() > 1 and size < expected / _FAR):
            what = "weights" if values.dim() > 1 else key
            return f"with {what} {size / expected:.3g} times their usual size"
    return ""


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


def _names(seen: TrainingEvidence, modules: list[str]) -> tuple[str, ...]:
    """Of the parameters that the modules hold themselves."""
    return tuple(name for name in seen.base.named_parameters() if name.rpartition(".")[0] in modules)


def _conflicts(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields the batch without samples whose inputs equal those of another with other targets."""
    first, samples = seen.base.first, seen.base.first.samples or 0
    targets = [call.target for call in first.losses]
    inputs = [
        tensor for tensor in first.inputs if tensor.dim() and len(tensor) == samples and not any(tensor is other for other in targets)
    ]
    if samples < 2 or not inputs or not targets or any(len(target) % samples for target in targets if target.dim()):  # noqa: PLR2004
        return
    labels = torch.cat([target.detach().reshape(samples, -1).double() for target in targets if target.dim()], 1)
    values = torch.cat([tensor.detach().reshape(samples, -1).double() for tensor in inputs if not tensor.is_complex()], 1)
    group = values.unique(dim=0, return_inverse=True)[1].tolist()
    groups = [[row for row in range(samples) if group[row] == which] for which in sorted(set(group))]
    groups = [rows for rows in groups if bool((labels[rows] != labels[rows[:1]]).any())]
    if not groups:
        return
    rows = tuple(sorted(row for group in groups for row in group))
    dropped = sorted(row for group in groups for row in group[1:])
    yield TrainingChange(
        suspect="conflicting_labels",
        text=f"without row{'s' if len(dropped) > 1 else ''} {', '.join(map(str, dropped))}",
        headline=f"Rows {listed([*map(str, rows)])} are equal inputs with different labels",
        fix=f"correct the labels of rows {', '.join(map(str, rows))}, or keep one of each group",
        rows=rows,
        on_call=rows_of(seen, torch.tensor([row for row in range(samples) if row not in dropped])),
        is_evident=True,
    )


def _scale(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    inputs = [tensor.detach().float() for tensor in seen.base.first.inputs if tensor.is_floating_point() and tensor.numel() > 1]
    far = next((tensor for tensor in inputs if _is_far(tensor)), None)
    if far is None:
        return
    mean, deviation = float(far.mean()), float(far.std())
    name = seen.names.get("batch", "inputs")
    yield TrainingChange(
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
    yield TrainingChange(
        suspect="output_ignores_input",
        text="",
        headline=f"The output is the same for all samples{where}: it does not depend on the input",
        fix=f"make `{place.source}` depend on the input" if place is not None and place.source else "make the output depend on the input",
        location=place,
        module=module,
        is_evident=True,
    )


def capacity(seen: TrainingEvidence) -> Iterator[TrainingChange]:
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


def too_small(seen: TrainingEvidence) -> TrainingChange:
    """What is left where nothing else helps."""
    return TrainingChange(
        suspect="capacity",
        text="",
        headline=f"The model is likely too small for {seen.subject}: no other change helps",
        fix=f"give `{seen.model}` more units or layers",
    )
