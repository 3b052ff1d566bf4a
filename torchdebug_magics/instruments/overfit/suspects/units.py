"""Suspects in the layers: dead units, initial weights, batch statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.format import listed, number
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence, at_line
from torchdebug_magics.instruments.overfit.training.change import Change
from torchdebug_magics.probing.rng import RandomState

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.training.observed_step import Activation

__all__ = ["suspects", "unusual_weights"]

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_CONSTANT = "with all weights"
_STANDARD = 0.02
_FAR = 5.0
"""How many times larger or smaller than by default weights are at the start that are looked at."""


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
