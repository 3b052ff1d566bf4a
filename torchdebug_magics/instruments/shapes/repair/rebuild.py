"""A module of torch's own made again with other sizes, and the code that makes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torchdebug_magics.instruments.shapes.repair.edit import Repair, as_typed
from torchdebug_magics.probing.safety import quiet
from torchdebug_magics.probing.source.user_code import owner
from torchdebug_magics.probing.state.rng import RandomState

_FROZEN = 25
"""What it adds to the rank that weights are not trained: whoever froze them does not want new ones."""
_WITHOUT_OWN = (nn.Flatten, nn.Transformer)
"""What holds no weights itself, and decides sizes all the same."""
_PLACES = frozenset(["self", "device", "dtype", "process_group"])
"""Arguments that say where a module is, and not what it is."""


def arguments(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]] | None:
    """The class and its arguments that make a module like this one, by its attributes; None where it is not torch's own."""
    kind: Any = type(module)
    if hasattr(module, "parametrizations"):  # torch makes a class for what it parametrizes
        kind = kind.__mro__[1]
    if owner(kind.__init__.__code__.co_filename) != "torch" or _wrapper(module) is None or not (module._parameters or kind in _WITHOUT_OWN):
        return None
    values = {name: _value(module, name, one.default) for name, one in _parameters(kind).items()}
    unknown = any(value is inspect.Parameter.empty or isinstance(value, torch.Tensor) for value in values.values())
    return None if not values or unknown else (kind, values)


def _parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The arguments of a class of torch's; none where it takes any number of them."""
    named = dict(inspect.signature(nn.RNNBase if issubclass(kind, nn.RNNBase) else kind).parameters)
    if issubclass(kind, nn.RNNBase):  # these hand on what they are given
        del named["mode"]
    if issubclass(kind, nn.RNN):
        named["nonlinearity"] = inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")
    if any(one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD} for one in named.values()):
        return {}
    return {name: one for name, one in named.items() if name not in _PLACES and not name.startswith("_")}


_PARAMETRIZED = {
    "_WeightNorm": "weight_norm",
    "_SpectralNorm": "spectral_norm",
    "WeightNorm": "weight_norm",
    "SpectralNorm": "spectral_norm",
}


def _wrapper(module: nn.Module) -> str | None:
    """The function of torch's that has normed its weight, ``weight_norm``; empty for none, None for one that is not known."""
    hooks = (hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ in _PARAMETRIZED)
    held = getattr(module, "parametrizations", {})
    norms = [*hooks, *(one for name in held for one in held[name])]
    names = {_PARAMETRIZED.get(type(norm).__name__) for norm in norms}
    return names.pop() if len(names) == 1 else None if names else ""


def _value(module: Any, name: str, default: Any) -> Any:
    if isinstance(module, nn.Transformer):
        layer: Any = module.encoder.layers[0]
        of_layers = {"dim_feedforward": layer.linear1.out_features, "dropout": layer.dropout.p, "bias": layer.linear1.bias is not None}
        many = {"num_encoder_layers": len(module.encoder.layers), "num_decoder_layers": len(module.decoder.layers)}
        return {**of_layers, **many}.get(name, getattr(module, name, default))
    if name in {"bias", "affine", "elementwise_affine"}:
        if isinstance(getattr(module, name, None), bool):
            return getattr(module, name)
        held = module.in_proj_bias if isinstance(module, nn.MultiheadAttention) else getattr(module, "bias", None)
        return held is not None
    if name in {"kdim", "vdim"}:
        return None if getattr(module, name) == module.embed_dim else getattr(module, name)
    value = getattr(module, name, default)
    if isinstance(value, tuple) and len(set(value)) == 1 and (name != "normalized_shape" or len(value) == 1):
        return value[0]
    return value


def rebuilt_module(module: nn.Module | None, path: str | None, *, rank: int = 20, why: str = "", **changes: Any) -> list[Repair]:
    """The edit that makes this part anew with some arguments changed; none where it is unknown how it was made."""
    found = arguments(module) if module is not None else None
    if found is None or module is None:
        return []
    kind, made_with = found
    rank += _FROZEN if module._parameters and not any(parameter.requires_grad for parameter in module.parameters()) else 0
    if any(name not in made_with for name in changes):
        return []
    new = {**made_with, **changes}
    if made_on_meta(kind, new) is None:
        return []
    wrapper, made = _wrapper(module), typed(kind, new)
    code = f"{as_typed(path or '')} = {f'{wrapper}({made})' if wrapper else made}"
    return [Repair(code, why, rank, modules={path or "": _maker(kind, new)})]


def made_on_meta(kind: type[nn.Module], given: Mapping[str, Any]) -> nn.Module | None:
    """The module on ``meta``; None where it cannot be."""
    try:
        with RandomState.kept(), quiet(), torch.no_grad():
            return _on_meta(kind, given)
    except Exception:  # noqa: BLE001 - any: a constructor says in its own way that such a module cannot be
        return None


def _on_meta(kind: type[nn.Module], given: Mapping[str, Any]) -> nn.Module:
    # Some classes refuse what they cannot do, even by its usual value.
    needed = {name: given[name] for name, one in _parameters(kind).items() if name in given and given[name] != one.default}
    with torch.device("meta"):
        return kind(**needed)


def _maker(kind: type[nn.Module], new: dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
    def made(old: nn.Module) -> nn.Module:
        like = next(old.parameters(), None)
        module = _on_meta(kind, new)
        if like is not None and like.is_floating_point():
            module = module.to(like.dtype)
        return module.train(old.training)

    return made


def typed(kind: type[nn.Module], new: Mapping[str, Any]) -> str:
    """The call that makes it; what has a default is named, but for the first argument."""
    shown = [
        repr(_short(new[name])) if one.default is one.empty or not at else f"{name}={_short(new[name])!r}"
        for at, (name, one) in enumerate(_parameters(kind).items())
        if name in new and new[name] != one.default
    ]
    prefix = "nn." if kind.__module__.startswith("torch.nn") else ""
    return f"{prefix}{kind.__name__}({', '.join(shown)})"


def _short(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value
